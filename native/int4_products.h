// Products with weights of 4 bits as they are, for processors with AVX2 or AVX-512 but without AVX-512 VNNI. Of each group
//   sum of (factor * number - offset) * x = factor * (sum of number * x) - offset * (sum of x)
// The sums are the same integers that expanded weights give. With AVX-VNNI it is a few rows that are multiplied so.
#pragma once
#include "avx_vnni.h"

namespace {

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// Sums of so many steps' products, before they are multiplied by a factor.
struct Int4Sums {
#if defined(HAVE_AVX_VNNI)
    using Vector = vint;
    static constexpr const char *PATH = AvxVnniMicroKernel::PATH;
    static constexpr int64_t STEPS = INT4_GROUP_STEPS;

    static Vector begin(vint inputs, vint numbers) { return add_byte_products(vint{}, inputs, numbers); }
    static Vector add(Vector sum, vint inputs, vint numbers) { return add_byte_products(sum, inputs, numbers); }
    static vint times(Vector sum, vint factors) { return sum * factors; }
#else
    // Numbers are at most 15 and inputs at most 255, so that the products of two fit 16 bits, and those of four steps
    // too: one instruction multiplies four bytes in each lane, where weights of 8 bits have to be widened first.
    using Vector = vshort;
    static constexpr const char *PATH = LANES == 16 ? "avx512" : "avx2";
    static constexpr int64_t STEPS = 4;

    static Vector begin(vint inputs, vint numbers) { return byte_products(inputs, numbers); }
    static Vector add(Vector sum, vint inputs, vint numbers) { return sum + byte_products(inputs, numbers); }
    static vint times(Vector sum, vint factors) { return pair_products((vint)sum, factors | factors << 16); }
#endif
};

// Rows [FIRST, FIRST + COUNT) of a tile of ROWS, under so many vectors of each step from number VECTOR on: the lower halves
// of their bytes are outputs VECTOR * LANES and so on, the upper ones those 16 outputs further.
template <int ROWS, int FIRST, int COUNT, int VECTOR, int VECTORS>
inline __attribute__((always_inline)) void add_int4(const int32_t *x, const Panel &panel, int32_t *sums) {
    constexpr int64_t LINES = INT4_BLOCK_BYTES / INT4_GROUPS / 64;
    const auto output = [](int i) { return i % 2 * 16 + (VECTOR + i / 2) * LANES; };
    vint total[COUNT][2 * VECTORS];
    for (int r = 0; r < COUNT; r++)
        for (int i = 0; i < 2 * VECTORS; i++) total[r][i] = load(panel.compensation + output(i));
    const char *block = panel.weights;
    for (int64_t step = 0; step < panel.steps; step += INT4_GROUP_STEPS, x += ROWS) {
        const int64_t group = step / INT4_GROUP_STEPS % INT4_GROUPS;
        const char *numbers = block + group * INT4_GROUP_STEPS * INT4_STEP_BYTES + VECTOR * 4 * LANES;
        const char *grids = block + INT4_NUMBERS + group * INT4_GRID_BYTES;
        if (VECTOR == 0 && FIRST == 0)
            for (int64_t line = 0; line < LINES; line++)
                __builtin_prefetch(panel.prefetch_from + (step * panel.prefetch_stride) + 64 * line);
        for (int64_t part = 0; part < INT4_GROUP_STEPS; part += Int4Sums::STEPS) {
            Int4Sums::Vector sum[COUNT][2 * VECTORS];
#pragma GCC unroll 8
            for (int64_t i = 0; i < Int4Sums::STEPS; i++, numbers += INT4_STEP_BYTES, x += ROWS) {
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) {
                    vuint both;
                    std::memcpy(&both, numbers + v * 4 * LANES, sizeof both);
                    const vint low = int4_low(both), high = int4_high(both);
#pragma GCC unroll 12
                    for (int r = 0; r < COUNT; r++) {
                        const vint inputs = vint{} + x[FIRST + r];
                        auto &lower = sum[r][2 * v], &upper = sum[r][2 * v + 1];
                        lower = i ? Int4Sums::add(lower, inputs, low) : Int4Sums::begin(inputs, low);
                        upper = i ? Int4Sums::add(upper, inputs, high) : Int4Sums::begin(inputs, high);
                        settle(lower), settle(upper);
                    }
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < 2 * VECTORS; i++) {
                const vint factors = int4_grids(grids + output(i));
#pragma GCC unroll 12
                for (int r = 0; r < COUNT; r++) total[r][i] += Int4Sums::times(sum[r][i], factors);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 2 * VECTORS; i++) {
            const vint offset = int4_grids(grids + PANEL + output(i));
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++) total[r][i] -= pair_products(vint{} + x[FIRST + r], offset);
        }
        if (group == INT4_GROUPS - 1) block += INT4_BLOCK_BYTES;
    }
#pragma GCC unroll 12
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * VECTORS; i++) store(sums + (FIRST + r) * PANEL + output(i), total[r][i]);
}

// Registers are left for numbers and a row's input.
struct Int4Blocks {
    static constexpr int MOST = LANES == 16 ? 12 : 6, ALL = 16 / LANES;
    static constexpr int vectors(int rows) { return rows > 2 ? 1 : ALL; }
};

struct Int4MicroKernel {
    using Sum = int32_t;
    static constexpr const char *PATH = Int4Sums::PATH;
    static constexpr bool TAKES_OTHER_ROWS = true;

    // Whole groups, each with the sum of its inputs behind it.
    static int64_t row_words(int64_t inputs) {
        return (inputs + INT4_GROUP - 1) / INT4_GROUP * (INT4_GROUP_STEPS + 1);
    }
    static void take_rows(const uint32_t *from, int64_t rows, int64_t inputs, uint32_t *to) {
        const int64_t steps = (inputs + 3) / 4;
        for (int64_t step = 0; step < steps; step += INT4_GROUP_STEPS) {
            const int64_t left = steps - step, count = left < INT4_GROUP_STEPS ? left : INT4_GROUP_STEPS;
            std::memcpy(to, from, 4 * count * rows);
            std::memset(to + count * rows, 0, 4 * (INT4_GROUP_STEPS + 1 - count) * rows);
            uint32_t *sums = to + INT4_GROUP_STEPS * rows;
            for (int64_t i = 0; i < count; i++, from += rows)
                for (int64_t r = 0; r < rows; r++) {
                    const uint32_t pairs = (from[r] & 0x00ff00ffu) + (from[r] >> 8 & 0x00ff00ffu);
                    sums[r] += (pairs & 0xffff) + (pairs >> 16);
                }
            to = sums + rows;
        }
    }

    template <int ROWS> static NOINLINE void run(const char *x, const Panel &panel, Sum *sums) {
        in_blocks<Int4Blocks, ROWS>([=, &panel](auto first, auto rows, auto vector, auto vectors) {
            add_int4<ROWS, first, rows, vector, vectors>(reinterpret_cast<const int32_t *>(x), panel, sums);
        });
    }
};

#if defined(HAVE_AVX_VNNI)
#define HAVE_INT4_FEW_ROWS

// Of more it pays to expand a panel.
struct Int4FewRows : Int4MicroKernel {
    static constexpr int MOST = 6;

    static void run(const char *x, int64_t, int64_t rows, const Panel &panel, Sum *sums) {
        with_rows<MOST>(rows, [&](auto count) { Int4MicroKernel::run<count>(x, panel, sums); });
    }
};
#else
#define HAVE_INT4_PRODUCTS
#endif
#endif

} // namespace

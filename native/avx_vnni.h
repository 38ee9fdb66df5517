// Products of bytes for processors that have VNNI in AVX's registers alone, as those of laptops since 2021 do.
#pragma once
#include "blocks.h"
#include "format.h"

namespace {

#if defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
#define HAVE_AVX_VNNI

// To each lane the products of its four bytes, unsigned of `inputs` and signed of `weights`.
inline vint add_byte_products(vint sum, vint inputs, vint weights) {
    return (vint)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)inputs, (__m256i)weights);
}

// Rows [FIRST, FIRST + COUNT) of a tile of ROWS, under so many vectors of each step from number VECTOR on.
template <int ROWS, int FIRST, int COUNT, int VECTOR, int VECTORS>
inline __attribute__((always_inline)) void add_bytes(const int32_t *x, const Panel &panel, int32_t *sums) {
    vint sum[COUNT][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load(panel.compensation + (VECTOR + v) * LANES);
    const bool streams = panel.prefetch_stride == Int8Format::STEP_BYTES;
    for (int64_t step = 0; step < panel.steps; step++, x += ROWS) {
        const char *weights = panel.weights + step * Int8Format::STEP_BYTES + VECTOR * 4 * LANES;
        if (FIRST == 0 && streams) {
            for (int v = 0; v < VECTORS; v += 2)
                __builtin_prefetch(panel.prefetch_from + step * Int8Format::STEP_BYTES + (VECTOR + v) * 4 * LANES);
        } else if (FIRST == 0 && VECTOR == 0) {
            // Into L2: the panel in use fills L1.
            __builtin_prefetch(panel.prefetch_from + step * panel.prefetch_stride, 0, 2);
        }
        vint own[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) own[v] = load(reinterpret_cast<const int32_t *>(weights) + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] = add_byte_products(sum[r][v], vint{} + x[FIRST + r], own[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(sums + (FIRST + r) * PANEL + (VECTOR + v) * LANES, sum[r][v]);
}

// Twelve of sixteen registers for sums; the others hold weights and a row's input.
struct ByteBlocks {
    static constexpr int MOST = 6, ALL = PANEL / LANES;
    static constexpr int vectors(int rows) { return rows > 2 ? 2 : ALL; }
};

struct AvxVnniMicroKernel {
    using Sum = int32_t;
    static constexpr const char *PATH = "avxvnni";

    template <int ROWS> static NOINLINE void run(const char *x, const Panel &panel, Sum *sums) {
        in_blocks<ByteBlocks, ROWS>([=, &panel](auto first, auto rows, auto vector, auto vectors) {
            add_bytes<ROWS, first, rows, vector, vectors>(reinterpret_cast<const int32_t *>(x), panel, sums);
        });
    }
};
#endif

} // namespace

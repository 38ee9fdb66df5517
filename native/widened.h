// Products of bfloat16 weights in float32, for processors that multiply no bfloat16 or do so more slowly: weights are widened in registers by a
// shift and a mask, two operations for a vector of pairs, which all rows of a tile share; rows are widened once for all
// panels. Products of two bfloat16 numbers are exact in float32, so only sums round.
#pragma once
#include "format.h"
#include "team.h"

namespace {

// Whether a format's micro-kernel takes rows of bfloat16 as float32.
template <typename Format> constexpr bool WIDENS_ROWS = false;

#if defined(__AVX2__) && !defined(__AVX512BF16__)
#define HAVE_WIDENED
template <> inline constexpr bool WIDENS_ROWS<Bf16Format> = true;

// A vector of pairs: the lower of each, and the upper.
inline vfloat lower_of(vuint pairs) { return (vfloat)(pairs << 16); }
inline vfloat upper_of(vuint pairs) { return (vfloat)(pairs & 0xffff0000u); }

// So many steps are summed by themselves, which keeps sums small and so more exact.
constexpr int64_t WIDENED_STEPS = 128;

// Rows [FIRST, FIRST + COUNT) of a tile of ROWS, under so many vectors of a panel from output number OUTPUT on: adds the
// products of steps [begin, end) to the sums, or begins them. x holds both inputs of a step for each row, then the next
// step's.
template <int ROWS, int FIRST, int COUNT, int OUTPUT, int VECTORS>
inline __attribute__((always_inline)) void add_widened(const float *x, const Panel &panel, const Range &steps,
                                                       float *sums) {
    vfloat sum[COUNT][VECTORS] = {};
    const bool streams = panel.prefetch_stride == Bf16Format::STEP_BYTES;
    for (int64_t step = steps.begin; step < steps.end; step++) {
        const float *inputs = x + step * 2 * ROWS + 2 * FIRST;
        const char *weights = panel.weights + step * Bf16Format::STEP_BYTES + 4 * OUTPUT;
        if (streams) {
            for (int i = 0; i < VECTORS * LANES; i += 16)
                __builtin_prefetch(panel.prefetch_from + step * Bf16Format::STEP_BYTES + 4 * (OUTPUT + i));
        } else if (OUTPUT == 0) {
            __builtin_prefetch(panel.prefetch_from + step * panel.prefetch_stride, 0, 2);
        }
        vuint pairs[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) std::memcpy(&pairs[v], weights + v * sizeof(vuint), sizeof(vuint));
#pragma GCC unroll 12
        for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] += lower_of(pairs[v]) * inputs[2 * r];
        if (LANES == 8) {
            // Read again, since sixteen registers do not hold them meanwhile.
            asm volatile("" ::: "memory");
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) std::memcpy(&pairs[v], weights + v * sizeof(vuint), sizeof(vuint));
        }
#pragma GCC unroll 12
        for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] += upper_of(pairs[v]) * inputs[2 * r + 1];
    }
#pragma GCC unroll 12
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *to = sums + (FIRST + r) * PANEL + OUTPUT + v * LANES;
            store(to, steps.begin ? load(to) + sum[r][v] : sum[r][v]);
        }
}

template <int ROWS, int FIRST, int COUNT, int OUTPUT, int VECTORS>
inline void widened_block(const float *x, const Panel &panel, float *sums) {
    for (int64_t begin = 0; begin < panel.steps; begin += WIDENED_STEPS) {
        const int64_t end = begin + WIDENED_STEPS < panel.steps ? begin + WIDENED_STEPS : panel.steps;
        add_widened<ROWS, FIRST, COUNT, OUTPUT, VECTORS>(x, panel, Range{begin, end}, sums);
    }
}

// In blocks whose sums leave registers for weights and a row's input: 24 of 32, or 12 of 16; fewer would wait for each other.
template <int ROWS, int FIRST = 0, int OUTPUT = 0>
inline void widened_products(const float *x, const Panel &panel, float *sums) {
    constexpr int MOST = LANES == 16 ? 12 : 5, COUNT = ROWS - FIRST < MOST ? ROWS - FIRST : MOST;
    constexpr int VECTORS = LANES == 16 || COUNT > 3 ? 2 : 4;
    widened_block<ROWS, FIRST, COUNT, OUTPUT, VECTORS>(x, panel, sums);
    if constexpr (OUTPUT + VECTORS * LANES < PANEL)
        widened_products<ROWS, FIRST, OUTPUT + VECTORS * LANES>(x, panel, sums);
    else if constexpr (FIRST + COUNT < ROWS)
        widened_products<ROWS, FIRST + COUNT>(x, panel, sums);
}
#endif

} // namespace

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

// So many steps are summed by themselves, which keeps sums small and so more exact. Widened they leave room in the nearest
// cache for what a tile needs of its rows.
constexpr int64_t WIDENED_STEPS = 64;

// A part of a panel, widened: of each step the first weight of every output, then the second.
inline void widen_part(const char *weights, int64_t steps, float *out) {
    for (int64_t step = 0; step < steps; step++, weights += Bf16Format::STEP_BYTES, out += 2 * PANEL)
        for (int o = 0; o < PANEL; o += LANES) {
            vuint pairs;
            std::memcpy(&pairs, weights + 4 * o, sizeof pairs);
            store(out + o, lower_of(pairs));
            store(out + PANEL + o, upper_of(pairs));
        }
}

// The first or second weight of some outputs in a step, of weights as they are packed or widened before.
template <bool WIDENED> inline vfloat step_weights(const char *weights, int64_t step, int half, int output) {
    if constexpr (WIDENED) return load(reinterpret_cast<const float *>(weights) + (2 * step + half) * PANEL + output);
    vuint pairs;
    std::memcpy(&pairs, weights + step * Bf16Format::STEP_BYTES + 4 * output, sizeof pairs);
    return half ? upper_of(pairs) : lower_of(pairs);
}

// Rows [FIRST, FIRST + COUNT) of a tile of ROWS, under so many vectors of a panel from output number OUTPUT on: begins the
// sums with the products of a part's steps, or adds those. x holds both inputs of a step for each row, then the next
// step's.
template <bool WIDENED, int ROWS, int FIRST, int COUNT, int OUTPUT, int VECTORS>
inline __attribute__((always_inline)) void add_widened(const float *x, const Panel &part, bool adds, float *sums) {
    vfloat sum[COUNT][VECTORS] = {};
    const bool streams = part.prefetch_stride == Bf16Format::STEP_BYTES;
    for (int64_t step = 0; step < part.steps; step++) {
        const float *inputs = x + step * 2 * ROWS + 2 * FIRST;
        if (streams) {
            for (int i = 0; i < VECTORS * LANES; i += 16)
                __builtin_prefetch(part.prefetch_from + step * Bf16Format::STEP_BYTES + 4 * (OUTPUT + i));
        } else if (OUTPUT == 0 && FIRST == 0) {
            __builtin_prefetch(part.prefetch_from + step * part.prefetch_stride, 0, 2);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            vfloat weights[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                weights[v] = step_weights<WIDENED>(part.weights, step, half, OUTPUT + v * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sum[r][v] += weights[v] * inputs[2 * r + half];
            // Pairs are read again, since sixteen registers do not hold them meanwhile.
            if (LANES == 8) asm volatile("" ::: "memory");
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *to = sums + (FIRST + r) * PANEL + OUTPUT + v * LANES;
            store(to, adds ? load(to) + sum[r][v] : sum[r][v]);
        }
}

// A part's steps for a whole tile, in blocks whose sums leave registers for weights and a row's input: 24 of 32, or 12 of
// 16; fewer would wait for each other.
template <bool WIDENED, int ROWS, int FIRST = 0, int OUTPUT = 0>
inline void widened_part(const float *x, const Panel &part, bool adds, float *sums) {
    constexpr int MOST = LANES == 16 ? 12 : 6, LEFT = ROWS - FIRST;
    constexpr int COUNT = LEFT <= MOST ? LEFT : LEFT < 2 * MOST ? (LEFT + 1) / 2 : MOST;
    constexpr int VECTORS = LANES == 16 || COUNT > 3 ? 2 : 4;
    add_widened<WIDENED, ROWS, FIRST, COUNT, OUTPUT, VECTORS>(x, part, adds, sums);
    if constexpr (OUTPUT + VECTORS * LANES < PANEL)
        widened_part<WIDENED, ROWS, FIRST, OUTPUT + VECTORS * LANES>(x, part, adds, sums);
    else if constexpr (FIRST + COUNT < ROWS)
        widened_part<WIDENED, ROWS, FIRST + COUNT>(x, part, adds, sums);
}

// All steps of a panel for a tile.
template <int ROWS> inline void widened_products(const float *x, const Panel &panel, float *sums) {
    for (int64_t from = 0; from < panel.steps; from += WIDENED_STEPS) {
        Panel part = panel;
        part.weights += from * Bf16Format::STEP_BYTES;
        part.prefetch_from += from * panel.prefetch_stride;
        part.steps = panel.steps - from < WIDENED_STEPS ? panel.steps - from : WIDENED_STEPS;
        widened_part<false, ROWS>(x + from * 2 * ROWS, part, from > 0, sums);
    }
}
#endif

} // namespace

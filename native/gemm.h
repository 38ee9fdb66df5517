// Products with weights that are packed once: out = x * weight^T + bias, bfloat16 in and out, summed in float32.
//
// The weight [n, k] lies in panels of 32 outputs, each [k / 2, 32, 2]: one load holds two inputs' weights of 16 outputs,
// which is what vdpbf16ps multiplies. A thread walks its panels in the order in which they lie, so at few rows the
// weight streams from memory once; at many rows a panel stays in the cache while the rows pass by. A row's sums run
// over k in one order, whatever the number of rows or threads.
#pragma once
#include "simd.h"

#if defined(__AVX512BF16__)
#include <omp.h>

namespace {

constexpr int PANEL = 32;
constexpr int TILE_ROWS = 12;   // 24 sums, two weights and an input fit the 32 registers
constexpr int TASK_ROWS = 96;
constexpr int AHEAD = 24;       // pairs of inputs, of 128 bytes of weight each: how far to prefetch what streams
// So many multiplications take one thread as long as waking the others.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 19;

struct Product {
    const bf16 *x;
    int64_t stride;             // of x, in elements
    const bf16 *panel;
    const float *bias;          // of the panel's outputs; may be null
    bf16 *out;
    int64_t outs;               // stride of out
    int64_t pairs;
    uint32_t mask;              // which of the panel's outputs exist
    const bf16 *next;           // the next panel, to be fetched meanwhile by the first two tiles; may be null
};

// Rows [row, row + ROWS) of a panel's outputs; fetches `step` elements from `fetch` on for each pair of inputs.
template <int ROWS> inline void multiply_tile(const Product &p, int64_t row, const bf16 *fetch, int64_t step) {
    __m512 sums[ROWS][2];
    const __m512 low = p.bias ? _mm512_loadu_ps(p.bias) : _mm512_setzero_ps();
    const __m512 high = p.bias ? _mm512_loadu_ps(p.bias + 16) : _mm512_setzero_ps();
    for (int r = 0; r < ROWS; r++) sums[r][0] = low, sums[r][1] = high;
    const bf16 *x = p.x + row * p.stride;
    for (int64_t pair = 0; pair < p.pairs; pair++) {
        const bf16 *weights = p.panel + pair * 2 * PANEL;
        const auto first = (__m512bh)_mm512_loadu_si512(weights);
        const auto second = (__m512bh)_mm512_loadu_si512(weights + PANEL);
        if (step > PANEL) {
            __builtin_prefetch(fetch + pair * step);
            __builtin_prefetch(fetch + pair * step + PANEL);
        } else {
            __builtin_prefetch(fetch + pair * step, 0, 2);  // into L2: the panel in use fills L1
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            int32_t two;
            std::memcpy(&two, x + r * p.stride + 2 * pair, sizeof two);
            const auto inputs = (__m512bh)_mm512_set1_epi32(two);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], inputs, first);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], inputs, second);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        bf16 *to = p.out + (row + r) * p.outs;
        _mm256_mask_storeu_epi16(to, __mmask16(p.mask), (__m256i)_mm512_cvtneps_pbh(sums[r][0]));
        if (p.mask >> 16)
            _mm256_mask_storeu_epi16(to + 16, __mmask16(p.mask >> 16), (__m256i)_mm512_cvtneps_pbh(sums[r][1]));
    }
}

// A tile of `rows`, at most ROWS.
template <int ROWS>
inline void multiply_some(const Product &p, int64_t row, int64_t rows, const bf16 *fetch, int64_t step) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            multiply_tile<ROWS>(p, row, fetch, step);
        else
            multiply_some<ROWS - 1>(p, row, rows, fetch, step);
    }
}

inline void multiply_rows(const Product &p, int64_t row, int64_t end) {
    // A single tile reads the panel as it comes from memory; the first two of several fetch one line of the next each.
    const bool single = end - row <= TILE_ROWS;
    const bf16 *fetch = single ? p.panel + AHEAD * 2 * PANEL : p.next;
    const int64_t step = single ? 2 * PANEL : fetch ? PANEL : 0;
    if (!fetch) fetch = p.panel;
    const int64_t tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS, rows = end - row;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
        multiply_some<TILE_ROWS>(p, row + first, last - first, fetch, step);
        if (tile == 0 && step == PANEL) fetch += p.pairs * PANEL;
    }
}

void linear(const bf16 *x, const bf16 *packed, const float *bias, bf16 *out, int64_t rows, int64_t outs, int64_t ins) {
    const int64_t panels = (outs + PANEL - 1) / PANEL, stretches = (rows + TASK_ROWS - 1) / TASK_ROWS;
    const int64_t tasks = panels * stretches, pairs = ins / 2;
#pragma omp parallel if (rows * outs * ins >= PARALLEL_PRODUCTS)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int64_t task = tasks * thread / threads; task < tasks * (thread + 1) / threads; task++) {
            const int64_t panel = task / stretches, row = task % stretches * TASK_ROWS, left = outs - panel * PANEL;
            const Product product{x,
                                  ins,
                                  packed + panel * ins * PANEL,
                                  bias ? bias + panel * PANEL : nullptr,
                                  out + panel * PANEL,
                                  outs,
                                  pairs,
                                  left >= PANEL ? ~0u : (1u << left) - 1,
                                  task % stretches + 1 == stretches ? packed + (panel + 1) * ins * PANEL : nullptr};
            multiply_rows(product, row, row + TASK_ROWS < rows ? row + TASK_ROWS : rows);
        }
    }
}

// Packs weight [outs, ins], ins being even; outputs up to a whole panel are zeros.
void pack(const bf16 *weight, bf16 *packed, int64_t outs, int64_t ins) {
    const int64_t panels = (outs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (outs * ins >= PARALLEL_PRODUCTS)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = panel * PANEL + i;
            bf16 *to = packed + panel * ins * PANEL + 2 * i;
            for (int64_t pair = 0; pair < ins / 2; pair++, to += 2 * PANEL) {
                if (output < outs)
                    std::memcpy(to, weight + output * ins + 2 * pair, 2 * sizeof(bf16));
                else
                    std::memset(to, 0, 2 * sizeof(bf16));
            }
        }
}

} // namespace
#endif

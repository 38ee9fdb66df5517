// Products with weights that are packed once: x * weight^T, summed in float32 (bfloat16) or exactly in int32 (int8).
//
// The weight [outs, ins] lies in panels of 32 outputs, and a panel in steps of 128 bytes, each holding 4 bytes of every
// output: two bfloat16 or four int8 inputs, which is what one vdpbf16ps or vpdpbusd multiplies. At few rows the weight
// streams from memory once; at many a panel stays in the cache while the rows pass by. A row's sums run over the inputs
// in one order, whatever the number of rows or threads.
#pragma once
#include <type_traits>

#include "sink.h"
#include "team.h"

namespace {

constexpr int TILE_ROWS = 12;   // 24 sums, two weights and an input fit the 32 registers of AVX-512
constexpr int STEP_BYTES = 4 * PANEL;
constexpr int AHEAD = 24 * STEP_BYTES;  // how far to prefetch what streams
// So many multiplications take one thread as long as waking the others.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 19;

// Rows cut into tiles of nearly equal size, and those into groups. Where there are enough of them every thread has a
// group, of as many tiles as any other: what it prepares it multiplies itself, and little travels from core to core.
struct Tiles {
    int64_t rows, count, groups;

    Tiles(int64_t rows, const Team &team) : rows(rows), count((rows + TILE_ROWS - 1) / TILE_ROWS), groups(1) {
        if (count < 2 * team.threads) return;
        groups = team.threads;
        count = (count + groups - 1) / groups * groups;
    }
    int64_t first(int64_t tile) const { return rows * tile / count; }
    Range group(int64_t index) const { return {count * index / groups, count * (index + 1) / groups}; }
};

// A panel's weights, and what to fetch meanwhile: `pace` bytes from `fetch` on for each step.
struct Panel {
    const char *weights;
    const int32_t *starts;  // where sums begin; of int8 weights only
    int64_t steps;
    const char *fetch;
    int64_t pace;
};

#if defined(__AVX512BF16__)
struct Bf16Dot {
    using Sum = float;
    using Vector = __m512;
    static Vector start(const Panel &, int) { return _mm512_setzero_ps(); }
    static Vector add(Vector sum, __m512i inputs, __m512i weights) {
        return _mm512_dpbf16_ps(sum, (__m512bh)inputs, (__m512bh)weights);
    }
};
#endif

#if defined(__AVX512VNNI__)
struct Int8Dot {
    using Sum = int32_t;
    using Vector = __m512i;
    static Vector start(const Panel &panel, int half) { return _mm512_loadu_si512(panel.starts + 16 * half); }
    static Vector add(Vector sum, __m512i inputs, __m512i weights) {
        return _mm512_dpbusd_epi32(sum, inputs, weights);
    }
};
#endif

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
// sums[r][0:32] of ROWS rows.
template <typename Dot, int ROWS>
inline void multiply_tile(const char *x, const Panel &panel, typename Dot::Sum *sums) {
    typename Dot::Vector sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++) sum[r][half] = Dot::start(panel, half);
    const bool streams = panel.pace == STEP_BYTES;
    for (int64_t step = 0; step < panel.steps; step++) {
        const char *weights = panel.weights + step * STEP_BYTES;
        const __m512i first = _mm512_loadu_si512(weights), second = _mm512_loadu_si512(weights + 64);
        if (streams) {
            __builtin_prefetch(panel.fetch + step * STEP_BYTES);
            __builtin_prefetch(panel.fetch + step * STEP_BYTES + 64);
        } else {
            __builtin_prefetch(panel.fetch + step * panel.pace, 0, 2);  // into L2: the panel in use fills L1
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, x + 4 * (step * ROWS + r), sizeof four);
            const __m512i inputs = _mm512_set1_epi32(four);
            sum[r][0] = Dot::add(sum[r][0], inputs, first);
            sum[r][1] = Dot::add(sum[r][1], inputs, second);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++) std::memcpy(sums + r * PANEL + 16 * half, &sum[r][half], 64);
}
#endif

#if !defined(__AVX512VNNI__)
struct Int8Dot {
    using Sum = int32_t;
};

#if defined(__AVX2__)
// Sixteen outputs of one row: bytes are widened, since the pairwise byte product of AVX2 saturates.
template <int ROWS> inline void multiply_half(const char *x, const Panel &panel, int half, int32_t *sums) {
    __m256i sum[4] = {};
    for (int64_t step = 0; step < panel.steps; step++) {
        int32_t four;
        std::memcpy(&four, x + 4 * step * ROWS, sizeof four);
        const __m256i inputs = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(four)));
        const char *weights = panel.weights + step * STEP_BYTES + 64 * half;
        for (int i = 0; i < 4; i++) {
            const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(weights + 16 * i));
            sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(inputs, _mm256_cvtepi8_epi16(bytes)));
        }
    }
    for (int i = 0; i < 4; i++) {
        int32_t pairs[8];
        std::memcpy(pairs, &sum[i], sizeof pairs);
        for (int o = 16 * half + 4 * i, p = 0; p < 8; o++, p += 2) sums[o] = panel.starts[o] + pairs[p] + pairs[p + 1];
    }
}
#endif

template <typename Dot, int ROWS>
inline void multiply_tile(const char *x, const Panel &panel, int32_t *sums) {
    static_assert(std::is_same_v<Dot, Int8Dot>, "bfloat16 is multiplied by AVX-512 BF16 alone");
    for (int r = 0; r < ROWS; r++, x += 4, sums += PANEL) {
#if defined(__AVX2__)
        for (int half = 0; half < 2; half++) multiply_half<ROWS>(x, panel, half, sums);
#else
        int32_t sum[PANEL];
        std::memcpy(sum, panel.starts, sizeof sum);
        const auto *bytes = reinterpret_cast<const uint8_t *>(x);
        const auto *weights = reinterpret_cast<const int8_t *>(panel.weights);
        for (int64_t step = 0; step < panel.steps; step++, bytes += 4 * ROWS, weights += STEP_BYTES)
            for (int o = 0; o < PANEL; o++)
                for (int i = 0; i < 4; i++) sum[o] += int32_t(bytes[i]) * weights[4 * o + i];
        std::memcpy(sums, sum, sizeof sum);
#endif
    }
}
#endif

// A tile of `rows`, at most ROWS.
template <typename Dot, int ROWS>
inline void multiply_some(const char *x, int64_t rows, const Panel &panel, typename Dot::Sum *sums) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            multiply_tile<Dot, ROWS>(x, panel, sums);
        else
            multiply_some<Dot, ROWS - 1>(x, rows, panel, sums);
    }
}

// The rows of some tiles under one panel of a weight; `next` is the panel to fetch meanwhile, or null.
template <typename Dot, typename Into>
void multiply(const Rows &x, const Tiles &tiles, const Range &some, const Weight &weight, int64_t index,
              const char *next, const Into &sink) {
    const int64_t steps = weight.steps();
    Panel panel{static_cast<const char *>(weight.packed) + index * steps * STEP_BYTES,
                weight.int8 ? weight.starts + index * PANEL : nullptr, steps, nullptr, 0};
    const bool single = some.end - some.begin == 1;
    alignas(64) typename Dot::Sum sums[TILE_ROWS * PANEL];
    for (int64_t tile = some.begin; tile < some.end; tile++) {
        // A single tile reads the panel as it comes from memory; the first two of several fetch half of the next each.
        const int64_t nth = tile - some.begin;
        const bool fetch = next && nth < 2;
        panel.pace = single ? STEP_BYTES : fetch ? STEP_BYTES / 2 : 0;
        panel.fetch = single ? panel.weights + AHEAD : fetch ? next + nth * steps * panel.pace : panel.weights;
        const int64_t first = tiles.first(tile), rows = tiles.first(tile + 1) - first;
        multiply_some<Dot, TILE_ROWS>(x.data + first * x.row_bytes, rows, panel, sums);
        sink.take(weight, index, first, int(rows), x, sums);
    }
}

// This thread's part of a product; the caller waits before and after.
template <typename Dot, typename Into>
void product_of(const Rows &x, const Tiles &tiles, const Weight &weight, const Into &sink, Team &team) {
    const int64_t panels = weight.panels(), panel_bytes = weight.steps() * STEP_BYTES, tasks = panels * tiles.groups;
    // Neighbouring panels follow each other in memory, so what a thread takes streams.
    for (int64_t task = team.take_near(tasks); task >= 0; task = team.take_near(tasks)) {
        const int64_t panel = task % panels;
        const char *next = static_cast<const char *>(weight.packed) + (panel + 1) * panel_bytes;
        multiply<Dot>(x, tiles, tiles.group(task / panels), weight, panel, panel + 1 < panels ? next : nullptr, sink);
    }
}

// What becomes of the sums is for a sink to know: Sink, or the encoder's.
template <typename Into>
void product(const Rows &x, const Tiles &tiles, const Weight &weight, const Into &sink, Team &team) {
    if (weight.int8)
        product_of<Int8Dot>(x, tiles, weight, sink, team);
#if defined(__AVX512BF16__)
    else
        product_of<Bf16Dot>(x, tiles, weight, sink, team);
#endif
}

} // namespace

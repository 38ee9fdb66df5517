// Rows interleaved for products, so that one cache line feeds a step of a whole tile.
#pragma once
#include "simd.h"

namespace {

// What another core read last is fetched for writing this far ahead; it writes no faster than it gets the lines.
constexpr int64_t WRITE_AHEAD = 1024;

#if defined(__AVX512F__)
// Lane i of row j becomes lane j of row i.
inline void transpose(__m512i (&v)[16]) {
    __m512i w[16];
    for (int i = 0; i < 16; i += 2) {
        w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(w[i + j], w[i + 2 + j]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(w[i + j], w[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            w[i + 8 * j] = _mm512_shuffle_i32x4(v[i + 8 * j], v[i + 4 + 8 * j], 0x88);
            w[i + 4 + 8 * j] = _mm512_shuffle_i32x4(v[i + 8 * j], v[i + 4 + 8 * j], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0xdd);
    }
}

// Interleaves `rows`, at most 16, of `steps` words each, `stride` words apart: to[step][row] = from[row][step].
inline NOINLINE void interleave(const uint32_t *from, int64_t stride, int64_t rows, int64_t steps, uint32_t *to) {
    const auto lanes = __mmask16((1u << rows) - 1);
    for (int64_t step = 0; step < steps; step += 16) {
        const int64_t count = steps - step < 16 ? steps - step : 16;
        __m512i words[16];
        for (int r = 0; r < 16; r++)
            words[r] = r < rows ? _mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from + r * stride + step)
                                : _mm512_setzero_si512();
        transpose(words);
        for (int64_t i = 0; i < count; i++, to += rows) {
            __builtin_prefetch(reinterpret_cast<const char *>(to) + WRITE_AHEAD, 1);
            _mm512_mask_storeu_epi32(to, lanes, words[i]);
        }
    }
}
#else
inline NOINLINE void interleave(const uint32_t *from, int64_t stride, int64_t rows, int64_t steps, uint32_t *to) {
    for (int64_t step = 0; step < steps; step++, to += rows) {
        __builtin_prefetch(reinterpret_cast<const char *>(to) + WRITE_AHEAD, 1);
        for (int64_t r = 0; r < rows; r++) to[r] = from[r * stride + step];
    }
}
#endif

} // namespace

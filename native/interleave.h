// Rows laid out for products: interleaved, so that one cache line feeds a step of a whole tile, or as AMX reads them.
#pragma once
#include <type_traits>

#include "kernels.h"
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
inline void interleave_each(const uint32_t *from, int64_t stride, int64_t rows, int64_t steps, uint32_t *to) {
    for (int64_t step = 0; step < steps; step++, to += rows) {
        __builtin_prefetch(reinterpret_cast<const char *>(to) + WRITE_AHEAD, 1);
        for (int64_t r = 0; r < rows; r++) to[r] = from[r * stride + step];
    }
}

#if defined(__AVX2__)
// Lane i of row j becomes lane j of row i.
inline void transpose(__m256i (&v)[8]) {
    __m256i w[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2)
        w[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]), w[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 8
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm256_unpacklo_epi64(w[i + j], w[i + 2 + j]);
            v[i + 2 * j + 1] = _mm256_unpackhi_epi64(w[i + j], w[i + 2 + j]);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        w[i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
        w[i + 4] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v[i] = w[i];
}

// Eight steps at a time, of up to eight rows and then of the others. What a store has beyond a step's rows, the next
// step's overwrites, so the last steps, behind which is somebody else's, are written word by word.
inline NOINLINE void interleave(const uint32_t *from, int64_t stride, int64_t rows, int64_t steps, uint32_t *to) {
    static_assert(LANES == 8);
    constexpr int64_t AT_ONCE = 8, MOST = 2 * AT_ONCE;
    int64_t step = 0;
    for (; step * rows + AT_ONCE * rows + MOST <= steps * rows; step += AT_ONCE) {
        __m256i low[AT_ONCE], high[AT_ONCE];
#pragma GCC unroll 8
        for (int64_t r = 0; r < AT_ONCE; r++) {
            const auto words = [&](int64_t row) {
                return row < rows ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + row * stride + step))
                                  : _mm256_setzero_si256();
            };
            low[r] = words(r), high[r] = words(r + AT_ONCE);
        }
        transpose(low);
        if (rows > AT_ONCE) transpose(high);
#pragma GCC unroll 8
        for (int64_t i = 0; i < AT_ONCE; i++) {
            uint32_t *put = to + (step + i) * rows;
            __builtin_prefetch(reinterpret_cast<const char *>(put) + WRITE_AHEAD, 1);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(put), low[i]);
            if (rows > AT_ONCE) _mm256_storeu_si256(reinterpret_cast<__m256i *>(put + AT_ONCE), high[i]);
        }
    }
    interleave_each(from + step, stride, rows, steps - step, to + step * rows);
}
#else
inline NOINLINE void interleave(const uint32_t *from, int64_t stride, int64_t rows, int64_t steps, uint32_t *to) {
    interleave_each(from, stride, rows, steps, to);
}
#endif
#endif

inline int64_t rounded_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// A tile of rows as products read it, each of `steps` words. A row takes whole multiples of ROW_STEPS words, and what is
// more than one row whole multiples of ROW_BLOCK rows.
#if defined(__AMX_TILE__)
constexpr int TILE_ROWS = 16;   // one of AMX's own tiles: see AmxMicroKernel
constexpr int64_t LEAST_TILES = 4;  // that a thread has for itself, where it has any
constexpr int64_t ROW_BLOCK = 16, ROW_STEPS = 16;

// Where word `step` of row r lies, of one of the first 16.
inline int64_t word_offset(int64_t step, int64_t r, int64_t) {
    return step / ROW_STEPS * 4 * ROW_STEPS * ROW_BLOCK + 4 * (r * ROW_STEPS + step % ROW_STEPS);
}

// Of 16 rows the first 16 words each, then the next ones: 1 KB, which is a tile of AMX. Words beyond a row's end are
// zero.
struct RowTile {
    uint32_t *to;
    int64_t rows, steps, row_words;

    // Words [at, at + count) of row r.
    void put_row(int64_t r, const uint32_t *from, int64_t at, int64_t count) const {
        uint32_t *put = to + r * ROW_STEPS + at / ROW_STEPS * ROW_STEPS * ROW_BLOCK;
        const bool ends = at + count == steps;
        if (at % ROW_STEPS) {
            // Half of a panel, under a gated weight.
            std::memcpy(put + at % ROW_STEPS, from, 4 * count);
            const int64_t filled = at % ROW_STEPS + count;
            if (ends) std::memset(put + filled, 0, 4 * (ROW_STEPS - filled));
            return;
        }
        for (; count >= ROW_STEPS; count -= ROW_STEPS, from += ROW_STEPS, put += ROW_STEPS * ROW_BLOCK)
            _mm512_storeu_si512(put, _mm512_loadu_si512(from));
        const auto some = __mmask16((1u << count) - 1);
        if (count) _mm512_mask_storeu_epi32(put, ends ? 0xffff : some, _mm512_maskz_loadu_epi32(some, from));
    }

    // The same of all rows, which lie `stride` words apart.
    NOINLINE void put(const uint32_t *from, int64_t stride, int64_t at, int64_t count) const {
        for (int64_t r = 0; r < rows; r++) put_row(r, from + r * stride, at, count);
    }
};
#else
constexpr int TILE_ROWS = 12;   // 24 sums, two weights and an input fit the 32 registers of AVX-512
constexpr int64_t LEAST_TILES = 2;
constexpr int64_t ROW_BLOCK = 1, ROW_STEPS = 1;

// Where word `step` of row r of `rows` lies.
inline int64_t word_offset(int64_t step, int64_t r, int64_t rows) { return 4 * (step * rows + r); }

// Interleaved: the first word of each row, then the next ones.
struct RowTile {
    uint32_t *to;
    int64_t rows, steps, row_words;

    // Words [at, at + count) of all rows, which lie `stride` words apart.
    void put(const uint32_t *from, int64_t stride, int64_t at, int64_t count) const {
        interleave(from, stride, rows, count, to + at * rows);
    }
};
#endif

// Calls f with the number of a tile's rows, at most ROWS, as a constant.
template <int ROWS = TILE_ROWS, typename F> inline void with_rows(int64_t rows, F f) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            f(std::integral_constant<int, ROWS>{});
        else
            with_rows<ROWS - 1>(rows, f);
    }
}

} // namespace

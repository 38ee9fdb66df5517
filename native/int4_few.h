// A few rows under weights of 4 bits, for processors with VNNI. Of each group
//   sum of (factor * number - offset) * x = factor * (sum of number * x) - offset * (sum of x)
// Numbers are multiplied as they are, and factors once a group. Rows come without their zero point: as x has the sign,
// the upper halves of bytes are multiplied where they lie, and give 16 times the sum. The sums are the same integers that
// expanded weights give.
#pragma once
#include "format.h"

namespace {

#if defined(__AVX512VNNI__)
#define HAVE_INT4_FEW_ROWS

struct Int4FewRows {
    using Sum = int32_t;
    // From some rows on it pays to expand a panel for tiles of AMX.
    static constexpr int MOST = TILE_ROWS > 12 ? 10 : 12;
    static constexpr bool TAKES_OTHER_ROWS = true;

    // A row has whole groups, each with less the sum of its inputs behind it.
    static constexpr int64_t GROUP_WORDS = INT4_GROUP_STEPS + 1;
    static int64_t row_words(int64_t inputs) { return (inputs + INT4_GROUP - 1) / INT4_GROUP * GROUP_WORDS; }

    // Row after row.
    static void take_rows(const uint32_t *from, int64_t rows, int64_t inputs, uint32_t *to) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t first = 0; first < inputs; first += INT4_GROUP, to += GROUP_WORDS) {
                const int64_t count = std::min(inputs - first, INT4_GROUP);
                // What lies behind a row's end counts for nothing.
                const auto known = __mmask32(~0u >> (INT4_GROUP - count));
                const __m256i unsigned_bytes = words_of(from, first / 4, (count + 3) / 4, r, rows);
                const __m256i bytes = _mm256_maskz_sub_epi8(known, unsigned_bytes, _mm256_set1_epi8(-128));
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), bytes);
                to[INT4_GROUP_STEPS] = uint32_t(-sum_of(bytes));
            }
    }

    static void run(const char *x, int64_t row_bytes, int64_t rows, const Panel &panel, Sum *sums) {
        with_rows<MOST>(rows, [&](auto count) { multiply<count>(x, row_bytes, panel, sums); });
    }

  private:
    static __m256i words_of(const uint32_t *from, int64_t step, int64_t count, int64_t r, int64_t rows) {
        const auto known = __mmask8((1u << count) - 1);
        const uint32_t *first = from + word_offset(step, r, rows) / 4;
        if (ROW_STEPS > 1 || rows == 1) return _mm256_maskz_loadu_epi32(known, first);
        // The instruction that gathers takes several times as long where a processor is protected from Downfall.
        const auto word = [&](int64_t i) { return i < count ? int32_t(first[i * rows]) : 0; };
        return _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
    }

    static int32_t sum_of(__m256i bytes) {
        const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
        __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
        sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
    }

    static __m512i wide(const char *bytes) {
        return _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
    }

    template <int ROWS> static NOINLINE void multiply(const char *x, int64_t row_bytes, const Panel &panel, Sum *sums) {
        __m512i total[ROWS][2];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = _mm512_setzero_si512();
        const char *block = panel.weights;
        for (int64_t step = 0; step < panel.steps; step += INT4_GROUP_STEPS, x += 4 * GROUP_WORDS) {
            const int64_t group = step / INT4_GROUP_STEPS % INT4_GROUPS;
            const char *numbers = block + group * INT4_GROUP_STEPS * INT4_STEP_BYTES;
            const char *grids = block + INT4_NUMBERS + group * INT4_GRID_BYTES;
            add_group<ROWS>(x, row_bytes, numbers, grids, total);
            if (group == INT4_GROUPS - 1) block += INT4_BLOCK_BYTES;
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
            for (int half = 0; half < 2; half++) _mm512_storeu_si512(sums + r * PANEL + 16 * half, total[r][half]);
    }

    template <int ROWS>
    static inline __attribute__((always_inline)) void add_group(const char *x, int64_t row_bytes, const char *numbers,
                                                                const char *grids, __m512i (&total)[ROWS][2]) {
        const __m512i low_bits = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(-16);
        const auto input = [&](int r, int64_t step) {
            int32_t word;
            std::memcpy(&word, x + r * row_bytes + 4 * step, sizeof word);
            return _mm512_set1_epi32(word);
        };
        __m512i sum[ROWS][2];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
        __builtin_prefetch(grids + INT4_STEPS_AHEAD * INT4_STEP_BYTES);
#pragma GCC unroll 8
        for (int64_t step = 0; step < INT4_GROUP_STEPS; step++, numbers += INT4_STEP_BYTES) {
            const __m512i both = _mm512_loadu_si512(numbers);
            __builtin_prefetch(numbers + INT4_STEPS_AHEAD * INT4_STEP_BYTES);
            const __m512i lower = _mm512_and_si512(both, low_bits), upper = _mm512_and_si512(both, high_bits);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], lower, input(r, step));
                sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], upper, input(r, step));
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i factors = wide(grids + 16 * half), offsets = wide(grids + PANEL + 16 * half);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const __m512i own = half ? _mm512_srai_epi32(sum[r][1], 4) : sum[r][0];
                const __m512i product = _mm512_add_epi32(total[r][half], _mm512_mullo_epi32(own, factors));
                // A group's inputs and an offset fit 16 bits.
                total[r][half] = _mm512_dpwssd_epi32(product, offsets, input(r, INT4_GROUP_STEPS));
            }
        }
    }
};
#endif

} // namespace

// Weights of 4 bits in two factors, so that products of many rows are those of bytes:
//   weight = scale of the output * factor of the group * (number - zero of the group)
// where a group is 32 inputs of one output, the number is from 0 to 15, and factor * (number - zero) fits a byte. That
// product is what int8 weights would be: panels of many rows are expanded to it, and sums stay exact integers.
//
// A panel lies in blocks of 64 inputs: 16 steps of 64 bytes, the lower halves of which are numbers of outputs 0 to 15
// and the upper ones those of outputs 16 to 31, four inputs each; then for each of the two groups a byte an output,
// factor - 1 in its lower half and zero in its upper one.
#pragma once
#include <type_traits>

#include "quantize.h"

namespace {

constexpr int64_t INT4_GROUP = 32, INT4_GROUP_STEPS = INT4_GROUP / 4, INT4_GROUPS = 2;
constexpr int64_t INT4_STEP_BYTES = 64, INT4_BLOCK_STEPS = INT4_GROUPS * INT4_GROUP_STEPS;
constexpr int64_t INT4_STEPS_AHEAD = 48;    // how far to prefetch what streams
constexpr int64_t INT4_NUMBERS = INT4_BLOCK_STEPS * INT4_STEP_BYTES;
constexpr int64_t INT4_BLOCK_BYTES = INT4_NUMBERS + INT4_GROUPS * PANEL;

// What the numbers of a group are multiplied with once its zero has left them.
struct Int4Grid {
    int factor, zero;

    static Int4Grid of(uint8_t bits) { return {(bits & 15) + 1, bits >> 4}; }
    uint8_t bits() const { return uint8_t(factor - 1 + 16 * zero); }
};

// Grids are tried by all 32 numbers of a group at once, written to vectorize.
struct Int4Numbers {
    float of[INT4_GROUP];   // the nearest ones, from 0 to 15

    // Those of x under a grid; returns the sum of the squares that they are off.
    float find(const float (&x)[INT4_GROUP], const Int4Grid &grid) {
        const float factor = float(grid.factor), inverse = 1.0f / factor, zero = float(grid.zero);
        float error = 0.0f;
#pragma omp simd reduction(+ : error)
        for (int64_t k = 0; k < INT4_GROUP; k++) {
            float number = nearest_integer(x[k] * inverse) + zero;
            number = number < 0.0f ? 0.0f : number;
            number = number > 15.0f ? 15.0f : number;
            const float apart = factor * (number - zero) - x[k];
            error += apart * apart;
            of[k] = number;
        }
        return error;
    }
};

// The best of a few grids around the one from the lowest to the highest of 32 numbers, all from -127 to 127.
inline Int4Grid choose_grid(const float (&x)[INT4_GROUP]) {
    float low = 0.0f, high = 0.0f;
    for (float each : x) low = each < low ? each : low, high = each > high ? each : high;
    const auto clamped = [](int value, int least, int most) {
        return value < least ? least : value > most ? most : value;
    };
    const int middle = int(nearest_integer((high - low) / 15.0f));
    Int4Grid best{};
    Int4Numbers numbers;
    float least = __builtin_inff();
    for (int factor = middle - 1; factor <= middle + 1; factor++) {
        if (factor != clamped(factor, 1, 16)) continue;
        const int zero = int(nearest_integer(-low * (1.0f / float(factor))));
        for (int shift = -1; shift <= 1; shift++) {
            const Int4Grid grid{factor, clamped(zero + shift, 15 - (127 / factor < 15 ? 127 / factor : 15),
                                                128 / factor < 15 ? 128 / factor : 15)};
            const float error = numbers.find(x, grid);
            if (!best.factor || error < least) least = error, best = grid;
        }
    }
    return best;
}

// The same place of both: the numbers of a step, four inputs of 16 outputs, and in which half of their bytes they lie.
inline int64_t int4_number_at(int64_t k, int64_t i) {
    return k / (4 * INT4_BLOCK_STEPS) * INT4_BLOCK_BYTES + k / 4 % INT4_BLOCK_STEPS * INT4_STEP_BYTES + i % 16 * 4 + k % 4;
}
inline int64_t int4_grid_at(int64_t k, int64_t i) {
    return k / (4 * INT4_BLOCK_STEPS) * INT4_BLOCK_BYTES + INT4_NUMBERS + k / INT4_GROUP % INT4_GROUPS * PANEL + i;
}

#if defined(__AVX512BW__)
// The grids of a group's 16 outputs, as four bytes of numbers each are multiplied.
struct Int4Grids {
    __m512i factors;    // 32 bits each
    __m512i zeros;      // 8 bits each, four of an output

    explicit Int4Grids(const char *bits) {
        const __m512i both = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i *>(bits)));
        factors = _mm512_add_epi32(_mm512_and_si512(both, _mm512_set1_epi32(15)), _mm512_set1_epi32(1));
        const __m512i zero = _mm512_maskz_srli_epi32(0xffff, both, 4);
        const __m512i pair = _mm512_or_si512(zero, _mm512_maskz_slli_epi32(0xffff, zero, 8));
        zeros = _mm512_or_si512(pair, _mm512_maskz_slli_epi32(0xffff, pair, 16));
    }
};
inline __m512i int4_low(__m512i both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
inline __m512i int4_high(__m512i both) { return int4_low(_mm512_srli_epi16(both, 4)); }

// What expands numbers under the grids: 15 * 16 fits a byte, so one product of 16 bits makes two of 8.
struct Int4Expander {
    __m512i factors, offsets;

    explicit Int4Expander(const char *bits) {
        const Int4Grids grids(bits);
        factors = _mm512_or_si512(grids.factors, _mm512_maskz_slli_epi32(0xffff, grids.factors, 16));
        offsets = _mm512_mullo_epi16(grids.zeros, factors);
    }
    __m512i expand(__m512i numbers) const {
        return _mm512_sub_epi8(_mm512_mullo_epi16(numbers, factors), offsets);
    }
};

inline void expand_int4_group(const char *numbers, const char *bits, int64_t steps, char *out) {
    const Int4Expander low(bits), high(bits + 16);
    for (int64_t step = 0; step < steps; step++, numbers += INT4_STEP_BYTES, out += 2 * INT4_STEP_BYTES) {
        const __m512i both = _mm512_loadu_si512(numbers);
        __builtin_prefetch(numbers + INT4_STEPS_AHEAD * INT4_STEP_BYTES);
        _mm512_storeu_si512(out, low.expand(int4_low(both)));
        _mm512_storeu_si512(out + INT4_STEP_BYTES, high.expand(int4_high(both)));
    }
}
#else
inline void expand_int4_group(const char *numbers, const char *bits, int64_t steps, char *out) {
    uint8_t factors[4 * PANEL], offsets[4 * PANEL];
    for (int i = 0; i < 4 * PANEL; i++) {
        const auto grid = Int4Grid::of(uint8_t(bits[i / 4]));
        factors[i] = uint8_t(grid.factor), offsets[i] = uint8_t(grid.factor * grid.zero);
    }
    for (int64_t step = 0; step < steps; step++, numbers += INT4_STEP_BYTES, out += 2 * INT4_STEP_BYTES)
        for (int i = 0; i < INT4_STEP_BYTES; i++) {
            const auto both = uint8_t(numbers[i]);
            out[i] = char((both & 15) * factors[i] - offsets[i]);
            out[i + INT4_STEP_BYTES] = char((both >> 4) * factors[i + INT4_STEP_BYTES] - offsets[i + INT4_STEP_BYTES]);
        }
}
#endif

// Makes a panel of bytes of one of 4 bits.
inline NOINLINE void expand_int4(const char *panel, int64_t steps, char *out) {
    for (int64_t step = 0; step < steps; panel += INT4_BLOCK_BYTES)
        for (int64_t group = 0; group < INT4_GROUPS && step < steps; group++) {
            const int64_t left = steps - step, count = left < INT4_GROUP_STEPS ? left : INT4_GROUP_STEPS;
            expand_int4_group(panel + group * INT4_GROUP_STEPS * INT4_STEP_BYTES, panel + INT4_NUMBERS + group * PANEL,
                              count, out);
            step += count, out += count * 2 * INT4_STEP_BYTES;
        }
}

} // namespace

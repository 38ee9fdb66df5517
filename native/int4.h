// Weights of 4 bits in two factors, so that products of many rows are those of bytes:
//   weight = scale of the output * (factor of the group * number - offset of the group)
// where a group is 32 inputs of one output, the number is from 0 to 15, and what stands in the brackets fits a byte. It
// is what int8 weights would be: panels of many rows are expanded to it, and sums stay exact integers. A few rows multiply
// numbers as they are (int4_few.h), and without VNNI all do (int4_products.h). int4_grid.h says how factors and offsets
// are chosen.
//
// A panel lies in blocks of 64 inputs: 16 steps of 64 bytes, the lower halves of which are numbers of outputs 0 to 15
// and the upper ones those of outputs 16 to 31, four inputs each; then for each of the two groups the factors of all
// outputs, a byte each, and their offsets.
#pragma once
#include "int4_grid.h"

namespace {

constexpr int64_t INT4_GROUP_STEPS = INT4_GROUP / 4, INT4_GROUPS = 2;
constexpr int64_t INT4_STEP_BYTES = 64, INT4_BLOCK_STEPS = INT4_GROUPS * INT4_GROUP_STEPS;
constexpr int64_t INT4_STEPS_AHEAD = 48;    // how far to prefetch what streams
constexpr int64_t INT4_NUMBERS = INT4_BLOCK_STEPS * INT4_STEP_BYTES;
constexpr int64_t INT4_GRID_BYTES = 2 * PANEL;
constexpr int64_t INT4_BLOCK_BYTES = INT4_NUMBERS + INT4_GROUPS * INT4_GRID_BYTES;

// The same place of two: the numbers of a step, four inputs of 16 outputs, and in which half of their bytes they lie.
inline int64_t int4_number_at(int64_t k, int64_t i) {
    return k / (4 * INT4_BLOCK_STEPS) * INT4_BLOCK_BYTES + k / 4 % INT4_BLOCK_STEPS * INT4_STEP_BYTES + i % 16 * 4 + k % 4;
}
// Of the factor; the offset lies PANEL bytes behind it.
inline int64_t int4_grid_at(int64_t k, int64_t i) {
    return k / (4 * INT4_BLOCK_STEPS) * INT4_BLOCK_BYTES + INT4_NUMBERS + k / INT4_GROUP % INT4_GROUPS * INT4_GRID_BYTES + i;
}

#if defined(__AVX2__)
// The factors or offsets of a vector of outputs, of a byte each.
inline vint int4_grids(const char *bytes) {
#if defined(__AVX512F__)
    return (vint)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
#else
    return (vint)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes)));
#endif
}

// The numbers of a vector of bytes, four of each output: the lower halves are outputs 0 to 15, the upper ones 16 to 31.
inline vint int4_low(vuint both) { return (vint)(both & 0x0f0f0f0fu); }
inline vint int4_high(vuint both) { return (vint)(both >> 4 & 0x0f0f0f0fu); }

// What expands the numbers of a vector of a group's outputs: 15 * 16 fits a byte, so one product of 16 bits makes two of 8.
struct Int4Expander {
    typedef int8_t vbytes __attribute__((vector_size(4 * LANES)));
    vshort factors;
    vbytes offsets;

    explicit Int4Expander(const char *grids) {
        const vint factor = int4_grids(grids), offset = int4_grids(grids + PANEL), pair = offset | offset << 8;
        factors = (vshort)(factor | factor << 16);
        offsets = (vbytes)(pair | pair << 16);
    }
    void expand(vint numbers, char *to) const {
        const vbytes expanded = (vbytes)((vshort)numbers * factors) - offsets;
        std::memcpy(to, &expanded, sizeof expanded);
    }
};

inline __attribute__((always_inline)) void expand_int4_group(const char *numbers, const char *grids, int64_t steps,
                                                             char *out) {
    constexpr int64_t BYTES = 4 * LANES;
    __builtin_prefetch(grids + INT4_STEPS_AHEAD * INT4_STEP_BYTES);
#pragma GCC unroll 2
    for (int64_t at = 0; at < INT4_STEP_BYTES; at += BYTES) {
        const Int4Expander low(grids + at / 4), high(grids + 16 + at / 4);
#pragma GCC unroll 8
        for (int64_t step = 0; step < steps; step++) {
            const char *from = numbers + step * INT4_STEP_BYTES + at;
            char *to = out + step * 2 * INT4_STEP_BYTES + at;
            vuint both;
            std::memcpy(&both, from, sizeof both);
            if (at == 0) __builtin_prefetch(from + INT4_STEPS_AHEAD * INT4_STEP_BYTES);
            low.expand(int4_low(both), to);
            high.expand(int4_high(both), to + INT4_STEP_BYTES);
        }
    }
}
#else
inline void expand_int4_group(const char *numbers, const char *grids, int64_t steps, char *out) {
    uint8_t factors[4 * PANEL], offsets[4 * PANEL];
    for (int i = 0; i < 4 * PANEL; i++) factors[i] = uint8_t(grids[i / 4]), offsets[i] = uint8_t(grids[PANEL + i / 4]);
    for (int64_t step = 0; step < steps; step++, numbers += INT4_STEP_BYTES, out += 2 * INT4_STEP_BYTES)
        for (int i = 0; i < INT4_STEP_BYTES; i++) {
            const auto both = uint8_t(numbers[i]);
            out[i] = char((both & 15) * factors[i] - offsets[i]);
            out[i + INT4_STEP_BYTES] = char((both >> 4) * factors[i + INT4_STEP_BYTES] - offsets[i + INT4_STEP_BYTES]);
        }
}
#endif

// Makes bytes of the first `steps` of a block, or of all.
inline NOINLINE void expand_int4_block(const char *block, int64_t steps, char *out) {
    for (int64_t group = 0; group < INT4_GROUPS; group++, steps -= INT4_GROUP_STEPS) {
        const char *numbers = block + group * INT4_GROUP_STEPS * INT4_STEP_BYTES;
        const char *grids = block + INT4_NUMBERS + group * INT4_GRID_BYTES;
        if (steps >= INT4_GROUP_STEPS)
            expand_int4_group(numbers, grids, INT4_GROUP_STEPS, out);   // a number that the compiler knows
        else if (steps > 0)
            expand_int4_group(numbers, grids, steps, out);
        out += INT4_GROUP_STEPS * 2 * INT4_STEP_BYTES;
    }
}

// Makes a panel of bytes of one of 4 bits.
inline void expand_int4(const char *panel, int64_t steps, char *out) {
    for (int64_t step = 0; step < steps; step += INT4_BLOCK_STEPS, panel += INT4_BLOCK_BYTES)
        expand_int4_block(panel, steps - step, out + step * 2 * INT4_STEP_BYTES);
}

} // namespace

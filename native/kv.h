// How K and V of one head lie within a block of the cache: see kernels.h.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace {

// Room for one head: that of latent attention is as wide as what is kept of a token.
constexpr int MAX_HEAD_DIM = 576;

// Stored values that lie together along the axis that is summed over.
template <typename T> constexpr int PER_STEP = sizeof(T) < 4 ? 2 : 1;
// Whether each token has a scale.
template <typename T> constexpr bool SCALED = std::is_same_v<T, int8_t>;

inline int padded_dim(const Heads &heads) { return (heads.head_dim + 15) & ~15; }

// Tokens of a block with what fills up the last pair.
template <typename T> int stored_tokens(const Heads &heads) {
    return (heads.block_size + PER_STEP<T> - 1) / PER_STEP<T> * PER_STEP<T>;
}

// What comes before the scales, in elements.
template <typename T> int64_t k_data_size(const Heads &heads) {
    return int64_t(heads.head_dim) * stored_tokens<T>(heads);
}
template <typename T> int64_t v_data_size(const Heads &heads) {
    return int64_t(padded_dim(heads)) * stored_tokens<T>(heads);
}

template <typename T> int64_t scales_size(const Heads &heads) {
    return SCALED<T> ? heads.block_size * int64_t(sizeof(float)) : 0;
}
template <typename T> int64_t k_head_size(const Heads &heads) { return k_data_size<T>(heads) + scales_size<T>(heads); }
template <typename T> int64_t v_head_size(const Heads &heads) { return v_data_size<T>(heads) + scales_size<T>(heads); }

// Puts the numbers of one token between those of the other one of its pair, which another thread may be writing.
template <typename T> void put_in_pairs(const T *from, int dim, int which, T *pairs) {
    int i = 0;
#if defined(__AVX512F__)
    constexpr int AT_ONCE = 32 / sizeof(T);
    for (; i + AT_ONCE <= dim; i += AT_ONCE) {
        __m256i numbers;
        std::memcpy(&numbers, from + i, sizeof numbers);
        if constexpr (sizeof(T) == 1)
            _mm512_mask_storeu_epi8(pairs + 2 * i, 0x5555555555555555 << which,
                                    _mm512_slli_epi16(_mm512_cvtepi8_epi16(numbers), 8 * which));
        else
            _mm512_mask_storeu_epi16(pairs + 2 * i, 0x55555555 << which,
                                     _mm512_maskz_slli_epi32(0xffff, _mm512_cvtepu16_epi32(numbers), 16 * which));
    }
#endif
    for (; i < dim; i++) pairs[2 * i + which] = from[i];
}

inline void write_kv(const float *k, const float *v, float *k_block, float *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim;
    for (int i = 0; i < dim; i++) k_block[i * heads.block_size + offset] = k[i];
    std::memcpy(v_block + offset * padded_dim(heads), v, sizeof(float) * dim);
}

inline void write_kv(const bf16 *k, const bf16 *v, bf16 *k_block, bf16 *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim, even = stored_tokens<bf16>(heads);
    for (int i = 0; i < dim; i += 2) std::memcpy(k_block + i * even + 2 * offset, k + i, 2 * sizeof(bf16));
    put_in_pairs(v, dim, offset % 2, v_block + (offset / 2) * padded_dim(heads) * 2);
}

// The highest magnitude in a row; not a number if anything in it is infinite or no number. Without their sign, numbers
// of either type are in the order of their bits, and those that are none come last.
inline float max_abs(const bf16 *x, int64_t count) {
    vhalves most = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        vhalves bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fff;
        most = bits > most ? bits : most;
    }
    // As floats, since their maximum over lanes is at hand.
    const vuint pairs = (vuint)most;
    uint32_t highest = uint32_t(reduce_max(vmax(to_float(vint(pairs & 0xffff)), to_float(vint(pairs >> 16)))));
    for (; i < count; i++) {
        const uint32_t bits = x[i].bits & 0x7fff;
        highest = bits > highest ? bits : highest;
    }
    return highest < 0x7f80 ? widen(bf16{uint16_t(highest)}) : __builtin_nanf("");
}

inline float max_abs(const float *x, int64_t count) {
    uint32_t highest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = bit_cast<uint32_t>(x[i]) & 0x7fffffff;
        highest = bits > highest ? bits : highest;
    }
    return highest < 0x7f800000 ? bit_cast<float>(highest) : __builtin_nanf("");
}

// Rounds values to steps of a 127th of the largest, and returns the step.
template <typename T> float quantize(const T *x, int dim, int8_t *out) {
    constexpr float magic = 12582912.0f;  // adding it rounds to an integer, which subtracting it leaves
    const float largest = max_abs(x, dim);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    for (int i = 0; i < dim; i++) out[i] = int8_t((widen(x[i]) * inverse + magic) - magic);
    return largest / 127.0f;
}

template <typename T>
void write_kv(const T *k, const T *v, int8_t *k_block, int8_t *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim, even = stored_tokens<int8_t>(heads);
    int8_t rounded[MAX_HEAD_DIM];
    const float k_scale = quantize(k, dim, rounded);
    for (int i = 0; i < dim; i += 2) std::memcpy(k_block + i * even + 2 * offset, rounded + i, 2);
    std::memcpy(k_block + k_data_size<int8_t>(heads) + offset * sizeof(float), &k_scale, sizeof k_scale);
    const float v_scale = quantize(v, dim, rounded);
    put_in_pairs(rounded, dim, offset % 2, v_block + (offset / 2) * padded_dim(heads) * 2);
    std::memcpy(v_block + v_data_size<int8_t>(heads) + offset * sizeof(float), &v_scale, sizeof v_scale);
}

} // namespace

// How K and V of one head lie within a block of the cache: see kernels.h.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace {

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

inline void write_kv(const float *k, const float *v, float *k_block, float *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim;
    for (int i = 0; i < dim; i++) k_block[i * heads.block_size + offset] = k[i];
    std::memcpy(v_block + offset * padded_dim(heads), v, sizeof(float) * dim);
}

inline void write_kv(const bf16 *k, const bf16 *v, bf16 *k_block, bf16 *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim, even = stored_tokens<bf16>(heads);
    for (int i = 0; i < dim; i += 2) std::memcpy(k_block + i * even + 2 * offset, k + i, 2 * sizeof(bf16));
    bf16 *to = v_block + (offset / 2) * padded_dim(heads) * 2 + offset % 2;
    for (int i = 0; i < dim; i++) to[2 * i] = v[i];
}

// The highest magnitude in a row; not a number if anything in it is infinite or no number. Without their sign, numbers
// of either type are in the order of their bits, and those that are none come last.
inline float largest_size(const bf16 *x, int64_t count) {
    uint16_t highest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint16_t bits = x[i].bits & 0x7fff;
        highest = bits > highest ? bits : highest;
    }
    return highest < 0x7f80 ? widen(bf16{highest}) : __builtin_nanf("");
}

inline float largest_size(const float *x, int64_t count) {
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
    const float largest = largest_size(x, dim);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    for (int i = 0; i < dim; i++) out[i] = int8_t((widen(x[i]) * inverse + magic) - magic);
    return largest / 127.0f;
}

template <typename T>
void write_kv(const T *k, const T *v, int8_t *k_block, int8_t *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim, even = stored_tokens<int8_t>(heads);
    int8_t rounded[256];
    const float k_scale = quantize(k, dim, rounded);
    for (int i = 0; i < dim; i += 2) std::memcpy(k_block + i * even + 2 * offset, rounded + i, 2);
    std::memcpy(k_block + k_data_size<int8_t>(heads) + offset * sizeof(float), &k_scale, sizeof k_scale);
    const float v_scale = quantize(v, dim, rounded);
    int8_t *to = v_block + (offset / 2) * padded_dim(heads) * 2 + offset % 2;
    for (int i = 0; i < dim; i++) to[2 * i] = rounded[i];
    std::memcpy(v_block + v_data_size<int8_t>(heads) + offset * sizeof(float), &v_scale, sizeof v_scale);
}

} // namespace

// How K and V of one head lie within a block of the cache: see kernels.h.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

inline void write_kv(const float *k, const float *v, float *k_block, float *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim, padded = (dim + 15) & ~15;
    for (int i = 0; i < dim; i++) k_block[i * heads.block_size + offset] = k[i];
    std::memcpy(v_block + offset * padded, v, sizeof(float) * dim);
}

inline void write_kv(const bf16 *k, const bf16 *v, bf16 *k_block, bf16 *v_block, int offset, const Heads &heads) {
    const int dim = heads.head_dim, padded = (dim + 15) & ~15, even = (heads.block_size + 1) & ~1;
    for (int i = 0; i < dim; i += 2) std::memcpy(k_block + i * even + 2 * offset, k + i, 2 * sizeof(bf16));
    bf16 *to = v_block + (offset / 2) * padded * 2 + offset % 2;
    for (int i = 0; i < dim; i++) to[2 * i] = v[i];
}

template <typename T> int64_t k_head_size(const Heads &heads) {
    const int size = heads.block_size;
    return int64_t(heads.head_dim) * (sizeof(T) == 2 ? (size + 1) & ~1 : size);
}

template <typename T> int64_t v_head_size(const Heads &heads) {
    const int size = heads.block_size;
    return int64_t((heads.head_dim + 15) & ~15) * (sizeof(T) == 2 ? (size + 1) & ~1 : size);
}

} // namespace

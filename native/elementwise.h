// Norms, activation, rotation. Each row is computed the same way whatever the number of rows and threads.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

// Waking the other threads costs some microseconds, which is what this many elements cost one thread.
constexpr int64_t PARALLEL_ELEMENTS = 32768;

// out = x / rms(x), rounded, times weight.
template <typename T> void norm_row(const T *x, const T *weight, T *out, int64_t dim, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < dim; i++) sum += widen(x[i]) * widen(x[i]);
    const float factor = 1.0f / __builtin_sqrtf(sum / float(dim) + eps);
#pragma omp simd
    for (int64_t i = 0; i < dim; i++)
        out[i] = narrow<T>(widen(narrow<T>(widen(x[i]) * factor)) * widen(weight[i]));
}

template <typename T>
void rms_norm(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const T *in = x + row * dim;
        if (residual) {
            T *sum = residual + row * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; i++) sum[i] = narrow<T>(widen(sum[i]) + widen(in[i]));
            in = sum;
        }
        norm_row(in, weight, out + row * dim, dim, eps);
    }
}

template <typename T> void silu_mul(const T *gate_up, T *out, int64_t rows, int64_t dim) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * dim, *up = gate + dim;
        T *to = out + row * dim;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) {
            const float g = widen(gate[i]);
            to[i] = narrow<T>(widen(narrow<T>(g / (1.0f + exp_(-g)))) * widen(up[i]));
        }
    }
}

// Normalizes (if norm is given) and rotates one head.
template <typename T>
void rotate_head(const T *x, const float *cos_sin, const T *norm, float eps, int dim, T *__restrict out) {
    T normalized[256];
    if (norm) {
        norm_row(x, norm, normalized, dim, eps);
        x = normalized;
    }
    const int half = dim / 2;
#pragma omp simd
    for (int i = 0; i < half; i++) {
        const float a = widen(x[i]), b = widen(x[i + half]), cos = cos_sin[i], sin = cos_sin[i + half];
        out[i] = narrow<T>(a * cos - b * sin);
        out[i + half] = narrow<T>(b * cos + a * sin);
    }
}

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

template <typename T>
void rope_and_write(const T *qkv, T *q_out, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                    T *k_cache, T *v_cache, const T *q_norm, const T *k_norm, float eps, int64_t tokens,
                    const Heads &heads) {
    const int dim = heads.head_dim, num_q = heads.num_heads, num_kv = heads.num_kv_heads;
    const int64_t width = int64_t(num_q + 2 * num_kv) * dim;
#pragma omp parallel for schedule(static) if (tokens > 1 && tokens * width >= PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++) {
        const T *q = qkv + t * width, *k = q + num_q * dim, *v = k + num_kv * dim;
        const float *angles = cos_sin + positions[t] * dim;
        for (int h = 0; h < num_q; h++)
            rotate_head(q + h * dim, angles, q_norm, eps, dim, q_out + (t * num_q + h) * dim);
        const int64_t block = slots[t] / heads.block_size;
        const int offset = int(slots[t] % heads.block_size);
        for (int h = 0; h < num_kv; h++) {
            T rotated[256];
            rotate_head(k + h * dim, angles, k_norm, eps, dim, rotated);
            write_kv(rotated, v + h * dim, k_cache + (block * num_kv + h) * k_head_size<T>(heads),
                     v_cache + (block * num_kv + h) * v_head_size<T>(heads), offset, heads);
        }
    }
}

} // namespace

// Norms, activation, rotation. Each row is computed the same way whatever the number of rows and threads.
#pragma once
#include "kv.h"
#include "team.h"

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

#if defined(__AVX512BF16__)
template <> inline void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t dim, float eps) {
    __m512 sum = _mm512_setzero_ps();
    by_lanes(dim, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
        const __m512 v = load_wide(x + i, lanes);
        sum = _mm512_fmadd_ps(v, v, sum);
    });
    const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / float(dim) + eps));
    by_lanes(dim, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
        const __m512 normalized = rounded(_mm512_mul_ps(load_wide(x + i, lanes), factor));
        store_narrow(out + i, lanes, _mm512_mul_ps(normalized, load_wide(weight + i, lanes)));
    });
}
#endif

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
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vfloat a = load_wide(x + i), b = load_wide(x + i + half), cos = load(cos_sin + i);
        const vfloat sin = load(cos_sin + i + half);
        store_narrow(out + i, a * cos - b * sin);
        store_narrow(out + i + half, b * cos + a * sin);
    }
    for (; i < half; i++) {
        const float a = widen(x[i]), b = widen(x[i + half]), cos = cos_sin[i], sin = cos_sin[i + half];
        out[i] = narrow<T>(a * cos - b * sin);
        out[i + half] = narrow<T>(b * cos + a * sin);
    }
}

// How many tokens ahead the blocks are asked for that K and V will be written to.
constexpr int TOKENS_AHEAD = 8;

// Asks for where a KV head of a token is to be written, unless the token before it lies in the same block. Lines that
// nobody has used for a step are far away, and a token's K is spread over all of its block's.
template <typename C>
void fetch_block(const int64_t *slots, int64_t token, int kv_head, const C *k_cache, const C *v_cache,
                 const Heads &heads) {
    const int64_t block = slots[token] / heads.block_size, head = block * heads.num_kv_heads + kv_head;
    if (token > 0 && slots[token - 1] / heads.block_size == block) return;
    const auto *k = reinterpret_cast<const char *>(k_cache + head * k_head_size<C>(heads));
    const auto *v = reinterpret_cast<const char *>(v_cache + head * v_head_size<C>(heads));
    for (int64_t i = 0; i < k_head_size<C>(heads) * int64_t(sizeof(C)); i += 64) __builtin_prefetch(k + i, 1);
    for (int64_t i = 0; i < v_head_size<C>(heads) * int64_t(sizeof(C)); i += 64) __builtin_prefetch(v + i, 1);
}

// Rotates, and writes K and V, as one of a team: this thread's share of all heads of all tokens, so that a single token
// too is shared out. Does not wait at its end.
template <typename T, typename C>
void rope_and_write(const T *qkv, T *q_out, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                    C *k_cache, C *v_cache, const T *q_norm, const T *k_norm, float eps, int64_t tokens,
                    const Heads &heads, Team &team) {
    const int dim = heads.head_dim, num_q = heads.num_heads, num_kv = heads.num_kv_heads;
    const int rotated_heads = num_q + num_kv;
    const Range mine = team.share(tokens * rotated_heads);
    int64_t token = mine.begin / rotated_heads;
    int h = int(mine.begin % rotated_heads);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const T *in = qkv + (token * (num_q + 2 * num_kv) + h) * dim;
        const float *angles = cos_sin + positions[token] * dim;
        if (h < num_q) {
            rotate_head(in, angles, q_norm, eps, dim, q_out + (token * num_q + h) * dim);
        } else {
            T rotated[256];
            if (token + TOKENS_AHEAD < tokens)
                fetch_block(slots, token + TOKENS_AHEAD, h - num_q, k_cache, v_cache, heads);
            rotate_head(in, angles, k_norm, eps, dim, rotated);
            const int64_t head = slots[token] / heads.block_size * num_kv + h - num_q;
            write_kv(rotated, in + num_kv * dim, k_cache + head * k_head_size<C>(heads),
                     v_cache + head * v_head_size<C>(heads), int(slots[token] % heads.block_size), heads);
        }
        if (++h == rotated_heads) h = 0, token++;
    }
}

template <typename T, typename C>
void rope_and_write(const T *qkv, T *q_out, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                    C *k_cache, C *v_cache, const T *q_norm, const T *k_norm, float eps, int64_t tokens,
                    const Heads &heads) {
    const int64_t elements = tokens * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    with_team(tokens > 1 && elements >= PARALLEL_ELEMENTS, [&](Team &team) {
        rope_and_write(qkv, q_out, cos_sin, positions, slots, k_cache, v_cache, q_norm, k_norm, eps, tokens, heads,
                       team);
    });
}

} // namespace

// Norms, activations, rotation. Each row is computed the same way whatever the number of rows and threads.
#pragma once
#include <type_traits>

#include "kv.h"
#include "team.h"

namespace {

// Waking the other threads costs some microseconds, which is what this many elements cost one thread.
constexpr int64_t PARALLEL_ELEMENTS = 32768;

// 1 / rms(x).
template <typename T> float inverse_rms(const T *x, int64_t dim, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < dim; i++) sum += widen(x[i]) * widen(x[i]);
    return 1.0f / __builtin_sqrtf(sum / float(dim) + eps);
}

// out = x * factor, rounded to the weight's type, times weight.
template <typename T, typename W> void scale_row(const T *x, float factor, const W *weight, T *out, int64_t dim) {
#pragma omp simd
    for (int64_t i = 0; i < dim; i++)
        out[i] = narrow<T>(widen(narrow<W>(widen(x[i]) * factor)) * widen(weight[i]));
}

#if defined(__AVX512BF16__)
template <> inline float inverse_rms(const bf16 *x, int64_t dim, float eps) {
    __m512 sum = _mm512_setzero_ps();
    by_lanes(dim, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
        const __m512 v = load_wide(x + i, lanes);
        sum = _mm512_fmadd_ps(v, v, sum);
    });
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / float(dim) + eps);
}

template <typename W> void scale_row(const bf16 *x, float factor, const W *weight, bf16 *out, int64_t dim) {
    const __m512 factors = _mm512_set1_ps(factor);
    by_lanes(dim, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
        __m512 normalized = _mm512_mul_ps(load_wide(x + i, lanes), factors);
        if constexpr (sizeof(W) == sizeof(bf16)) normalized = rounded(normalized);
        store_narrow(out + i, lanes, _mm512_mul_ps(normalized, load_wide(weight + i, lanes)));
    });
}
#endif

// Multiplies with a norm's weight, from the one at `first` on.
template <typename T> void scale_row(const T *x, float factor, const Norm &norm, int64_t first, T *out, int64_t dim) {
    if (norm.dtype == FLOAT32)
        scale_row(x, factor, static_cast<const float *>(norm.weight) + first, out, dim);
    else
        scale_row(x, factor, static_cast<const T *>(norm.weight) + first, out, dim);
}

// out = x / rms(x) times weight; it may be x.
template <typename T> void norm_row(const T *x, const Norm &norm, T *out, int64_t dim, float eps) {
    scale_row(x, inverse_rms(x, dim, eps), norm, 0, out, dim);
}

template <typename T> void add_row(const T *x, T *residual, int64_t dim) {
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) residual[i] = narrow<T>(widen(residual[i]) + widen(x[i]));
}

template <typename T>
void rms_norm(const T *x, T *residual, const Norm &norm, T *out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const T *in = x + row * dim;
        if (residual) {
            add_row(in, residual + row * dim, dim);
            in = residual + row * dim;
        }
        norm_row(in, norm, out + row * dim, dim, eps);
    }
}

// x * Phi(x), by a polynomial for Phi that was fitted to 4.5 standard deviations: off by less than 3e-6 within 3 of
// them, by 3e-5 within 11, and further out by 3e-6 of x. bfloat16 rounds by as much from 0.01 on.
inline __attribute__((always_inline)) vfloat gelu(vfloat x) {
    constexpr float END = 4.5f;
    const vfloat c = vmin(vmax(x, vfloat{} - END), vfloat{} + END);
    const vfloat v = c * c * (2 / (END * END)) - 1.0f;
    vfloat p = v * 1.638684533e-03f - 4.518324121e-03f;
    p = p * v + 6.158428278e-03f;
    p = p * v - 1.082649845e-02f;
    p = p * v + 2.231408169e-02f;
    p = p * v - 3.782965978e-02f;
    p = p * v + 5.674414891e-02f;
    p = p * v - 8.026894848e-02f;
    p = p * v + 1.093835046e-01f;
    p = p * v - 1.543845644e-01f;
    p = p * v + 3.138101753e-01f;
    return x * (c * p * 0.5f + 0.5f);
}

// 0.5 * (1 + tanh(u)) is the logistic function of 2 * u.
inline vfloat gelu_tanh(vfloat x) {
    const vfloat twice = (x + x * x * x * 0.044715f) * 1.5957691216f;
    return x / (exp2_(vmin(twice * -1.44269504f, vfloat{} + 126.0f)) + 1.0f);
}

template <Activation A> inline vfloat activated(vfloat x) {
    if constexpr (A == GELU) return gelu(x);
    if constexpr (A == GELU_TANH) return gelu_tanh(x);
    if constexpr (A == RELU) return vmax(x, vfloat{});
    return silu(x);
}

// What a gated product gives. gpt-oss clamps both, adds one to what is multiplied, and has a steeper SiLU.
template <Activation A> inline __attribute__((always_inline)) vfloat gated(vfloat gate, vfloat up) {
    if constexpr (A == SWIGLU_CLAMPED) {
        constexpr float LIMIT = 7.0f, STEEPNESS = 1.702f;
        const vfloat most = vfloat{} + LIMIT, low = vmin(gate, most);
        return silu(low * STEEPNESS) * (1.0f / STEEPNESS) * (vmax(vmin(up, most), -most) + 1.0f);
    }
    return activated<A>(gate) * up;
}

// Calls f with a constant of the activation's type.
template <typename F> inline __attribute__((always_inline)) void with_activation(int32_t activation, F f) {
    switch (activation) {
    case GELU: return f(std::integral_constant<Activation, GELU>{});
    case GELU_TANH: return f(std::integral_constant<Activation, GELU_TANH>{});
    case RELU: return f(std::integral_constant<Activation, RELU>{});
    case SWIGLU_CLAMPED: return f(std::integral_constant<Activation, SWIGLU_CLAMPED>{});
    default: return f(std::integral_constant<Activation, SILU>{});
    }
}

// to = the activation of gate, rounded, times up, of as many numbers as a vector has.
template <Activation A, typename T> inline void gate_lanes(const T *gate, const T *up, T *to) {
    if constexpr (A == SWIGLU_CLAMPED) return store_narrow(to, gated<A>(load_wide(gate), load_wide(up)));
    T active[LANES];
    store_narrow(active, activated<A>(load_wide(gate)));
    store_narrow(to, load_wide(active) * load_wide(up));
}

template <typename T> void gate(const T *gate_up, T *out, int64_t rows, int64_t dim, int32_t activation) {
    with_activation(activation, [&](auto constant) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * dim >= PARALLEL_ELEMENTS)
        for (int64_t row = 0; row < rows; row++) {
            const T *lower = gate_up + row * 2 * dim, *upper = lower + dim;
            T *to = out + row * dim;
            int64_t i = 0;
            for (; i + LANES <= dim; i += LANES) gate_lanes<constant.value>(lower + i, upper + i, to + i);
            if (i == dim) continue;
            T some[3][LANES] = {};
            std::memcpy(some[0], lower + i, sizeof(T) * (dim - i));
            std::memcpy(some[1], upper + i, sizeof(T) * (dim - i));
            gate_lanes<constant.value>(some[0], some[1], some[2]);
            std::memcpy(to + i, some[2], sizeof(T) * (dim - i));
        }
    });
}

// Rotates one head by halves.
template <typename T> void rotate_head(const T *x, const float *cos_sin, int dim, T *__restrict out) {
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

// Normalizes the heads of queries and keys, one after the other.
template <typename T> class HeadNormalizer {
    const HeadNorms &norms;
    const int num_heads, num_kv_heads, dim;
    float factor = 0;
    int64_t row = -1;   // the token, and whether its keys, that the factor is for

  public:
    HeadNormalizer(const HeadNorms &norms, const Heads &heads)
        : norms(norms), num_heads(heads.num_heads), num_kv_heads(heads.num_kv_heads), dim(heads.head_dim) {}

    // The head at `x`, number h of a token's queries and keys; in `space` if there is a norm.
    NOINLINE const T *of(const T *x, int64_t token, int h, T *space) {
        const bool key = h >= num_heads;
        const Norm &norm = key ? norms.k : norms.q;
        if (!norm.weight) return x;
        const int64_t before = (key ? h - num_heads : h) * int64_t(dim);
        if (!norms.together)
            factor = inverse_rms(x, dim, norms.eps);
        else if (row != 2 * token + key)
            factor = inverse_rms(x - before, int64_t(key ? num_kv_heads : num_heads) * dim, norms.eps);
        row = 2 * token + key;
        scale_row(x, factor, norm, norms.together ? before : 0, space, dim);
        return space;
    }
};

// How many tokens ahead the blocks are asked for that K and V will be written to.
constexpr int TOKENS_AHEAD = 8;

// Asks for where a KV head of a token is to be written, unless the token before it lies in the same block. Lines that
// nobody has used for a step are far away, and a token's K is spread over all of its block's.
template <typename C>
void prefetch_block(const int64_t *slots, int64_t token, int kv_head, const C *k_cache, const C *v_cache,
                 const Heads &heads) {
    const int64_t block = slots[token] / heads.block_size, head = block * heads.num_kv_heads + kv_head;
    if (token > 0 && slots[token - 1] / heads.block_size == block) return;
    const auto *k = reinterpret_cast<const char *>(k_cache + head * k_head_size<C>(heads));
    const auto *v = reinterpret_cast<const char *>(v_cache + head * v_head_size<C>(heads));
    for (int64_t i = 0; i < k_head_size<C>(heads) * int64_t(sizeof(C)); i += 64) __builtin_prefetch(k + i, 1);
    for (int64_t i = 0; i < v_head_size<C>(heads) * int64_t(sizeof(C)); i += 64) __builtin_prefetch(v + i, 1);
}

// Rotates, and writes K and V, as one of a team: this thread's share of all heads of all tokens, so that a single token
// too is shared out. Tokens of qkv lie `stride` apart; 0: as far as they are wide. Does not wait at its end.
template <typename T, typename C>
NOINLINE void rope_and_write(const T *qkv, int64_t stride, T *q_out, const RotaryTable &rotation, const int64_t *positions,
                             const int64_t *slots, C *k_cache, C *v_cache, const HeadNorms &norms, int64_t tokens,
                             const Heads &heads, Team &team) {
    const int dim = heads.head_dim, num_q = heads.num_heads, num_kv = heads.num_kv_heads;
    const int rotated_heads = num_q + num_kv;
    const Range mine = team.share(tokens * rotated_heads);
    if (!stride) stride = (num_q + 2 * num_kv) * dim;
    HeadNormalizer<T> normalizer(norms, heads);
    T normalized[MAX_HEAD_DIM], rotated[MAX_HEAD_DIM];
    float grown[MAX_HEAD_DIM];
    int64_t token = mine.begin / rotated_heads;
    int h = int(mine.begin % rotated_heads);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const T *in = qkv + token * stride + h * dim;
        const float *angles = rotation.cos_sin + positions[token] * dim;
        const T *head = normalizer.of(in, token, h, normalized);
        if (h < num_q) {
            const float factor = rotation.query_factors ? rotation.query_factors[positions[token]] : 1;
            if (factor != 1) {
                for (int at = 0; at < dim; at++) grown[at] = factor * angles[at];
                angles = grown;
            }
            rotate_head(head, angles, dim, q_out + (token * num_q + h) * dim);
        } else {
            if (token + TOKENS_AHEAD < tokens)
                prefetch_block(slots, token + TOKENS_AHEAD, h - num_q, k_cache, v_cache, heads);
            rotate_head(head, angles, dim, rotated);
            const int64_t place = slots[token] / heads.block_size * num_kv + h - num_q;
            write_kv(rotated, in + num_kv * dim, k_cache + place * k_head_size<C>(heads),
                     v_cache + place * v_head_size<C>(heads), int(slots[token] % heads.block_size), heads);
        }
        if (++h == rotated_heads) h = 0, token++;
    }
}

template <typename T, typename C>
void rope_and_write(const T *qkv, T *q_out, const RotaryTable &rotation, const int64_t *positions, const int64_t *slots,
                    C *k_cache, C *v_cache, const HeadNorms &norms, int64_t tokens, const Heads &heads) {
    const int64_t elements = tokens * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    with_team(tokens > 1 && elements >= PARALLEL_ELEMENTS, [&](Team &team) {
        rope_and_write(qkv, 0, q_out, rotation, positions, slots, k_cache, v_cache, norms, tokens, heads, team);
    });
}

} // namespace

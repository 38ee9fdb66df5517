// The kernels for one instruction set: built once for each, with ISA set to its name.
#include "attention.h"
#include "elementwise.h"
#include "gemm.h"

namespace {

void any_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t dim, float eps,
                  int32_t dtype) {
    if (dtype == FLOAT32)
        rms_norm((const float *)x, (float *)residual, (const float *)weight, (float *)out, rows, dim, eps);
    else
        rms_norm((const bf16 *)x, (bf16 *)residual, (const bf16 *)weight, (bf16 *)out, rows, dim, eps);
}

void any_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t dim, int32_t dtype) {
    if (dtype == FLOAT32)
        silu_mul((const float *)gate_up, (float *)out, rows, dim);
    else
        silu_mul((const bf16 *)gate_up, (bf16 *)out, rows, dim);
}

// Calls f with a null pointer to the type of the activations and one to that of the cache.
template <typename F> void with_types(int32_t dtype, const Heads &heads, F f) {
    float *const single = nullptr;
    bf16 *const half = nullptr;
    int8_t *const rounded = nullptr;
    if (heads.cache_dtype == INT8)
        dtype == FLOAT32 ? f(single, rounded) : f(half, rounded);
    else
        dtype == FLOAT32 ? f(single, single) : f(half, half);
}

void any_rope_and_write(const void *qkv, void *q_out, const float *cos_sin, const int64_t *positions,
                        const int64_t *slots, void *k_cache, void *v_cache, const void *q_norm, const void *k_norm,
                        float eps, int64_t tokens, const Heads &heads, int32_t dtype) {
    with_types(dtype, heads, [&](auto *type, auto *cache) {
        using T = decltype(type);
        using C = decltype(cache);
        rope_and_write(T(qkv), T(q_out), cos_sin, positions, slots, C(k_cache), C(v_cache), T(q_norm), T(k_norm), eps,
                       tokens, heads);
    });
}

void any_attention(const void *q, void *out, const void *k_cache, const void *v_cache, const Batch &batch,
                   const Heads &heads, int32_t dtype) {
    with_types(dtype, heads, [&](auto *type, auto *cache) {
        using T = decltype(type);
        using C = decltype(cache);
        attention(T(q), T(out), C(k_cache), C(v_cache), batch, heads);
    });
}

#if defined(__AVX512BF16__)
void any_pack(const void *weight, void *packed, int64_t outs, int64_t ins) {
    pack((const bf16 *)weight, (bf16 *)packed, outs, ins);
}

void any_linear(const void *x, const void *packed, const float *bias, void *out, int64_t rows, int64_t outs,
                int64_t ins) {
    linear((const bf16 *)x, (const bf16 *)packed, bias, (bf16 *)out, rows, outs, ins);
}
#else
constexpr decltype(Kernels::pack) any_pack = nullptr;
constexpr decltype(Kernels::linear) any_linear = nullptr;
#endif

} // namespace

namespace ISA {
extern const Kernels kernels = {any_rms_norm, any_silu_mul, any_rope_and_write, any_attention, any_pack, any_linear};
}

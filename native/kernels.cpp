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

void any_rope_and_write(const void *qkv, void *q_out, const float *cos_sin, const int64_t *positions,
                        const int64_t *slots, void *k_cache, void *v_cache, const void *q_norm, const void *k_norm,
                        float eps, int64_t tokens, const Heads &heads, int32_t dtype) {
    if (dtype == FLOAT32)
        rope_and_write((const float *)qkv, (float *)q_out, cos_sin, positions, slots, (float *)k_cache,
                       (float *)v_cache, (const float *)q_norm, (const float *)k_norm, eps, tokens, heads);
    else
        rope_and_write((const bf16 *)qkv, (bf16 *)q_out, cos_sin, positions, slots, (bf16 *)k_cache, (bf16 *)v_cache,
                       (const bf16 *)q_norm, (const bf16 *)k_norm, eps, tokens, heads);
}

void any_attention(const void *q, void *out, const void *k_cache, const void *v_cache, const Batch &batch,
                   const Heads &heads, int32_t dtype) {
    if (dtype == FLOAT32)
        attention((const float *)q, (float *)out, (const float *)k_cache, (const float *)v_cache, batch, heads);
    else
        attention((const bf16 *)q, (bf16 *)out, (const bf16 *)k_cache, (const bf16 *)v_cache, batch, heads);
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

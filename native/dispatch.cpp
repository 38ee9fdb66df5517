// Chooses the kernels that this processor can run, and exports them as plain C functions.
#include "kernels.h"

#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Choice {
    const char *name;
    const Kernels *kernels;
    bool runs_here;
};

const Choice *chosen = nullptr;

const Choice *best_choice(const char *wanted) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    static const Choice choices[] = {
#if defined(HAVE_AVX512BF16)
        {"avx512bf16", &avx512bf16::kernels,
         has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")},
#endif
#if defined(HAVE_AVX512)
        {"avx512", &avx512::kernels, has_avx512},
#endif
#if defined(HAVE_AVX2)
        {"avx2", &avx2::kernels, has_avx2},
#endif
        {"baseline", &baseline::kernels, true},
    };
    for (const Choice &choice : choices)
        if (choice.runs_here && (!wanted || !std::strcmp(wanted, choice.name))) return &choice;
    return nullptr;
}

} // namespace

// Selects the kernels called `isa`, or the fastest that run here if null, and returns their name; null if there are none.
EXPORT const char *chairlift_select(const char *isa) {
    const Choice *choice = best_choice(isa);
    if (choice) chosen = choice;
    return choice ? choice->name : nullptr;
}

EXPORT void chairlift_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t dim,
                               float eps, int32_t dtype) {
    chosen->kernels->rms_norm(x, residual, weight, out, rows, dim, eps, dtype);
}

EXPORT void chairlift_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t dim, int32_t dtype) {
    chosen->kernels->silu_mul(gate_up, out, rows, dim, dtype);
}

EXPORT void chairlift_rope_and_write(const void *qkv, void *q_out, const float *cos_sin, const int64_t *positions,
                                     const int64_t *slots, void *k_cache, void *v_cache, const void *q_norm,
                                     const void *k_norm, float eps, int64_t tokens, const Heads *heads,
                                     int32_t dtype) {
    chosen->kernels->rope_and_write(qkv, q_out, cos_sin, positions, slots, k_cache, v_cache, q_norm, k_norm, eps,
                                    tokens, *heads, dtype);
}

EXPORT void chairlift_attention(const void *q, void *out, const void *k_cache, const void *v_cache,
                                const int32_t *query_start, const int32_t *context_len, const int32_t *block_tables,
                                int64_t table_stride, int32_t num_seqs, const Heads *heads, int32_t dtype) {
    const Batch batch{query_start, context_len, block_tables, table_stride, num_seqs};
    chosen->kernels->attention(q, out, k_cache, v_cache, batch, *heads, dtype);
}

// Whether the selected kernels have products of their own.
EXPORT int32_t chairlift_has_linear() { return chosen->kernels->linear != nullptr; }

EXPORT void chairlift_pack(const void *weight, void *packed, int64_t outs, int64_t ins) {
    chosen->kernels->pack(weight, packed, outs, ins);
}

EXPORT void chairlift_linear(const void *x, const void *packed, const float *bias, void *out, int64_t rows, int64_t outs,
                             int64_t ins) {
    chosen->kernels->linear(x, packed, bias, out, rows, outs, ins);
}

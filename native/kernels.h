// The plain C interface of the kernels, and the table that each instruction set fills in.
#pragma once
#include <cstdint>

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

// Attention heads of one layer. window <= 0 stands for no window.
struct Heads {
    int32_t num_heads, num_kv_heads, head_dim, block_size, window;
    float scale;
};

// One step, as chairlift.ops.base.AttentionBatch has it.
struct Batch {
    const int32_t *query_start, *context_len, *block_tables;
    int64_t table_stride;
    int32_t num_seqs;
};

// Layout of the cache, with B = block_size:
//   float32:  K [blocks, kv_heads, D, B]            V [blocks, kv_heads, B, Dp]
//   bfloat16: K [blocks, kv_heads, D / 2, Be, 2]    V [blocks, kv_heads, Be / 2, Dp, 2]
// Be is B rounded up to even, Dp is D rounded up to 16. K lies so that one load serves 16 tokens of a score and V so
// that one load serves 16 dimensions of the output; bfloat16 values lie in pairs along the axis that is summed over,
// which is what the dot-product instructions of AVX-512 read, and which other machines split with a shift and a mask.
// Loads of K may run past the end of a block by up to 15 tokens, so K is followed by slack of 32 elements.
struct Kernels {
    void (*rms_norm)(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t dim, float eps,
                     int32_t dtype);
    void (*silu_mul)(const void *gate_up, void *out, int64_t rows, int64_t dim, int32_t dtype);
    void (*rope_and_write)(const void *qkv, void *q_out, const float *cos_sin, const int64_t *positions,
                           const int64_t *slots, void *k_cache, void *v_cache, const void *q_norm, const void *k_norm,
                           float eps, int64_t tokens, const Heads &heads, int32_t dtype);
    void (*attention)(const void *q, void *out, const void *k_cache, const void *v_cache, const Batch &batch,
                      const Heads &heads, int32_t dtype);
    // bfloat16 only; null where there is no kernel.
    void (*pack)(const void *weight, void *packed, int64_t outs, int64_t ins);
    void (*linear)(const void *x, const void *packed, const float *bias, void *out, int64_t rows, int64_t outs,
                   int64_t ins);
};

namespace baseline { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512bf16 { extern const Kernels kernels; }

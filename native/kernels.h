// The plain C interface of the kernels, and the table that each instruction set fills in.
#pragma once
#include <cstdint>

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Attention heads of one layer. window <= 0 stands for no window. The cache is INT8, or else of the activations' type.
struct Heads {
    int32_t num_heads, num_kv_heads, head_dim, block_size, window;
    float scale;
    int32_t cache_dtype;
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
//   int8: as bfloat16, each head of a block followed by the scales of its B tokens in float32
// Be is B rounded up to even, Dp is D rounded up to 16. K lies so that one load serves 16 tokens of a score and V so
// that one load serves 16 dimensions of the output; bfloat16 values lie in pairs along the axis that is summed over,
// which is what the dot-product instructions of AVX-512 read, and which other machines split with a shift and a mask.
// A scale is that of one token under one KV head: a token can then be written without touching the others, and scales
// leave the sums over the head's dimensions, so that products stay in integers. They lie behind the numbers they belong
// to, where one run of memory holds both. They are float32 since bfloat16 would add an error half as large as that of
// the 8 bits, to save 3% of the memory.
// Loads of K and of scales may run past the end of a block by up to 15 tokens, so K and V are followed by slack of 64
// bytes.
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

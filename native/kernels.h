// The plain C interface of the kernels, and the table that each instruction set fills in.
#pragma once
#include <cstdint>

// Of functions that many places call, each with much to do: inlined everywhere they would double the time to compile.
#define NOINLINE __attribute__((noinline, noclone))

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Attention heads of one layer. window <= 0 stands for no window, and a cap of 0 for none: else scores, scaled, become
// cap * tanh(score / cap). Slopes, null or one for each head, are what a score loses for each token between the two. The
// cache is INT8, or else of the activations' type. With `both_ways` a token sees as far ahead as back.
struct Heads {
    int32_t num_heads, num_kv_heads, head_dim, block_size, window, both_ways;
    float scale, cap;
    int32_t cache_dtype;
    const float *slopes;
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

// Outputs whose weights lie together when packed.
constexpr int PANEL = 32;

// How packed weights lie: see format.h.
enum class FormatId : int32_t { BFLOAT16 = 0, INT8 = 1, INT4 = 2, FLOAT32 = 3, FLOAT16 = 4, WIDE_BFLOAT16 = 5 };

// What a format is, for comparison with the table in chairlift/ops/formats.py.
struct FormatInfo {
    const char *name;
    int32_t bits, inputs, block_inputs, block_bytes, scaled, compensated;
    const char *path;   // the instructions that multiply it; null where these kernels do not
};

enum Activation : int32_t { GELU = 0, GELU_TANH = 1, RELU = 2, SILU = 3, SWIGLU_CLAMPED = 4 };

// A weight [out_features, in_features], packed: see gemm.h. In a gated one, the upper half of whose outputs is
// multiplied with the activation of the lower half, a panel holds 16 outputs of each half.
struct Weight {
    const void *packed;
    const float *bias;          // [panels * PANEL], in the order of the panels, like the others; may be null
    const float *scales;        // of scaled formats, one for each output
    const int32_t *compensation;    // of compensated ones: -128, the zero point, times the sum of the weights
    int64_t out_features, in_features;
    int32_t format, gated;
    int32_t activation;         // of a decoder's: of what is gated, or of all outputs; negative: none
    int64_t panels() const {
        return gated ? (out_features / 2 + PANEL / 2 - 1) / (PANEL / 2) : (out_features + PANEL - 1) / PANEL;
    }
};

// A norm's weight. What is normalized is rounded to its type before they are multiplied.
struct Norm {
    const void *weight;         // of the activations' type or FLOAT32; null where there is no norm
    int32_t dtype;
};

// Norms of queries and keys: each head by itself, or `together` all of a token's, each with weights of its own.
struct HeadNorms {
    Norm q, k;
    int32_t together;
    float eps;
};

constexpr int MAX_EXPERT_GROUPS = 64;

// An MLP of which each token uses a part: the `chosen` experts whose scores are highest, and all use a shared one if
// there is one. See chairlift/ops/experts.py for what is computed.
struct Experts {
    const float *router;        // [count, hidden_size], and of a shared expert with a gate one more row for that
    const float *router_bias;   // [count]: added to the logits; may be null
    const float *choice_bias;   // [count]: added to the scores that are compared; may be null
    const Weight *gate_up, *down;   // one of each for each expert, all of the same size and format
    Weight shared_gate_up, shared_down;     // `packed` is null where there is none
    int32_t count, chosen, sigmoid, renormalized, shared_gated;
    int32_t groups, groups_chosen, group_best;   // see `Routing`
    float least_sum, scale;
};

// Attention over one head of keys and values that those of all heads are made of. See chairlift/ops/latent.py.
struct Latent {
    Weight first, query;            // the latter's `packed` is null where the former gives queries
    Norm query_norm, norm;
    const Weight *key_up, *value_up;    // one of each for each head, all of the same size and format
    int32_t rank, plain, rotated, value;
    float eps;                      // of both norms
};

// Through which states the tokens of a step go, as chairlift.ops.base.StateSpans has it: sequence i owns the tokens
// [starts[i], starts[i + 1]) and the state in row rows[i]. Its cuts are [first_cut[i], first_cut[i + 1]): after so many of
// its tokens, and before its last, its state is copied to a row.
struct StateSpans {
    const int64_t *rows, *starts, *first_cut, *cut_after, *cut_rows;
    int64_t count;
};

// Where one layer's states lie: that of row r at base + r * stride bytes.
struct States {
    char *base;
    int64_t stride;
};

// Inputs of each channel that a convolution may see at once.
constexpr int64_t MAX_TAPS = 16;

// A causal convolution of each channel by itself. x [tokens, channels], its rows x_stride apart; weight [channels, taps];
// bias [channels] or null; out [tokens, channels]; states [channels, taps]. All of the activations' type. Of a decoder's
// layer x and out are the pass's.
struct Convolution {
    const void *x, *weight, *bias;
    void *out;
    States state;
    int64_t x_stride, channels, taps;
    int32_t silu;
};

// The gated delta rule. q, k [tokens, key_heads, key_dim] and v [tokens, value_heads, value_dim] of the activations' type,
// their rows strides apart; decay, its logarithm, and beta [tokens, value_heads]; out [tokens, value_heads, value_dim];
// states [value_heads, key_dim, value_dim] float32. `unit`: queries and keys are divided by their lengths.
struct DeltaRule {
    const void *q, *k, *v;
    const float *decay, *beta;
    void *out;
    States state;
    int64_t q_stride, k_stride, v_stride, key_heads, value_heads, key_dim, value_dim;
    int32_t unit;
};

// A layer with the gated delta rule (Qwen 3.5): see chairlift/ops/gated_delta_net.py. The convolution's channels are
// queries, keys and values; behind them the layer's first product gives gates [value_heads, value_dim], and of each head
// of values beta and the step. x, out and all that the rule takes but its state are the pass's.
struct DeltaNet {
    Convolution convolution;
    DeltaRule rule;
    const float *decay, *step_bias;     // [value_heads]
    Norm norm;                          // of each head's output
};

// Mamba 2. x [tokens, heads, head_dim], b and c [tokens, groups, state_dim] of the activations' type, their rows strides
// apart; dt [tokens, heads]; a and d (or null) [heads]; out [tokens, heads, head_dim]; states [heads, head_dim, state_dim],
// all float32.
struct Mamba2 {
    const void *x, *b, *c;
    const float *dt, *a, *d;
    float *out;
    States state;
    int64_t x_stride, b_stride, c_stride, heads, groups, head_dim, state_dim;
};

// A layer with Mamba 2 (Granite 4): see chairlift/ops/mamba_mixer.py. The layer's first product gives gates
// [heads, head_dim], what the convolution sees (x, b and c), and of each head the step. What is of tokens is the pass's.
struct MambaMixer {
    Convolution convolution;
    Mamba2 scan;
    const float *step_bias;     // [heads]
    Norm norm;                  // of all heads' outputs, those of a group together
    float least_step, most_step;
};

// How queries and keys are turned at each position, and by what queries grow there.
struct RotaryTable {
    const float *cos_sin;       // [positions, head_dim]: cosines of all pairs, then sines
    const float *query_factors; // [positions]; null: all are 1
};

// One layer of a decoder, and its norms of what attention and the MLP are given (pre) and of what they give (post).
struct DecoderLayer {
    Norm attention_pre_norm, attention_post_norm, mlp_pre_norm, mlp_post_norm;
    HeadNorms head_norms;
    Weight qkv, out, gate_up, down;
    const Experts *experts;     // if there are any, gate_up and down are not used
    const Latent *latent;       // if there is one, qkv is not used
    const Convolution *convolution;     // if there is one, it stands in the place of attention: see short_convolution
    const DeltaNet *delta;      // likewise
    const MambaMixer *mamba;    // likewise
    const float *sinks;         // of each head a score of nothing that every token sees; null: there are none
    void *k_cache, *v_cache;
    RotaryTable rotation;
    int32_t window;
    int32_t gated;              // whether qkv ends with gates of what attention gives
    int32_t parallel;           // whether the MLP is given what attention is given, and both are added
};

struct Decoder {
    const DecoderLayer *layers;
    int64_t num_layers, hidden_size;
    Norm norm;
    const void *embedding;          // null: the rows of the head
    const void *positions;          // [positions, hidden_size], added to embeddings; null: there are none
    Weight head;
    Heads heads;                    // but for the window
    float eps, embedding_scale;
    int32_t dtype;
};

// The tokens of one step, and those (ascending) whose hidden states are wanted.
struct Pass {
    const int64_t *token_ids, *positions, *slots, *logit_rows;
    int64_t num_tokens, num_logits;
    Batch batch;
    const StateSpans *states;       // where layers have any
    // Does a part of something else, while the others compute, and says whether there is more; null: there is nothing.
    int32_t (*side_work)();
};

// Layer normalization; both null where there is none, and the bias where it has none.
struct LayerNorm {
    const float *weight, *bias;
};

// One layer of an encoder. A gated `up` holds what is activated in its lower half.
struct EncoderLayer {
    LayerNorm attention_norm, mlp_norm;
    Weight qkv, out, up, down;
    const float *cos_sin;   // of each position; null: nothing is rotated
    int32_t window;         // how far a token sees to either side; negative: all of its text
};

// An encoder; what it has not is null. The relative bias [heads, 2 * span - 1] is that of each distance key - query.
struct Encoder {
    const EncoderLayer *layers;
    int64_t num_layers, hidden_size;
    const void *words, *positions, *types;
    int64_t first_position;
    LayerNorm embedding_norm, final_norm;
    const float *bias;
    int64_t bias_span;
    int32_t num_heads, activation, pre_norm, rms, dtype;
    float eps;
};

// Texts end to end, and what is wanted of each: the states of all tokens, their mean, the first's or the last's.
enum Output : int32_t { TOKENS = 0, MEAN = 1, FIRST = 2, LAST = 3 };
struct Texts {
    const int32_t *token_ids, *type_ids, *starts;   // type_ids null: all of type 0
    int64_t count;
    int32_t output;
};

// How tokens are to be drawn from each row of logits, one for each of `count` numbers; top_k 0, top_p 1 and min_p 0 are
// off.
struct Draws {
    const float *temperature, *min_p, *top_p;
    const int64_t *top_k;
    const double *uniform;  // [rows, count]
    int64_t count;
};

// What a function of the library comes to, as nothing may be thrown out of it.
struct Status {
    int32_t out_of_memory;  // what it was to make is worth nothing
};

struct Kernels {
    void (*rms_norm)(const void *x, void *residual, const Norm &norm, void *out, int64_t rows, int64_t dim, float eps,
                     int32_t dtype);
    void (*gate)(const void *gate_up, void *out, int64_t rows, int64_t dim, int32_t activation, int32_t dtype);
    void (*rope_and_write)(const void *qkv, void *q_out, const RotaryTable &rotation, const int64_t *positions,
                           const int64_t *slots, void *k_cache, void *v_cache, const HeadNorms &norms, int64_t tokens,
                           const Heads &heads, int32_t dtype);
    void (*attention)(const void *q, void *out, const void *k_cache, const void *v_cache, const Batch &batch,
                      const Heads &heads, const float *sinks, int32_t dtype);
    // Fills what `packed` points to from weight [out_features, in_features] and bias [out_features] (or null).
    void (*pack)(const void *weight, const void *bias, const Weight &packed, int32_t dtype);
    // The sums as rows of the activations' type (for a gated weight half as many), activated if it has an activation, or as floats.
    void (*linear)(const void *x, int64_t rows, const Weight &weight, void *out, bool floats, int32_t dtype);
    void (*best)(const void *x, int64_t rows, const Weight &weight, const uint32_t *const *allowed,
                 int64_t most, int64_t *index, float *value, int32_t dtype);
    void (*embed)(const int64_t *ids, int64_t rows, const Weight &head, void *out, int32_t dtype);
    void (*decode)(const Decoder &decoder, const Pass &pass, void *hidden);
    void (*add_mlp)(const Decoder &decoder, const void *added, void *residual, int64_t rows);
    void (*encode)(const Encoder &encoder, const Texts &texts, float *out);
    void (*draw)(const float *logits, int64_t rows, int64_t vocab, const Draws &draws, int64_t *ids);
    void (*highest)(const float *logits, int64_t rows, int64_t vocab, int64_t *ids, float *values);
    void (*exclude)(float *logits, int64_t rows, int64_t vocab, const uint32_t *const *allowed);
    void (*causal_conv)(const StateSpans &spans, const Convolution &conv, int32_t dtype);
    void (*gated_delta)(const StateSpans &spans, const DeltaRule &rule, int32_t dtype);
    void (*mamba2)(const StateSpans &spans, const Mamba2 &mamba, int32_t dtype);
    const FormatInfo *formats;  // each at the place that its id says
    int32_t num_formats;
};

namespace baseline { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avxvnni { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512vnni { extern const Kernels kernels; }
namespace avx512bf16 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }

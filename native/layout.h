// The C structures as this library was built with them. chairlift/ops/native.py has a mirror of each and holds it
// against this table when it loads the library. Who adds a field to a structure adds it here and to its mirror.
#pragma once
#include <cstddef>

#include "kernels.h"

// One field of a structure; without a name, the structure as a whole.
struct Field {
    const char *structure, *name;
    int64_t offset, size, alignment;
};

#define STRUCTURE(type) {#type, nullptr, 0, int64_t(sizeof(type)), int64_t(alignof(type))}
#define FIELD(type, name)                                                                                             \
    {#type, #name, int64_t(offsetof(type, name)), int64_t(sizeof(type::name)), int64_t(alignof(decltype(type::name)))}

constexpr Field LAYOUT[] = {
    STRUCTURE(Heads),
    FIELD(Heads, num_heads),
    FIELD(Heads, num_kv_heads),
    FIELD(Heads, head_dim),
    FIELD(Heads, block_size),
    FIELD(Heads, window),
    FIELD(Heads, both_ways),
    FIELD(Heads, scale),
    FIELD(Heads, cap),
    FIELD(Heads, cache_dtype),
    FIELD(Heads, slopes),

    STRUCTURE(Batch),
    FIELD(Batch, query_start),
    FIELD(Batch, context_len),
    FIELD(Batch, block_tables),
    FIELD(Batch, table_stride),
    FIELD(Batch, num_seqs),

    STRUCTURE(FormatInfo),
    FIELD(FormatInfo, name),
    FIELD(FormatInfo, bits),
    FIELD(FormatInfo, inputs),
    FIELD(FormatInfo, block_inputs),
    FIELD(FormatInfo, block_bytes),
    FIELD(FormatInfo, scaled),
    FIELD(FormatInfo, compensated),
    FIELD(FormatInfo, path),

    STRUCTURE(Weight),
    FIELD(Weight, packed),
    FIELD(Weight, bias),
    FIELD(Weight, scales),
    FIELD(Weight, compensation),
    FIELD(Weight, out_features),
    FIELD(Weight, in_features),
    FIELD(Weight, format),
    FIELD(Weight, gated),
    FIELD(Weight, activation),

    STRUCTURE(StateSpans),
    FIELD(StateSpans, rows),
    FIELD(StateSpans, starts),
    FIELD(StateSpans, first_cut),
    FIELD(StateSpans, cut_after),
    FIELD(StateSpans, cut_rows),
    FIELD(StateSpans, count),

    STRUCTURE(States),
    FIELD(States, base),
    FIELD(States, stride),

    STRUCTURE(Convolution),
    FIELD(Convolution, x),
    FIELD(Convolution, weight),
    FIELD(Convolution, bias),
    FIELD(Convolution, out),
    FIELD(Convolution, state),
    FIELD(Convolution, x_stride),
    FIELD(Convolution, channels),
    FIELD(Convolution, taps),
    FIELD(Convolution, silu),

    STRUCTURE(DeltaRule),
    FIELD(DeltaRule, q),
    FIELD(DeltaRule, k),
    FIELD(DeltaRule, v),
    FIELD(DeltaRule, decay),
    FIELD(DeltaRule, beta),
    FIELD(DeltaRule, out),
    FIELD(DeltaRule, state),
    FIELD(DeltaRule, q_stride),
    FIELD(DeltaRule, k_stride),
    FIELD(DeltaRule, v_stride),
    FIELD(DeltaRule, key_heads),
    FIELD(DeltaRule, value_heads),
    FIELD(DeltaRule, key_dim),
    FIELD(DeltaRule, value_dim),
    FIELD(DeltaRule, unit),

    STRUCTURE(DeltaNet),
    FIELD(DeltaNet, convolution),
    FIELD(DeltaNet, rule),
    FIELD(DeltaNet, decay),
    FIELD(DeltaNet, step_bias),
    FIELD(DeltaNet, norm),

    STRUCTURE(Mamba2),
    FIELD(Mamba2, x),
    FIELD(Mamba2, b),
    FIELD(Mamba2, c),
    FIELD(Mamba2, dt),
    FIELD(Mamba2, a),
    FIELD(Mamba2, d),
    FIELD(Mamba2, out),
    FIELD(Mamba2, state),
    FIELD(Mamba2, x_stride),
    FIELD(Mamba2, b_stride),
    FIELD(Mamba2, c_stride),
    FIELD(Mamba2, heads),
    FIELD(Mamba2, groups),
    FIELD(Mamba2, head_dim),
    FIELD(Mamba2, state_dim),

    STRUCTURE(MambaMixer),
    FIELD(MambaMixer, convolution),
    FIELD(MambaMixer, scan),
    FIELD(MambaMixer, step_bias),
    FIELD(MambaMixer, norm),
    FIELD(MambaMixer, least_step),
    FIELD(MambaMixer, most_step),

    STRUCTURE(Norm),
    FIELD(Norm, weight),
    FIELD(Norm, dtype),

    STRUCTURE(HeadNorms),
    FIELD(HeadNorms, q),
    FIELD(HeadNorms, k),
    FIELD(HeadNorms, together),
    FIELD(HeadNorms, eps),

    STRUCTURE(Experts),
    FIELD(Experts, router),
    FIELD(Experts, router_bias),
    FIELD(Experts, choice_bias),
    FIELD(Experts, gate_up),
    FIELD(Experts, down),
    FIELD(Experts, shared_gate_up),
    FIELD(Experts, shared_down),
    FIELD(Experts, count),
    FIELD(Experts, chosen),
    FIELD(Experts, sigmoid),
    FIELD(Experts, renormalized),
    FIELD(Experts, shared_gated),
    FIELD(Experts, groups),
    FIELD(Experts, groups_chosen),
    FIELD(Experts, group_best),
    FIELD(Experts, least_sum),
    FIELD(Experts, scale),

    STRUCTURE(Latent),
    FIELD(Latent, first),
    FIELD(Latent, query),
    FIELD(Latent, query_norm),
    FIELD(Latent, norm),
    FIELD(Latent, key_up),
    FIELD(Latent, value_up),
    FIELD(Latent, rank),
    FIELD(Latent, plain),
    FIELD(Latent, rotated),
    FIELD(Latent, value),
    FIELD(Latent, eps),

    STRUCTURE(RotaryTable),
    FIELD(RotaryTable, cos_sin),
    FIELD(RotaryTable, query_factors),

    STRUCTURE(DecoderLayer),
    FIELD(DecoderLayer, attention_pre_norm),
    FIELD(DecoderLayer, attention_post_norm),
    FIELD(DecoderLayer, mlp_pre_norm),
    FIELD(DecoderLayer, mlp_post_norm),
    FIELD(DecoderLayer, head_norms),
    FIELD(DecoderLayer, qkv),
    FIELD(DecoderLayer, out),
    FIELD(DecoderLayer, gate_up),
    FIELD(DecoderLayer, down),
    FIELD(DecoderLayer, experts),
    FIELD(DecoderLayer, latent),
    FIELD(DecoderLayer, convolution),
    FIELD(DecoderLayer, delta),
    FIELD(DecoderLayer, mamba),
    FIELD(DecoderLayer, sinks),
    FIELD(DecoderLayer, k_cache),
    FIELD(DecoderLayer, v_cache),
    FIELD(DecoderLayer, rotation),
    FIELD(DecoderLayer, window),
    FIELD(DecoderLayer, gated),
    FIELD(DecoderLayer, parallel),

    STRUCTURE(Decoder),
    FIELD(Decoder, layers),
    FIELD(Decoder, num_layers),
    FIELD(Decoder, hidden_size),
    FIELD(Decoder, norm),
    FIELD(Decoder, embedding),
    FIELD(Decoder, positions),
    FIELD(Decoder, head),
    FIELD(Decoder, heads),
    FIELD(Decoder, eps),
    FIELD(Decoder, embedding_scale),
    FIELD(Decoder, dtype),

    STRUCTURE(Pass),
    FIELD(Pass, token_ids),
    FIELD(Pass, positions),
    FIELD(Pass, slots),
    FIELD(Pass, logit_rows),
    FIELD(Pass, num_tokens),
    FIELD(Pass, num_logits),
    FIELD(Pass, batch),
    FIELD(Pass, states),
    FIELD(Pass, side_work),

    STRUCTURE(LayerNorm),
    FIELD(LayerNorm, weight),
    FIELD(LayerNorm, bias),

    STRUCTURE(EncoderLayer),
    FIELD(EncoderLayer, attention_norm),
    FIELD(EncoderLayer, mlp_norm),
    FIELD(EncoderLayer, qkv),
    FIELD(EncoderLayer, out),
    FIELD(EncoderLayer, up),
    FIELD(EncoderLayer, down),
    FIELD(EncoderLayer, cos_sin),
    FIELD(EncoderLayer, window),

    STRUCTURE(Encoder),
    FIELD(Encoder, layers),
    FIELD(Encoder, num_layers),
    FIELD(Encoder, hidden_size),
    FIELD(Encoder, words),
    FIELD(Encoder, positions),
    FIELD(Encoder, types),
    FIELD(Encoder, first_position),
    FIELD(Encoder, embedding_norm),
    FIELD(Encoder, final_norm),
    FIELD(Encoder, bias),
    FIELD(Encoder, bias_span),
    FIELD(Encoder, num_heads),
    FIELD(Encoder, activation),
    FIELD(Encoder, pre_norm),
    FIELD(Encoder, rms),
    FIELD(Encoder, dtype),
    FIELD(Encoder, eps),

    STRUCTURE(Texts),
    FIELD(Texts, token_ids),
    FIELD(Texts, type_ids),
    FIELD(Texts, starts),
    FIELD(Texts, count),
    FIELD(Texts, output),

    STRUCTURE(Draws),
    FIELD(Draws, temperature),
    FIELD(Draws, min_p),
    FIELD(Draws, top_p),
    FIELD(Draws, top_k),
    FIELD(Draws, uniform),
    FIELD(Draws, count),

    STRUCTURE(Status),
    FIELD(Status, out_of_memory),
};

#undef STRUCTURE
#undef FIELD

// Whether the fields of each structure follow each other with no more than padding between and behind them.
constexpr bool covers_all() {
    int64_t size = 0, alignment = 1, end = 0;
    for (const Field &field : LAYOUT) {
        const int64_t gap = (field.name ? field.offset : size) - end;
        if (gap < 0 || gap >= (field.name ? field.alignment : alignment)) return false;
        if (!field.name) size = field.size, alignment = field.alignment;
        end = field.name ? field.offset + field.size : 0;
    }
    return size - end < alignment;
}
static_assert(covers_all(), "a structure has a field that LAYOUT lacks, or has them in another order");

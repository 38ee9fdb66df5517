// The kernels for one instruction set: built once for each, with ISA set to its name.
#include "attention.h"
#include "encoder.h"
#include "forward.h"
#include "linear.h"
#include "recurrence.h"
#include "sampling.h"

namespace {

// Calls f with a null pointer to the type of the activations.
template <typename F> void with_type(int32_t dtype, F f) {
    float *const single = nullptr;
    bf16 *const half = nullptr;
    dtype == FLOAT32 ? f(single) : f(half);
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

void any_rms_norm(const void *x, void *residual, const Norm &norm, void *out, int64_t rows, int64_t dim, float eps,
                  int32_t dtype) {
    with_type(dtype, [&](auto *type) {
        using T = decltype(type);
        rms_norm(T(x), T(residual), norm, T(out), rows, dim, eps);
    });
}

void any_gate(const void *gate_up, void *out, int64_t rows, int64_t dim, int32_t activation, int32_t dtype) {
    with_type(dtype, [&](auto *type) {
        using T = decltype(type);
        gate(T(gate_up), T(out), rows, dim, activation);
    });
}

void any_rope_and_write(const void *qkv, void *q_out, const RotaryTable &rotation, const int64_t *positions,
                        const int64_t *slots, void *k_cache, void *v_cache, const HeadNorms &norms, int64_t tokens,
                        const Heads &heads, int32_t dtype) {
    with_types(dtype, heads, [&](auto *type, auto *cache) {
        using T = decltype(type);
        using C = decltype(cache);
        rope_and_write(T(qkv), T(q_out), rotation, positions, slots, C(k_cache), C(v_cache), norms, tokens, heads);
    });
}

void any_attention(const void *q, void *out, const void *k_cache, const void *v_cache, const Batch &batch,
                   const Heads &heads, const float *sinks, int32_t dtype) {
    with_types(dtype, heads, [&](auto *type, auto *cache) {
        using T = decltype(type);
        using C = decltype(cache);
        attention(T(q), T(out), C(k_cache), C(v_cache), batch, heads, sinks);
    });
}

void any_pack(const void *weight, const void *bias, const Weight &packed, int32_t dtype) {
    with_type(dtype, [&](auto *type) {
        using T = decltype(type);
        pack(T(weight), T(bias), packed);
    });
}

void any_linear(const void *x, int64_t rows, const Weight &weight, void *out, bool floats, int32_t dtype) {
    with_type(dtype, [&](auto *type) {
        using T = decltype(type);
        linear(T(x), rows, weight, T(out), floats);
    });
}

void any_best(const void *x, int64_t rows, const Weight &weight, const uint32_t *const *allowed,
              int64_t most, int64_t *index, float *value, int32_t dtype) {
    with_type(dtype, [&](auto *type) {
        using T = decltype(type);
        best(T(x), rows, weight, allowed, most, index, value);
    });
}

void any_embed(const int64_t *ids, int64_t rows, const Weight &head, void *out, int32_t dtype) {
    with_type(dtype, [&](auto *type) {
        using T = decltype(type);
        embed(ids, rows, head, T(out));
    });
}

void any_decode(const Decoder &decoder, const Pass &pass, void *hidden) {
    with_type(decoder.dtype, [&](auto *type) {
        using T = decltype(type);
        decode(decoder, pass, T(hidden));
    });
}

void any_add_mlp(const Decoder &decoder, const void *added, void *residual, int64_t rows) {
    with_type(decoder.dtype, [&](auto *type) {
        using T = decltype(type);
        add_mlp(decoder, T(added), T(residual), rows);
    });
}

void any_encode(const Encoder &encoder, const Texts &texts, float *out) {
    with_type(encoder.dtype, [&](auto *type) { encode<std::remove_pointer_t<decltype(type)>>(encoder, texts, out); });
}

void any_conv(const StateSpans &spans, const Convolution &conv, int32_t dtype) {
    with_type(dtype, [&](auto *type) { causal_conv<std::remove_pointer_t<decltype(type)>>(spans, conv); });
}

void any_delta(const StateSpans &spans, const DeltaRule &rule, int32_t dtype) {
    with_type(dtype, [&](auto *type) { gated_delta<std::remove_pointer_t<decltype(type)>>(spans, rule); });
}

void any_mamba2(const StateSpans &spans, const Mamba2 &mamba, int32_t dtype) {
    with_type(dtype, [&](auto *type) { mamba2<std::remove_pointer_t<decltype(type)>>(spans, mamba); });
}

template <typename Format> constexpr FormatInfo info() {
    return {Format::NAME,   Format::BITS,        Format::INPUTS,           int32_t(Format::BLOCK_INPUTS), int32_t(Format::BLOCK_BYTES),
            Format::SCALED, Format::COMPENSATED, MicroKernel<Format>::PATH};
}

template <typename... Each> struct FormatTable;
template <typename... Each> struct FormatTable<FormatList<Each...>> {
    static constexpr FormatInfo all[] = {info<Each>()...};
    static constexpr bool in_order() {
        int32_t place = 0;
        return ((int32_t(Each::ID) == place++) && ...);
    }
    static_assert(in_order(), "formats are listed in the order of their ids");
};

} // namespace

namespace ISA {
extern const Kernels kernels = {any_rms_norm, any_gate,     any_rope_and_write, any_attention, any_pack, any_linear,
                                any_best,     any_embed,    any_decode,         any_add_mlp,   any_encode,   draw,
                                highest,      exclude,      any_conv,           any_delta,     any_mamba2,
                                FormatTable<Formats>::all,  Formats::COUNT};
}

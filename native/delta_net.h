// What a layer with the gated delta rule does beside its two products, one phase of a team after the other.
#pragma once
#include "elementwise.h"
#include "recurrence.h"
#include "team.h"

namespace {

inline vfloat logistic(vfloat x) { return 1.0f / (exp2_(vmin(x * -1.44269504f, vfloat{} + 126.0f)) + 1.0f); }

// Numbers as they are once they were stored.
template <typename T> inline vfloat stored(vfloat x) {
    T kept[LANES];
    store_narrow(kept, x);
    return load_wide(static_cast<const T *>(kept));
}

// x = f(x, y) for each of two rows' numbers.
template <typename T, typename F>
inline __attribute__((always_inline)) void combine_rows(T *x, const T *y, int64_t size, F f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_narrow(x + i, f(load_wide(static_cast<const T *>(x + i)), load_wide(y + i)));
    if (i == size) return;
    T left[LANES] = {}, right[LANES] = {};
    std::memcpy(left, x + i, (size - i) * sizeof(T));
    std::memcpy(right, y + i, (size - i) * sizeof(T));
    store_narrow(left, f(load_wide(static_cast<const T *>(left)), load_wide(static_cast<const T *>(right))));
    std::memcpy(x + i, left, (size - i) * sizeof(T));
}

// log(1 + exp(x)), which is x where that is all there is of it, as PyTorch has it.
inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

// One layer over the tokens of a step. Of each token `tokens` has `stride` numbers: what the convolution sees, the gates,
// and of each head of values beta and the step.
template <typename T> class DeltaLayer {
    const DeltaNet &net;
    const StateSpans &spans;
    Convolution conv;
    DeltaRule rule;
    const T *tokens;
    const int64_t stride, num_tokens;
    T *out;
    float *decay, *beta;

  public:
    // `space` has room for the convolution's output of all tokens, and `out` for the layer's.
    DeltaLayer(const DeltaNet &net, const StateSpans &spans, const T *tokens, int64_t stride, int64_t num_tokens,
               T *space, float *decay, float *beta, T *out)
        : net(net), spans(spans), conv(net.convolution), rule(net.rule), tokens(tokens), stride(stride),
          num_tokens(num_tokens), out(out), decay(decay), beta(beta) {
        conv.x = tokens, conv.x_stride = stride, conv.out = space;
        const int64_t keys = rule.key_heads * rule.key_dim;
        rule.q = space, rule.k = space + keys, rule.v = space + 2 * keys;
        rule.q_stride = rule.k_stride = rule.v_stride = conv.channels;
        rule.decay = decay, rule.beta = beta, rule.out = out;
    }

    // Queries, keys and values of all tokens, and how much of its state each head forgets and takes up.
    void take_up(const Team &team) {
        const Range blocks = team.share(Channels::blocks(conv) * spans.count);
        for (int64_t i = blocks.begin; i < blocks.end; i++)
            conv_task<T>(spans, conv, i % spans.count, i / spans.count);
        const int64_t heads = rule.value_heads, behind = conv.channels + heads * rule.value_dim;
        const Range mine = team.share(num_tokens);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            const T *betas = tokens + t * stride + behind, *steps = betas + heads;
            for (int64_t h = 0; h < heads; h++) {
                beta[t * heads + h] = widen(narrow<T>(1.0f / (1.0f + exp_(-widen(betas[h])))));
                decay[t * heads + h] = net.decay[h] * softplus(widen(steps[h]) + net.step_bias[h]);
            }
        }
    }

    // The rule, a task at a time, as sequences have more tokens or fewer; `memory` is the thread's own.
    void run(Team &team, float *memory) {
        const int64_t blocks = column_blocks(rule) * rule.value_heads, tasks = blocks * spans.count;
        for (int64_t i = team.take(); i < tasks; i = team.take()) {
            const int64_t block = i / spans.count;
            delta_task<T>(spans, rule, i % spans.count, block % rule.value_heads, block / rule.value_heads, memory);
        }
    }

    // Normalizes each head of what came out, and multiplies it with SiLU of its gate.
    void gate(const Team &team, float eps) {
        const int64_t heads = rule.value_heads, dim = rule.value_dim;
        const Range mine = team.share(num_tokens * heads);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            T *head = out + i * dim;
            const T *gates = tokens + i / heads * stride + conv.channels + i % heads * dim;
            norm_row(head, net.norm, head, dim, eps);
            combine_rows(head, gates, dim, [](vfloat made, vfloat gate) { return made * silu(gate); });
        }
    }
};

// Multiplies each row of x [rows, size] with the logistic function of its gates, which lie `stride` apart.
template <typename T>
void gate_rows(T *x, const T *gates, int64_t size, int64_t stride, const Range &rows) {
    for (int64_t row = rows.begin; row < rows.end; row++)
        combine_rows(x + row * size, gates + row * stride, size,
                     [](vfloat made, vfloat gate) { return made * stored<T>(logistic(gate)); });
}

} // namespace

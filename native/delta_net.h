// What a layer with the gated delta rule does beside its two products, one phase of a team after the other.
#pragma once
#include "elementwise.h"
#include "gates.h"
#include "recurrence.h"

namespace {

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
    // `space` has room for the convolution's output of all tokens, `floats` for as many as `shared_floats` says, and
    // `out` for what the layer gives.
    DeltaLayer(const DeltaNet &net, const StateSpans &spans, const T *tokens, int64_t stride, int64_t num_tokens,
               T *space, float *floats, T *out)
        : net(net), spans(spans), conv(net.convolution), rule(net.rule), tokens(tokens), stride(stride),
          num_tokens(num_tokens), out(out), decay(floats), beta(floats + num_tokens * net.rule.value_heads) {
        conv.x = tokens, conv.x_stride = stride, conv.out = space;
        const int64_t keys = rule.key_heads * rule.key_dim;
        rule.q = space, rule.k = space + keys, rule.v = space + 2 * keys;
        rule.q_stride = rule.k_stride = rule.v_stride = conv.channels;
        rule.decay = decay, rule.beta = beta, rule.out = out;
    }

    static int64_t shared_floats(const DeltaNet &net, int64_t num_tokens) {
        return 2 * num_tokens * net.rule.value_heads;
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
    void finish(const Team &team, float eps) {
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

} // namespace

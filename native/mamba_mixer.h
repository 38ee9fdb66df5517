// What a layer with Mamba 2 does beside its two products, one phase of a team after the other.
#pragma once
#include "elementwise.h"
#include "gates.h"
#include "recurrence.h"

namespace {

// One layer over the tokens of a step. Of each token `tokens` has `stride` numbers: gates, what the convolution sees, and
// of each head the step.
template <typename T> class MambaLayer {
    const MambaMixer &mixer;
    const StateSpans &spans;
    Convolution conv;
    Mamba2 scan;
    const T *tokens;
    const int64_t stride, num_tokens, inner;
    T *out;
    float *steps, *scanned;

  public:
    // As `DeltaLayer` has it.
    MambaLayer(const MambaMixer &mixer, const StateSpans &spans, const T *tokens, int64_t stride, int64_t num_tokens,
               T *space, float *floats, T *out)
        : mixer(mixer), spans(spans), conv(mixer.convolution), scan(mixer.scan), tokens(tokens), stride(stride),
          num_tokens(num_tokens), inner(scan.heads * scan.head_dim), out(out), steps(floats),
          scanned(floats + num_tokens * scan.heads) {
        conv.x = tokens + inner, conv.x_stride = stride, conv.out = space;
        scan.x = space, scan.b = space + inner, scan.c = space + inner + scan.groups * scan.state_dim;
        scan.x_stride = scan.b_stride = scan.c_stride = conv.channels;
        scan.dt = steps, scan.out = scanned;
    }

    static int64_t shared_floats(const MambaMixer &mixer, int64_t num_tokens) {
        return num_tokens * mixer.scan.heads * (1 + mixer.scan.head_dim);
    }

    // What is scanned, and the steps, rounded as often as PyTorch would.
    void take_up(const Team &team) {
        const Range blocks = team.share(Channels::blocks(conv) * spans.count);
        for (int64_t i = blocks.begin; i < blocks.end; i++)
            conv_task<T>(spans, conv, i % spans.count, i / spans.count);
        const int64_t heads = scan.heads;
        const Range mine = team.share(num_tokens);
        for (int64_t t = mine.begin; t < mine.end; t++) {
            const T *given = tokens + t * stride + inner + conv.channels;
            for (int64_t h = 0; h < heads; h++) {
                const float sum = widen(narrow<T>(widen(given[h]) + widen(narrow<T>(mixer.step_bias[h]))));
                const float step = widen(narrow<T>(softplus(sum)));
                steps[t * heads + h] = std::min(std::max(step, mixer.least_step), mixer.most_step);
            }
        }
    }

    // Heads, a task at a time, as sequences have more tokens or fewer; `memory` is the thread's own.
    void run(Team &team, float *memory) {
        const int64_t tasks = scan.heads * spans.count;
        for (int64_t i = team.take(); i < tasks; i = team.take())
            mamba_task<T>(spans, scan, i % spans.count, i / spans.count, memory);
    }

    // Multiplies what came out with SiLU of its gates, and normalizes each group.
    void finish(const Team &team, float eps) {
        const int64_t groups = scan.groups, size = inner / groups;
        const Range mine = team.share(num_tokens * groups);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t first = i % groups * size;
            float *row = scanned + i * size;
            combine_rows(row, tokens + i / groups * stride + first, size,
                         [](vfloat made, vfloat gate) { return made * silu(gate); });
            scale_row(row, inverse_rms(row, size, eps), static_cast<const float *>(mixer.norm.weight) + first, row, size);
            for (int64_t d = 0; d < size; d++) out[i * size + d] = narrow<T>(row[d]);
        }
    }
};

} // namespace

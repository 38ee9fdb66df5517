// Layers that remember by a state: causal convolutions, the gated delta rule, Mamba 2. Each sequence of a step goes
// through its own state, where it lies. A token is computed the same way whatever is beside it, so texts computed in
// parts are those computed at once, to the bit.
#pragma once
#include <atomic>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "simd.h"
#include "kernels.h"

namespace {

// Channels of a convolution that a task takes through all tokens of its sequence.
constexpr int64_t CHANNELS = 64;
constexpr int CHANNEL_VECTORS = CHANNELS / LANES;
// Columns of a state that a task takes so: as many as three sums of each have registers, and the nearest cache has room
// for with 128 keys.
constexpr int COLUMN_VECTORS = 4;
constexpr int64_t COLUMNS = COLUMN_VECTORS * LANES;

// Zeros of a thread's own; none, and `refused`, where there is no memory for them, of which nothing may be thrown out of
// a parallel region.
using Numbers = std::unique_ptr<float[]>;

inline Numbers own_numbers(int64_t count, std::atomic<bool> &refused) {
    Numbers made(new (std::nothrow) float[count]());
    if (!made) refused = true;
    return made;
}

// Goes through a sequence's tokens: `token(t)` for each of its rows, and `keep(row)` for each state row that is to hold
// the state as it is then: copies in between, and its own at the end.
template <typename Token, typename Keep>
inline __attribute__((always_inline)) void go_through(const StateSpans &spans, int64_t sequence, Token token,
                                                      Keep keep) {
    const int64_t begin = spans.starts[sequence], end = spans.starts[sequence + 1];
    int64_t cut = spans.first_cut[sequence];
    for (int64_t t = begin; t < end; t++) {
        token(t);
        for (; cut < spans.first_cut[sequence + 1] && spans.cut_after[cut] == t + 1 - begin; cut++)
            keep(spans.cut_rows[cut]);
    }
    keep(spans.rows[sequence]);
}

// Where the channels of a convolution begin that are the `block`-th, and how many there are.
struct Channels {
    int64_t first, width;

    Channels(const Convolution &conv, int64_t block)
        : first(block * CHANNELS), width(first + CHANNELS <= conv.channels ? CHANNELS : conv.channels - first) {}

    static int64_t blocks(const Convolution &conv) { return (conv.channels + CHANNELS - 1) / CHANNELS; }
};

// Takes some channels through a sequence's tokens. Of token t `input(t, to)` gives what they see, and `output(t, sums)`
// gets for each the sum over taps j of weight[c][j] * (the input j - taps + 1 tokens from t)[c] + bias[c]. A state
// [channels][taps] has the last inputs, the newest last.
template <typename T, typename Input, typename Output>
inline __attribute__((always_inline)) void convolve(const StateSpans &spans, const Convolution &conv, int64_t sequence,
                                                    const Channels &channels, Input input, Output output) {
    const int64_t taps = conv.taps, first = channels.first, width = channels.width;
    const T *weight = static_cast<const T *>(conv.weight), *bias = static_cast<const T *>(conv.bias);
    const auto state_of = [&](int64_t row) {
        return reinterpret_cast<T *>(conv.state.base + row * conv.state.stride) + first * taps;
    };
    // Of each tap, what its channels see and what they multiply it with.
    alignas(64) float seen[MAX_TAPS][CHANNELS], factor[MAX_TAPS][CHANNELS], start[CHANNELS];
    if (width < CHANNELS) {
        std::memset(seen, 0, taps * sizeof seen[0]);
        std::memset(factor, 0, taps * sizeof factor[0]);
        std::memset(start, 0, sizeof start);
    }
    const T *state = state_of(spans.rows[sequence]);
    for (int64_t c = 0; c < width; c++) {
        start[c] = bias ? widen(bias[first + c]) : 0.0f;
        for (int64_t j = 0; j < taps; j++) {
            seen[j][c] = widen(state[c * taps + j]);
            factor[j][c] = widen(weight[(first + c) * taps + j]);
        }
    }
    go_through(
        spans, sequence,
        [&](int64_t t) {
            for (int64_t j = 0; j + 1 < taps; j++) std::memcpy(seen[j], seen[j + 1], sizeof seen[j]);
            input(t, seen[taps - 1]);
            alignas(64) float sums[CHANNELS];
            for (int v = 0; v < CHANNEL_VECTORS; v++) {
                vfloat sum = load(start + v * LANES);
                for (int64_t j = 0; j < taps; j++) sum += load(seen[j] + v * LANES) * load(factor[j] + v * LANES);
                store(sums + v * LANES, sum);
            }
            output(t, sums);
        },
        [&](int64_t row) {
            T *kept = state_of(row);
            for (int64_t c = 0; c < width; c++)
                for (int64_t j = 0; j < taps; j++) kept[c * taps + j] = narrow<T>(seen[j][c]);
        });
}

// One block of one sequence's channels of a convolution, followed by SiLU if asked.
template <typename T>
void conv_task(const StateSpans &spans, const Convolution &conv, int64_t sequence, int64_t block) {
    const Channels channels(conv, block);
    const int64_t first = channels.first, width = channels.width;
    const T *x = static_cast<const T *>(conv.x);
    T *out = static_cast<T *>(conv.out);
    convolve<T>(
        spans, conv, sequence, channels,
        [&](int64_t t, float *to) {
            const T *row = x + t * conv.x_stride + first;
            for (int64_t c = 0; c < width; c++) to[c] = widen(row[c]);
        },
        [&](int64_t t, float *sums) {
            if (conv.silu) {
                for (int64_t c = 0; c < width; c++) sums[c] = widen(narrow<T>(sums[c]));
                for (int v = 0; v < CHANNEL_VECTORS; v++) store(sums + v * LANES, silu(load(sums + v * LANES)));
            }
            T *to = out + t * conv.channels + first;
            for (int64_t c = 0; c < width; c++) to[c] = narrow<T>(sums[c]);
        });
}

// A convolution by itself.
template <typename T> void causal_conv(const StateSpans &spans, const Convolution &conv) {
    const int64_t blocks = Channels::blocks(conv), work = spans.starts[spans.count] * conv.channels * conv.taps;
#pragma omp parallel for collapse(2) schedule(dynamic, 4) if (work >= 65536)
    for (int64_t sequence = 0; sequence < spans.count; sequence++)
        for (int64_t block = 0; block < blocks; block++) conv_task<T>(spans, conv, sequence, block);
}

// A convolution between two gates (LFM2): of tokens [tokens, 3 * channels] a gate before it, one behind it, and x. One
// block of one sequence's channels; out [tokens, channels].
template <typename T>
void short_convolution(const StateSpans &spans, const Convolution &conv, int64_t sequence, int64_t block,
                       const T *tokens, T *out) {
    const Channels channels(conv, block);
    const int64_t first = channels.first, width = channels.width, size = conv.channels;
    convolve<T>(
        spans, conv, sequence, channels,
        [&](int64_t t, float *to) {
            const T *before = tokens + t * 3 * size + first, *x = before + 2 * size;
            for (int64_t c = 0; c < width; c++) to[c] = widen(narrow<T>(widen(before[c]) * widen(x[c])));
        },
        [&](int64_t t, float *sums) {
            const T *behind = tokens + t * 3 * size + size + first;
            T *to = out + t * size + first;
            for (int64_t c = 0; c < width; c++)
                to[c] = narrow<T>(widen(narrow<T>(sums[c])) * widen(behind[c]));
        });
}

// Values as floats, divided by their length if asked, and multiplied.
template <typename T> inline void take_head(const T *x, int64_t dim, bool unit, float factor, float *to) {
    float sum = 0;
    for (int64_t i = 0; i < dim; i++) {
        to[i] = widen(x[i]);
        sum += to[i] * to[i];
    }
    if (unit) factor /= __builtin_sqrtf(sum + 1e-6f);
    for (int64_t i = 0; i < dim; i++) to[i] *= factor;
}

// In how many blocks of columns a head's state is taken.
inline int64_t column_blocks(const DeltaRule &rule) { return (rule.value_dim + COLUMNS - 1) / COLUMNS; }

// How many floats a task of the rule needs.
inline int64_t delta_floats(const DeltaRule &rule) { return rule.key_dim * (COLUMNS + 3); }

// The gated delta rule (Yang et al., 2024): of a head's state S [keys, values], S = S exp(g), then
// S += k (v - k S) beta, and the output is q S / sqrt(keys). One block of one head's columns, through a sequence's tokens.
template <typename T>
void delta_task(const StateSpans &spans, const DeltaRule &rule, int64_t sequence, int64_t head, int64_t block,
                float *memory) {
    const int64_t keys = rule.key_dim, values = rule.value_dim, per_key = rule.value_heads / rule.key_heads;
    const T *q = static_cast<const T *>(rule.q), *k = static_cast<const T *>(rule.k);
    const T *v = static_cast<const T *>(rule.v);
    T *out = static_cast<T *>(rule.out);
    const float scale = 1.0f / __builtin_sqrtf(float(keys));
    float *const narrow_state = memory, *const query = narrow_state + keys * COLUMNS;
    float *key = query + keys, *next_key = key + keys;
    const int64_t first = block * COLUMNS;
    const int64_t width = first + COLUMNS <= values ? COLUMNS : values - first;
    const auto state_of = [&](int64_t row) {
        return reinterpret_cast<float *>(rule.state.base + row * rule.state.stride) + head * keys * values + first;
    };
    // Where it lies, or where there are fewer columns filled up with zeros.
    float *const held = state_of(spans.rows[sequence]);
    const bool in_place = width == COLUMNS;
    float *const state = in_place ? held : narrow_state;
    const int64_t stride = in_place ? values : COLUMNS;
    for (int64_t i = 0; i < keys && !in_place; i++) {
        for (int64_t j = width; j < COLUMNS; j++) state[i * COLUMNS + j] = 0;
        std::memcpy(state + i * COLUMNS, held + i * values, width * sizeof(float));
    }
    const int64_t key_head = head / per_key, begin = spans.starts[sequence], end = spans.starts[sequence + 1];
    const auto take_key = [&](int64_t t, float *to) {
        take_head(k + t * rule.k_stride + key_head * keys, keys, rule.unit, 1.0f, to);
    };
    // k S of the token that comes: made of each row of S as that is written, so that S is read once a token.
    vfloat known[COLUMN_VECTORS] = {};
    if (begin < end) {
        take_key(begin, next_key);
        for (int64_t i = 0; i < keys; i++)
            for (int n = 0; n < COLUMN_VECTORS; n++) known[n] += load(state + i * stride + n * LANES) * next_key[i];
    }
    go_through(
        spans, sequence,
        [&](int64_t t) {
            std::swap(key, next_key);
            if (t + 1 < end) take_key(t + 1, next_key);
            take_head(q + t * rule.q_stride + key_head * keys, keys, rule.unit, scale, query);
            const float decay = exp_(rule.decay[t * rule.value_heads + head]);
            const float beta = rule.beta[t * rule.value_heads + head];
            vfloat added[COLUMN_VECTORS], given[COLUMN_VECTORS] = {};
            alignas(64) float value[COLUMNS] = {};
            const T *row = v + t * rule.v_stride + head * values + first;
            for (int64_t j = 0; j < width; j++) value[j] = widen(row[j]);
            for (int n = 0; n < COLUMN_VECTORS; n++) {
                added[n] = (load(value + n * LANES) - known[n] * decay) * beta;
                known[n] = vfloat{};
            }
            const auto take_up = [&](auto more) __attribute__((always_inline)) {
                for (int64_t i = 0; i < keys; i++)
                    for (int n = 0; n < COLUMN_VECTORS; n++) {
                        float *at = state + i * stride + n * LANES;
                        const vfloat now = load(at) * decay + added[n] * key[i];
                        store(at, now);
                        given[n] += now * query[i];
                        if constexpr (more) known[n] += now * next_key[i];
                    }
            };
            t + 1 < end ? take_up(std::true_type{}) : take_up(std::false_type{});
            for (int n = 0; n < COLUMN_VECTORS; n++) store(value + n * LANES, given[n]);
            T *to = out + (t * rule.value_heads + head) * values + first;
            for (int64_t j = 0; j < width; j++) to[j] = narrow<T>(value[j]);
        },
        [&](int64_t row) {
            float *kept = state_of(row);
            for (int64_t i = 0; i < keys && kept != state; i++)
                std::memcpy(kept + i * values, state + i * stride, width * sizeof(float));
        });
}

// The rule by itself.
template <typename T> void gated_delta(const StateSpans &spans, const DeltaRule &rule) {
    const int64_t blocks = column_blocks(rule);
    std::atomic<bool> refused{false};
#pragma omp parallel
    {
        const Numbers memory = own_numbers(delta_floats(rule), refused);
#pragma omp for collapse(3) schedule(dynamic)
        for (int64_t sequence = 0; sequence < spans.count; sequence++)
            for (int64_t head = 0; head < rule.value_heads; head++)
                for (int64_t block = 0; block < blocks; block++)
                    if (!refused) delta_task<T>(spans, rule, sequence, head, block, memory.get());
    }
    if (refused) throw std::bad_alloc();
}

// Numbers of a row of a state in whole vectors.
inline int64_t padded_state(const Mamba2 &mamba) { return (mamba.state_dim + LANES - 1) / LANES * LANES; }

// How many floats a task of Mamba 2 needs.
inline int64_t mamba_floats(const Mamba2 &mamba) { return (mamba.head_dim + 2) * padded_state(mamba); }

// Mamba 2 (Dao and Gu, 2024): of a head's state S [dim, state_dim], S = S exp(a dt) + (dt x) b^T, and the output is
// S c + d x, in float32. One head, through a sequence's tokens.
template <typename T>
void mamba_task(const StateSpans &spans, const Mamba2 &mamba, int64_t sequence, int64_t head, float *memory) {
    const int64_t dim = mamba.head_dim, size = mamba.state_dim, per_group = mamba.heads / mamba.groups;
    const int64_t padded = padded_state(mamba);
    const T *x = static_cast<const T *>(mamba.x), *b = static_cast<const T *>(mamba.b);
    const T *c = static_cast<const T *>(mamba.c);
    float *const wide_state = memory, *const in = wide_state + dim * padded, *const of = in + padded;
    const auto state_of = [&](int64_t row) {
        return reinterpret_cast<float *>(mamba.state.base + row * mamba.state.stride) + head * dim * size;
    };
    float *const held = state_of(spans.rows[sequence]);
    float *const state = size == padded ? held : wide_state;
    for (int64_t p = 0; p < dim && state != held; p++) {
        for (int64_t n = size; n < padded; n++) state[p * padded + n] = 0;
        std::memcpy(state + p * padded, held + p * size, size * sizeof(float));
    }
    for (int64_t n = size; n < padded; n++) in[n] = of[n] = 0;
    const int64_t group = head / per_group;
    go_through(
        spans, sequence,
        [&](int64_t t) {
            take_head(b + t * mamba.b_stride + group * size, size, false, 1.0f, in);
            take_head(c + t * mamba.c_stride + group * size, size, false, 1.0f, of);
            const float dt = mamba.dt[t * mamba.heads + head], decay = exp_(mamba.a[head] * dt);
            const T *row = x + t * mamba.x_stride + head * dim;
            float *to = mamba.out + (t * mamba.heads + head) * dim;
            for (int64_t p = 0; p < dim; p++) {
                const float given = widen(row[p]), taken = given * dt;
                vfloat sum{};
                for (int64_t n = 0; n < padded; n += LANES) {
                    float *at = state + p * padded + n;
                    const vfloat now = load(at) * decay + load(in + n) * taken;
                    store(at, now);
                    sum += now * load(of + n);
                }
                to[p] = reduce_add(sum) + (mamba.d ? mamba.d[head] * given : 0.0f);
            }
        },
        [&](int64_t row) {
            float *kept = state_of(row);
            for (int64_t p = 0; p < dim && kept != state; p++)
                std::memcpy(kept + p * size, state + p * padded, size * sizeof(float));
        });
}

// Mamba 2 by itself.
template <typename T> void mamba2(const StateSpans &spans, const Mamba2 &mamba) {
    std::atomic<bool> refused{false};
#pragma omp parallel
    {
        const Numbers memory = own_numbers(mamba_floats(mamba), refused);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t sequence = 0; sequence < spans.count; sequence++)
            for (int64_t head = 0; head < mamba.heads; head++)
                if (!refused) mamba_task<T>(spans, mamba, sequence, head, memory.get());
    }
    if (refused) throw std::bad_alloc();
}

}

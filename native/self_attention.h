// Attention of texts over themselves, both ways, straight from the rows of one fused projection.
//
// A task is a query block of one text's tokens under one head. It packs the keys it needs in groups of 16 lanes and the
// values in pairs, as the products of attention_products.h read them, into a workspace of its thread, where they stay
// in the cache while its rows pass by, a few at a time. Groups are counted from the text's beginning and a row's sums
// run over them in order, so what a row computes depends neither on its query block nor on other texts.
#pragma once
#include <algorithm>

#include "staging.h"
#include "encoder_rows.h"
#include "amx_attention.h"

namespace {

// Rows of a query block: enough that packing keys and values costs little beside them.
constexpr int QUERY_BLOCK = 96;
static_assert(QUERY_BLOCK % 6 == 0 && QUERY_BLOCK % 16 == 0, "rows go in the same company whatever the query_block");

// Buffers of one thread for texts of up to `longest` tokens.
template <typename T> struct AttentionWorkspace {
    T *keys, *values;
    float *scores;
    int64_t score_stride;
    const T **groups;   // of keys or values, where tiles multiply them
    int *counts;        // how many of each are a text's

    static constexpr int ROWS = TILED<T> ? 16 : ROWS_AT_ONCE;

    static int64_t lanes(int64_t longest) { return (longest + GROUP - 1) / GROUP * GROUP; }

    static int64_t size(int64_t longest, int64_t dim) {
        return 2 * lanes(longest) * dim * sizeof(T) + ROWS * (lanes(longest) + GROUP) * sizeof(float) +
               lanes(longest) / GROUP * (sizeof(T *) + sizeof(int)) + 6 * 64;
    }

    void take(Arena &arena, int64_t longest, int64_t dim) {
        keys = arena.take<T>(lanes(longest) * dim);
        values = arena.take<T>(lanes(longest) * dim);
        score_stride = lanes(longest) + GROUP;
        scores = arena.take<float>(ROWS * score_stride);
        groups = arena.take<const T *>(lanes(longest) / GROUP);
        counts = arena.take<int>(lanes(longest) / GROUP);
    }
};

template <typename T> class SelfAttention {
    using Value = typename Operand<T>::type;
    static constexpr int PER_WORD = 4 / sizeof(T);
    static constexpr float LOG2_E = 1.44269504f;

    const Encoder &encoder;
    const EncoderLayer &layer;
    const AttentionWorkspace<T> &workspace;
    const int64_t hidden = encoder.hidden_size, stride = 3 * hidden;
    const int dim = int(hidden / encoder.num_heads), steps = dim / PER_WORD;
    const float scale = LOG2_E / __builtin_sqrtf(float(dim));

    // The task at hand: its text's rows under its head, and the keys [begin, end) that are packed.
    const T *rows = nullptr;
    int head = 0, tokens = 0, begin = 0, end = 0;

    const T *rotated(const T *row, int place, T *space) const {
        if (!layer.cos_sin) return row;
        const float *angles = layer.cos_sin + int64_t(place) * dim;
        rotate_head(row, angles, dim, space);
        return space;
    }

    void pack_keys() const {
        alignas(64) T group[GROUP][256];
        for (int first = begin; first < end; first += GROUP) {
            const int count = end - first < GROUP ? end - first : GROUP;
            auto *to = reinterpret_cast<uint32_t *>(workspace.keys + (first - begin) * dim);
            const T *from = rows + first * stride + hidden;
            if (!layer.cos_sin && count == GROUP) {
                interleave(reinterpret_cast<const uint32_t *>(from), stride / PER_WORD, GROUP, steps, to);
                continue;
            }
            if (count < GROUP) std::memset(group, 0, sizeof group);
            for (int i = 0; i < count; i++) {
                if (layer.cos_sin)
                    rotated(from + i * stride, first + i, group[i]);
                else
                    std::memcpy(group[i], from + i * stride, sizeof(T) * dim);
            }
            interleave(reinterpret_cast<const uint32_t *>(group), 256 / PER_WORD, GROUP, steps, to);
        }
    }

    void pack_values() const {
        const T *from = rows + begin * stride + 2 * hidden;
        const int count = end - begin;
        if constexpr (PER_WORD == 1) {
            for (int k = 0; k < count; k++) std::memcpy(workspace.values + k * dim, from + k * stride, sizeof(T) * dim);
        } else {
            const bf16 zeros[256] = {};
            for (int k = 0; k < count; k += 2) {
                const bf16 *one = from + k * stride, *other = k + 1 < count ? one + stride : zeros;
                auto *to = reinterpret_cast<float *>(workspace.values + k * dim);
                for (int i = 0; i < dim; i += LANES) {
                    const vuint low = (vuint)load_wide(one + i) >> 16, high = (vuint)load_wide(other + i);
                    store(to + i, (vfloat)(low | high));
                }
            }
        }
    }

    // scores[r][0:G * GROUP] of R rows with G groups of keys.
    template <int R, int G> NOINLINE void qk(const Value *q, const T *keys, float *scores) const {
        constexpr int COUNT = G * VECTORS;
        vfloat sum[R][COUNT] = {};
        const auto *from = stored(keys);
        for (int step = 0; step < steps; step++)
#pragma GCC unroll 4
            for (int g = 0; g < COUNT; g++) {
                const int group = g / VECTORS, part = g % VECTORS;
                const auto key = load(from + (group * steps + step) * GROUP + part * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sum[r][g] = multiply_add(sum[r][g], q + r * dim, step, key);
            }
        for (int r = 0; r < R; r++)
            for (int g = 0; g < COUNT; g++) store(scores + r * workspace.score_stride + g * LANES, sum[r][g]);
    }

    // out[r][first:first + C * LANES] = p[r] . V / totals[r] for R rows.
    template <int R, int C>
    NOINLINE void pv(const float *p, int64_t pairs, const T *values, const float *totals, T *out) const {
        vfloat sum[R][C] = {};
        const auto *from = stored(values);
        const Value *weights = reinterpret_cast<const Value *>(p);
        constexpr int64_t PER_FLOAT = sizeof(float) / sizeof(Value);
        for (int64_t pair = 0; pair < pairs; pair++, from += dim)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const auto value = load(from + c * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    sum[r][c] =
                        multiply_add(sum[r][c], weights + r * workspace.score_stride * PER_FLOAT, int(pair), value);
            }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store_narrow(out + r * hidden + c * LANES, sum[r][c] * (1.0f / totals[r]));
    }

    // Softmax numerators of one row's scores with keys [first, first + count), biased and masked; returns their sum.
    NOINLINE float softmax(float *scores, int place, int first, int count) const {
        const int low = layer.window < 0 ? 0 : place - layer.window - first;
        const int high = layer.window < 0 || place + layer.window >= tokens ? tokens - first
                                                                           : place + layer.window + 1 - first;
        for (int i = 0; i < low; i++) scores[i] = -__builtin_inff();
        for (int i = high; i < count; i++) scores[i] = -__builtin_inff();
        if (encoder.bias) {
            const int64_t span = encoder.bias_span;
            const float *bias = encoder.bias + head * (2 * span - 1) + span - 1 + first - place;
            // Past the last key there may be no bias.
            for (int i = 0; i < high; i++) scores[i] += bias[i] * (LOG2_E / scale);
        }
        vfloat most = vfloat{} - 1e30f;
        for (int i = 0; i < count; i += LANES) most = vmax(load(scores + i), most);
        const float highest = reduce_max(most) * scale;
        vfloat sum = {};
        Value *p = reinterpret_cast<Value *>(scores);
        for (int i = 0; i < count; i += LANES) {
            const vfloat e = exp2_(load(scores + i) * scale - highest);
            sum += e;
            store_narrow(p + i, e);
        }
        return reduce_add(sum);
    }

    // The queries of some rows from the one at `place` on.
    void load_queries(int place, int count, Value *q) const {
        for (int r = 0; r < count; r++) {
            T space[256];
            const T *row = rotated(rows + (place + r) * stride, place + r, space);
            for (int i = 0; i < dim; i += LANES) store_narrow(q + r * dim + i, load_wide(row + i));
        }
    }

    // The keys that any of some rows sees, from the beginning of a group on.
    struct Seen {
        int first, last;
        int lanes() const { return (last - first + GROUP - 1) / GROUP * GROUP; }
    };
    Seen seen(int place, int count) const {
        if (layer.window < 0) return {begin, end};
        const int lowest = place - layer.window, highest = place + count + layer.window;
        return {lowest > 0 ? lowest / GROUP * GROUP : 0, highest < tokens ? highest : tokens};
    }

    // Some rows from the one at `place` on, at most 16, by tiles.
    NOINLINE void attend_tiles(int place, int some, T *out) const {
        alignas(64) Value q[workspace.ROWS * 256];
        alignas(64) float sums[workspace.ROWS * 256];
        load_queries(place, some, q);
        const Seen keys = seen(place, workspace.ROWS);
        const int count = keys.lanes(), num_groups = count / GROUP;
        const auto find_groups = [&](const T *from) {
            for (int g = 0; g < num_groups; g++) workspace.groups[g] = from + (keys.first - begin + g * GROUP) * dim;
        };
        find_groups(workspace.keys);
        RowProducts<T>::make_scores({q, nullptr, dim}, {workspace.groups, nullptr, nullptr, num_groups, GROUP},
                                    workspace.scores, workspace.score_stride);
        float totals[workspace.ROWS];
        for (int r = 0; r < some; r++)
            totals[r] = softmax(workspace.scores + r * workspace.score_stride, place + r, keys.first, count);
        find_groups(workspace.values);
        for (int g = 0; g < num_groups; g++)
            workspace.counts[g] = std::min(GROUP, keys.last - keys.first - g * GROUP);
        RowProducts<T>::weigh({reinterpret_cast<const Value *>(workspace.scores), nullptr}, some,
                              {workspace.groups, workspace.counts, nullptr, num_groups}, dim, sums,
                              workspace.score_stride);
        for (int r = 0; r < some; r++)
            for (int i = 0; i < dim; i += LANES)
                store_narrow(out + r * hidden + i, load(sums + r * dim + i) * (1.0f / totals[r]));
    }

    // R rows from the one at `place` on.
    template <int R> void attend_rows(int place, T *out) const {
        alignas(64) Value q[R * 256];
        load_queries(place, R, q);
        const Seen keys = seen(place, R);
        const int first = keys.first, last = keys.last, count = keys.lanes();
        qk_all<R>(q, first, count);
        float totals[R];
        for (int r = 0; r < R; r++)
            totals[r] = softmax(workspace.scores + r * workspace.score_stride, place + r, first, count);
        const int64_t pairs = (last - first + PER_WORD - 1) / PER_WORD;
        const T *values = workspace.values + (first - begin) * dim;
        constexpr int C = LANES == 16 ? 4 : LANES == 8 ? 2 : 1;
        int at = 0;
        for (; at + C * LANES <= dim; at += C * LANES)
            pv<R, C>(workspace.scores, pairs, values + at * PER_WORD, totals, out + at);
        if constexpr (C > 2)
            if (at + 2 * LANES <= dim) {
                pv<R, 2>(workspace.scores, pairs, values + at * PER_WORD, totals, out + at);
                at += 2 * LANES;
            }
        if (at < dim) pv<R, 1>(workspace.scores, pairs, values + at * PER_WORD, totals, out + at);
    }

    template <int R> void qk_all(const Value *q, int first, int count) const {
        const T *keys = workspace.keys + (first - begin) * dim;
        int lane = 0;
        for (; lane + GROUPS_AT_ONCE * GROUP <= count; lane += GROUPS_AT_ONCE * GROUP)
            qk<R, GROUPS_AT_ONCE>(q, keys + lane * dim, workspace.scores + lane);
        const int left = (count - lane) / GROUP;
        if (left)
            with_constant<GROUPS_AT_ONCE>(left, [&](auto groups) {
                qk<R, groups>(q, keys + lane * dim, workspace.scores + lane);
            });
    }

  public:
    SelfAttention(const Encoder &encoder, const EncoderLayer &layer, const AttentionWorkspace<T> &workspace)
        : encoder(encoder), layer(layer), workspace(workspace) {}

    // Rows [from, to) of a text, whose first rows of the projection and of the output are `qkv` and `out`, under one
    // head.
    void run(const T *qkv, int count, int which, int from, int to, T *out) {
        head = which, tokens = count, rows = qkv + head * dim;
        begin = 0, end = tokens;
        if (layer.window >= 0) {
            begin = from > layer.window ? (from - layer.window) / GROUP * GROUP : 0;
            end = to + layer.window < tokens ? to + layer.window : tokens;
        }
        pack_keys();
        pack_values();
        if constexpr (TILED<T>)
            if (dim % RowProducts<T>::TILE_DIMS == 0) {
                const typename RowProducts<T>::Registers registers;
                for (int place = from; place < to; place += workspace.ROWS)
                    attend_tiles(place, std::min(workspace.ROWS, to - place), out + place * hidden + head * dim);
                return;
            }
        for (int place = from; place < to; place += ROWS_AT_ONCE) {
            const int left = to - place < ROWS_AT_ONCE ? to - place : ROWS_AT_ONCE;
            with_constant<ROWS_AT_ONCE>(
                left, [&](auto number) { attend_rows<number>(place, out + place * hidden + head * dim); });
        }
    }
};

} // namespace

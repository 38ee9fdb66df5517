// Paged attention with an online softmax, for decodes and prefill chunks in one call.
#pragma once
#include <climits>

#include "plan.h"
#include "team.h"

namespace {

constexpr float LOWEST = -1e30f;
// How many groups ahead of their use K and V are prefetched.
constexpr int PREFETCH_GROUPS = 8;

inline void clear(const SoftmaxState &state, int rows, int dim) {
    for (int r = 0; r < rows; r++) state.row_max[r] = LOWEST, state.row_sum[r] = 0;
    std::memset(state.acc, 0, sizeof(float) * rows * dim);
}

// Combines a split's softmax state with that of the splits before it. An empty one changes no bit of the other.
inline NOINLINE void combine(const SoftmaxState &into, const SoftmaxState &from, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        const vfloat old = vfloat{} + into.row_max[r], other = vfloat{} + from.row_max[r], highest = vmax(old, other);
        const vfloat a = exp2_(old - highest), b = exp2_(other - highest);
        into.row_max[r] = highest[0];
        into.row_sum[r] = into.row_sum[r] * a[0] + from.row_sum[r] * b[0];
        float *to = into.acc + r * dim, *add = from.acc + r * dim;
        for (int i = 0; i < dim; i += LANES) store(to + i, load(to + i) * a + load(add + i) * b);
    }
}

// A block of rows of a tile that are multiplied at once, and the groups [begin, end) of a KV split that any of them
// sees.
struct RowBlock {
    int first, rows, begin, end, highest_seen;
};

// The groups of lanes of one KV split of a tile.
template <typename C> struct KvSplit {
    int split, count = 0;
    const C *keys[KV_SPLIT_GROUPS], *values[KV_SPLIT_GROUPS];
    const float *key_scales[KV_SPLIT_GROUPS], *value_scales[KV_SPLIT_GROUPS];
    int positions[KV_SPLIT_GROUPS], counts[KV_SPLIT_GROUPS];
};

// T: the type of queries and outputs; C: that of the cache.
template <typename T, typename C> struct Attention {
    using Value = typename Operand<C>::type;

    const T *q;
    T *out;
    const C *k_cache, *v_cache;
    const Batch &batch;
    const Heads &heads;
    const float *sinks;     // see DecoderLayer
    const int dim = heads.head_dim;
    const int padded = padded_dim(heads);
    const Lanes lanes{heads};
    const int64_t k_head = k_head_size<C>(heads), v_head = v_head_size<C>(heads);
    const int64_t k_data = k_data_size<C>(heads), v_data = v_data_size<C>(heads);
    const int key_stride = stored_tokens<C>(heads);
    // Softmax to the base of 2, which is the cheaper one.
    const float scale = heads.scale * 1.44269504f;

    struct Work {
        alignas(64) Value q[MAX_ROW_FLOATS + SPARE_ROWS * MAX_HEAD_DIM];
        alignas(64) float scores[MAX_ROWS * SCORE_STRIDE];
        float q_scales[MAX_ROWS], p_scales[MAX_ROWS];
        RowBlock row_blocks[MAX_ROWS];
        int num_row_blocks;
        PrefetchLines key_lines[KV_SPLIT_GROUPS], value_lines[KV_SPLIT_GROUPS];
    };

    NOINLINE void load_queries(const Tile &tile, Work &work) const {
        for (int r = 0; r < tile.rows(); r++) {
            const int64_t token = tile.first_token + r / tile.num_heads;
            const int head = tile.first_head + r % tile.num_heads;
            load_query(q + (token * heads.num_heads + head) * dim, work.q + r * dim, work.q_scales[r]);
        }
    }

    void load_query(const T *from, Value *to, float &scale) const {
        if constexpr (std::is_same_v<T, Value>) {
            std::memcpy(to, from, dim * sizeof(T));
        } else if constexpr (std::is_same_v<Value, float>) {
            for (int i = 0; i < dim; i++) to[i] = widen(from[i]);
        } else {
            const float largest = max_abs(from, dim);
            const float most = largest_query(dim), inverse = largest > 0 ? most / largest : 0.0f;
            int i = 0;
            for (; i + LANES <= dim; i += LANES) store_narrow(to + i, load_wide(from + i) * inverse);
            for (; i < dim; i++) to[i] = Value(nearest_integer(widen(from[i]) * inverse));
            scale = largest / most;
            return;
        }
        scale = 1;
    }

    NOINLINE void find_groups(const Tile &tile, int split, KvSplit<C> &kv_split) const {
        const int first = tile.first_group(split), highest = tile.highest_seen;
        const int groups_per_block = lanes.per_block / GROUP;
        kv_split.split = split;
        kv_split.count = tile.end_group(split) - first;
        int index = first / groups_per_block, offset = first % groups_per_block * GROUP;
        for (int g = 0; g < kv_split.count; g++) {
            const int64_t block = batch.block_tables[tile.seq * batch.table_stride + index];
            const int64_t head = block * heads.num_kv_heads + tile.kv_head;
            const int position = index * heads.block_size + offset;
            int count = heads.block_size - offset;
            count = count < GROUP ? count : GROUP;
            kv_split.counts[g] = count < highest - position + 1 ? count : highest - position + 1;
            kv_split.positions[g] = position;
            const C *keys = k_cache + head * k_head, *values = v_cache + head * v_head;
            kv_split.keys[g] = keys + offset * PER_STEP<C>;
            kv_split.values[g] = values + offset * padded;
            if constexpr (SCALED<C>) {
                kv_split.key_scales[g] = reinterpret_cast<const float *>(keys + k_data) + offset;
                kv_split.value_scales[g] = reinterpret_cast<const float *>(values + v_data) + offset;
                __builtin_prefetch(kv_split.key_scales[g], 0, 2);
                __builtin_prefetch(kv_split.value_scales[g], 0, 2);
            }
            offset += GROUP;
            if (offset == lanes.per_block) offset = 0, index++;
        }
    }

    // The last position that a tile's row sees.
    int highest_of(const Tile &tile, int row) const {
        return lanes.highest_seen(tile.first_position + row / tile.num_heads, batch.context_len[tile.seq]);
    }

    NOINLINE void make_row_blocks(const Tile &tile, const KvSplit<C> &kv_split, Work &work) const {
        const int first = tile.first_group(kv_split.split);
        work.num_row_blocks = 0;
        for (int row = 0; row < tile.rows();) {
            const int rows = RowProducts<C>::next_rows(tile.rows() - row);
            const int lowest = lanes.lowest_seen(tile.first_position + row / tile.num_heads);
            const int highest = highest_of(tile, row + rows - 1);
            const int begin = lanes.of(lowest) / GROUP - first, end = lanes.of(highest) / GROUP + 1 - first;
            work.row_blocks[work.num_row_blocks++] = RowBlock{row, rows, begin > 0 ? begin : 0,
                                                              end < kv_split.count ? end : kv_split.count, highest};
            row += rows;
        }
    }

    static constexpr int STEP_BYTES = PER_STEP<C> * sizeof(C);
    PrefetchLines key_lines(const C *keys) const { return {(const char *)keys, int64_t(key_stride) * STEP_BYTES}; }
    PrefetchLines value_lines(const C *values) const { return {(const char *)values, 16 * STEP_BYTES}; }

    // What to prefetch while the keys are read: the keys some groups on, then the values.
    void prefetch_during_keys(const KvSplit<C> &now, Work &work) const {
        const int ahead = PREFETCH_GROUPS < now.count ? PREFETCH_GROUPS : now.count;
        for (int g = 0; g < now.count; g++) {
            const int then = g + ahead, over = then - now.count;
            work.key_lines[g] = then < now.count ? key_lines(now.keys[then]) : value_lines(now.values[over]);
        }
    }
    // While the values are read: the values some groups on, then the keys of what this thread does next.
    void prefetch_during_values(const KvSplit<C> &now, const KvSplit<C> &next, Work &work) const {
        const int ahead = PREFETCH_GROUPS < now.count ? PREFETCH_GROUPS : now.count;
        for (int g = 0; g < now.count; g++) {
            const int then = g + ahead, over = then - now.count;
            work.value_lines[g] = then < now.count    ? value_lines(now.values[then])
                                  : over < next.count ? key_lines(next.keys[over])
                                                      : value_lines(now.values[g]);
        }
    }

    void compute_scores(const KvSplit<C> &now, Work &work) const {
        // A few keys at a time for all rows, so that they are still in the nearest cache.
        for (int group = 0; group < now.count; group += GROUPS_AT_ONCE)
            for (int i = 0; i < work.num_row_blocks; i++) {
                const RowBlock &row_block = work.row_blocks[i];
                const int begin = row_block.begin > group ? row_block.begin : group;
                const int end = row_block.end < group + GROUPS_AT_ONCE ? row_block.end : group + GROUPS_AT_ONCE;
                if (begin >= end) continue;
                const Queries<C> queries{work.q + row_block.first * dim, work.q_scales + row_block.first, dim};
                const Keys<C> keys{now.keys + begin, now.key_scales + begin, i ? nullptr : work.key_lines + begin,
                                   end - begin, key_stride};
                float *scores = work.scores + row_block.first * SCORE_STRIDE + begin * GROUP;
                RowProducts<C>::make_scores(queries, row_block.rows, keys, scores);
            }
    }

    // Masks the lanes of one group that a token does not see, which sees those from `lowest` to `highest`.
    void mask(float *scores, int first, int count, int lowest, int highest) const {
        count = count < highest - first + 1 ? count : highest - first + 1;
        for (int i = 0; i < GROUP; i++)
            if (i >= count || i < lowest - first) scores[i] = -__builtin_inff();
    }

    // Presses scores below the cap; what else they are multiplied with comes later, as for all.
    NOINLINE void press(const RowBlock &row_block, float *scores) const {
        const float factor = 2 * 1.44269504f * heads.scale / heads.cap, most = heads.cap / heads.scale;
        const vfloat end = vfloat{} + 126.0f;
        for (int i = row_block.begin * GROUP; i < row_block.end * GROUP; i += LANES) {
            const vfloat power = exp2_(vmin(load(scores + i) * factor, end));
            store(scores + i, (1.0f - 2.0f / (power + 1.0f)) * most);
        }
    }

    // Takes off what a head's slope costs scores, the more the farther before `position` their tokens lie.
    NOINLINE void tilt(const KvSplit<C> &now, const RowBlock &row_block, float slope, int position, float *scores) const {
        const vfloat steps = to_float(lane_numbers()), each = vfloat{} + slope / heads.scale;
        for (int i = row_block.begin * GROUP; i < row_block.end * GROUP; i += LANES) {
            const float before = float(now.positions[i / GROUP] + i % GROUP - position);
            store(scores + i, load(scores + i) + (steps + before) * each);
        }
    }

    // The highest score of the row at `position`, times the scale, once those that it does not see, behind `last` or too
    // far before it, are masked.
    NOINLINE float masked_max(const KvSplit<C> &now, const RowBlock &row_block, int head, int position, int last,
                              float *scores) const {
        if (heads.cap > 0) press(row_block, scores);
        if (heads.slopes) tilt(now, row_block, heads.slopes[head], position, scores);
        const int lowest = lanes.lowest_seen(position);
        vfloat most = vfloat{} + LOWEST / scale;
        for (int g = row_block.begin; g < row_block.end; g++) {
            float *group = scores + g * GROUP;
            const int first = now.positions[g];
            if (now.counts[g] < GROUP || first + GROUP - 1 > last || first < lowest)
                mask(group, first, now.counts[g], lowest, last);
            for (int i = 0; i < GROUP; i += LANES) most = vmax(load(group + i), most);
        }
        const float highest = reduce_max(most) * scale;
        return highest > LOWEST ? highest : LOWEST;
    }

    // Softmax numerators of a row of scores, relative to the highest score, times the scales of their values.
    NOINLINE void softmax(const KvSplit<C> &now, const RowBlock &row_block, float *scores, float highest, float &total,
                 float &p_scale) const {
        Value *p = reinterpret_cast<Value *>(scores);
        vfloat sum = {}, most = {};
        for (int i = row_block.begin * GROUP; i < row_block.end * GROUP; i += LANES) {
            vfloat e = exp2_(load(scores + i) * scale - highest);
            sum += e;
            if constexpr (SCALED<C>) {
                // Behind the last token there could be anything, even a NaN.
                e = e == 0.0f ? e : e * load(now.value_scales[i / GROUP] + i % GROUP);
                most = vmax(e, most);
            }
            if constexpr (std::is_same_v<Value, int16_t>)
                store(scores + i, e);
            else
                store_narrow(p + i, e);
        }
        total = reduce_add(sum);
        p_scale = 1;
        if constexpr (std::is_same_v<Value, int16_t>) {
            const float largest = reduce_max(most), inverse = largest > 0 ? INT16_MAX / largest : 0.0f;
            for (int i = row_block.begin * GROUP; i < row_block.end * GROUP; i += LANES)
                store_narrow(p + i, load(scores + i) * inverse);
            p_scale = largest / INT16_MAX;
        }
    }

    // The softmax state of one KV split. `then` is called halfway, to find the split that this thread does next.
    template <typename Then>
    void run(const Tile &tile, const KvSplit<C> &now, Work &work, const SoftmaxState &state, Then then) const {
        make_row_blocks(tile, now, work);
        prefetch_during_keys(now, work);
        compute_scores(now, work);
        for (int i = 0; i < work.num_row_blocks; i++) {
            const RowBlock &row_block = work.row_blocks[i];
            // Each row's highest score is a chain of dependent steps: those of several rows overlap.
            for (int r = row_block.first; r < row_block.first + row_block.rows; r++)
                state.row_max[r] = masked_max(now, row_block, tile.first_head + r % tile.num_heads,
                                              tile.first_position + r / tile.num_heads, highest_of(tile, r),
                                              work.scores + r * SCORE_STRIDE);
            for (int r = row_block.first; r < row_block.first + row_block.rows; r++)
                softmax(now, row_block, work.scores + r * SCORE_STRIDE, state.row_max[r], state.row_sum[r],
                        work.p_scales[r]);
        }
        prefetch_during_values(now, then(), work);
        for (int i = 0; i < work.num_row_blocks; i++) accumulate_values(now, work.row_blocks[i], work, state, i == 0);
    }

    void accumulate_values(const KvSplit<C> &now, const RowBlock &row_block, Work &work, const SoftmaxState &state,
                           bool first) const {
        int counts[KV_SPLIT_GROUPS];
        for (int g = row_block.begin; g < row_block.end; g++) {
            const int seen = row_block.highest_seen - now.positions[g] + 1;
            counts[g] = now.counts[g] < seen ? now.counts[g] : seen;
        }
        const Values<C> values{now.values + row_block.begin, counts + row_block.begin,
                               first ? work.value_lines + row_block.begin : nullptr, row_block.end - row_block.begin};
        const float *scores = work.scores + row_block.first * SCORE_STRIDE;
        const Weights<C> p{reinterpret_cast<const Value *>(scores) + row_block.begin * GROUP,
                           work.p_scales + row_block.first};
        RowProducts<C>::weigh(p, row_block.rows, values, padded, state.acc + row_block.first * padded);
    }

    // What a sink adds to the sum of a row's exponentials, which are relative to the highest score.
    static float beside(float sink, float row_max) {
        return exp2_(vmin(vfloat{} + (sink * 1.44269504f - row_max), vfloat{} + 126.0f))[0];
    }

    NOINLINE void write(const Tile &tile, const SoftmaxState &state) const {
        for (int r = 0; r < tile.rows(); r++) {
            const int64_t token = tile.first_token + r / tile.num_heads;
            const int head = tile.first_head + r % tile.num_heads;
            T *to = out + (token * heads.num_heads + head) * dim;
            const float factor = 1.0f / (state.row_sum[r] + (sinks ? beside(sinks[head], state.row_max[r]) : 0.0f));
            const float *acc = state.acc + r * padded;
            int i = 0;
            for (; i + LANES <= dim; i += LANES) store_narrow(to + i, load(acc + i) * factor);
            for (; i < dim; i++) to[i] = narrow<T>(acc[i] * factor);
        }
    }

    // Combines the splits of a tile that were tasks of their own, and writes its rows.
    NOINLINE void combine_splits(const Tile &tile, const SoftmaxState *splits) const {
        alignas(64) float acc[MAX_ROW_FLOATS];
        float row_max[MAX_ROWS], row_sum[MAX_ROWS];
        const SoftmaxState all{row_max, row_sum, acc};
        clear(all, tile.rows(), padded);
        for (int i = 0; i < tile.end_split() - tile.first_split(); i++) combine(all, splits[i], tile.rows(), padded);
        write(tile, all);
    }
};

// What one thread of a team does for attention: KV split after KV split, each known before the one before it ends.
template <typename T, typename C> struct AttentionWorker {
    const Attention<T, C> &attention;
    const Plan &plan;
    Team &team;
    int64_t task;
    KvSplit<C> kv_splits[2];
    typename Attention<T, C>::Work work;
    alignas(64) float acc[2][MAX_ROW_FLOATS];
    float row_max[2][MAX_ROWS], row_sum[2][MAX_ROWS];

    // Without it, all of this would be set to zero first.
    AttentionWorker(const Attention<T, C> &attention, const Plan &plan, Team &team)
        : attention(attention), plan(plan), team(team) {}

    // Finds the first KV split of the next task.
    void begin_task(KvSplit<C> &kv_split) {
        // Who has a sequence's rows has its attention too, as long as it keeps up.
        task = team.take_near(plan.tasks.size());
        kv_split.count = 0;
        if (task < 0) return;
        const Plan::Task &taken = plan.tasks[task];
        const Tile &tile = plan.tiles[taken.tile];
        attention.find_groups(tile, taken.split < 0 ? tile.first_split() : taken.split, kv_split);
    }

    NOINLINE void run() {
        const typename RowProducts<C>::Registers registers;
        const SoftmaxState all{row_max[0], row_sum[0], acc[0]}, one{row_max[1], row_sum[1], acc[1]};
        KvSplit<C> *now = &kv_splits[0], *next = &kv_splits[1];
        for (begin_task(*now); now->count; std::swap(now, next)) {
            const Plan::Task &running = plan.tasks[task];
            const Tile &tile = plan.tiles[running.tile];
            const bool alone = running.split >= 0, first = alone || now->split == tile.first_split();
            const bool last = alone || now->split + 1 == tile.end_split();
            if (first) attention.load_queries(tile, work);
            const SoftmaxState &state = alone ? plan.partials[running.partial] : first ? all : one;
            attention.run(tile, *now, work, state, [&]() -> const KvSplit<C> & {
                if (last)
                    begin_task(*next);
                else
                    attention.find_groups(tile, now->split + 1, *next);
                return *next;
            });
            if (!first) combine(all, one, tile.rows(), attention.padded);
            if (last && !alone) attention.write(tile, all);
        }
    }
};

// Attention as one of a team. Counts its tasks with the counter of the phase that it begins in; whoever goes on to read
// `out`, or to use the plan or that counter again, waits first: there is no wait at its end.
template <typename T, typename C>
NOINLINE void attend(const T *q, T *out, const C *k_cache, const C *v_cache, const Batch &batch, const Heads &heads,
            const float *sinks, const Plan &plan, Team &team) {
    const Attention<T, C> attention{q, out, k_cache, v_cache, batch, heads, sinks};
    AttentionWorker<T, C>(attention, plan, team).run();
    if (plan.split_tiles.empty()) return;
    team.wait();
    const Range mine = team.share(plan.split_tiles.size());
    for (int64_t i = mine.begin; i < mine.end; i++)
        attention.combine_splits(plan.tiles[plan.split_tiles[i].tile], &plan.partials[plan.split_tiles[i].partial]);
}

template <typename T, typename C>
void attention(const T *q, T *out, const C *k_cache, const C *v_cache, const Batch &batch, const Heads &heads,
               const float *sinks) {
    // Its memory is worth keeping: what is freed in pieces this large goes back to the system.
    static thread_local Plan plan;
    plan.make(batch, heads);
    // In the other threads the name would stand for their own.
    const Plan &made = plan;
    with_team(made.worth_sharing(sizeof(C)),
              [&](Team &team) { attend(q, out, k_cache, v_cache, batch, heads, sinks, made, team); });
}

} // namespace

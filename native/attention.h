// Paged attention with an online softmax, for decodes and prefill chunks in one call.
#pragma once
#include <climits>

#include "plan.h"
#include "team.h"

namespace {

constexpr float LOWEST = -1e30f;
// How many groups ahead of their use K and V are asked for.
constexpr int GROUPS_AHEAD = 8;

inline void clear(const Sums &sums, int rows, int dim) {
    for (int r = 0; r < rows; r++) sums.highest[r] = LOWEST, sums.total[r] = 0;
    std::memset(sums.acc, 0, sizeof(float) * rows * dim);
}

// Adds a split's sums to those of the splits before it. Adding to nothing, or nothing, changes no bit.
inline void fold(const Sums &into, const Sums &from, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        const vfloat old = vfloat{} + into.highest[r], more = vfloat{} + from.highest[r], highest = larger(old, more);
        const vfloat a = exp2_(old - highest), b = exp2_(more - highest);
        into.highest[r] = highest[0];
        into.total[r] = into.total[r] * a[0] + from.total[r] * b[0];
        float *to = into.acc + r * dim, *add = from.acc + r * dim;
        for (int i = 0; i < dim; i += LANES) store(to + i, load(to + i) * a + load(add + i) * b);
    }
}

// Some rows of a tile that are multiplied at once, and the groups [begin, end) of a stretch that any of them sees.
struct Band {
    int first, rows, begin, end, highest_position;
};

// The groups of lanes of one split of a tile.
template <typename C> struct Stretch {
    int split, count = 0;
    const C *keys[SPLIT_GROUPS], *values[SPLIT_GROUPS];
    const float *key_scales[SPLIT_GROUPS], *value_scales[SPLIT_GROUPS];
    int positions[SPLIT_GROUPS], counts[SPLIT_GROUPS];
};

// T: the type of queries and outputs; C: that of the cache.
template <typename T, typename C> struct Attention {
    using Value = typename Operand<C>::type;

    const T *q;
    T *out;
    const C *k_cache, *v_cache;
    const Batch &batch;
    const Heads &heads;
    const int dim = heads.head_dim;
    const int padded = padded_dim(heads);
    const Lanes lanes{heads};
    const int64_t k_head = k_head_size<C>(heads), v_head = v_head_size<C>(heads);
    const int64_t k_data = k_data_size<C>(heads), v_data = v_data_size<C>(heads);
    const int key_stride = stored_tokens<C>(heads);
    // Softmax to the base of 2, which is the cheaper one.
    const float scale = heads.scale * 1.44269504f;

    struct Work {
        alignas(64) Value q[MAX_ROW_FLOATS];
        alignas(64) float scores[MAX_ROWS * SCORE_STRIDE];
        float q_scales[MAX_ROWS], p_scales[MAX_ROWS];
        Band bands[MAX_ROWS];
        int num_bands;
        Lines key_lines[SPLIT_GROUPS], value_lines[SPLIT_GROUPS];
    };

    void load_queries(const Tile &tile, Work &work) const {
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
            const float largest = largest_size(from, dim);
            const float inverse = largest > 0 ? INT16_MAX / largest : 0.0f;
            int i = 0;
            for (; i + LANES <= dim; i += LANES) store_narrow(to + i, load_wide(from + i) * inverse);
            for (; i < dim; i++) to[i] = Value(whole(widen(from[i]) * inverse));
            scale = largest / INT16_MAX;
            return;
        }
        scale = 1;
    }

    void find_groups(const Tile &tile, int split, Stretch<C> &stretch) const {
        const int first = tile.first_group(split), highest = tile.first_position + tile.num_tokens - 1;
        const int groups_per_block = lanes.per_block / GROUP;
        stretch.split = split;
        stretch.count = tile.end_group(split) - first;
        int index = first / groups_per_block, offset = first % groups_per_block * GROUP;
        for (int g = 0; g < stretch.count; g++) {
            const int64_t block = batch.block_tables[tile.seq * batch.table_stride + index];
            const int64_t head = block * heads.num_kv_heads + tile.kv_head;
            const int position = index * heads.block_size + offset;
            int count = heads.block_size - offset;
            count = count < GROUP ? count : GROUP;
            stretch.counts[g] = count < highest - position + 1 ? count : highest - position + 1;
            stretch.positions[g] = position;
            const C *keys = k_cache + head * k_head, *values = v_cache + head * v_head;
            stretch.keys[g] = keys + offset * PER_STEP<C>;
            stretch.values[g] = values + offset * padded;
            if constexpr (SCALED<C>) {
                stretch.key_scales[g] = reinterpret_cast<const float *>(keys + k_data) + offset;
                stretch.value_scales[g] = reinterpret_cast<const float *>(values + v_data) + offset;
                __builtin_prefetch(stretch.key_scales[g], 0, 2);
                __builtin_prefetch(stretch.value_scales[g], 0, 2);
            }
            offset += GROUP;
            if (offset == lanes.per_block) offset = 0, index++;
        }
    }

    void cut_bands(const Tile &tile, const Stretch<C> &stretch, Work &work) const {
        const int first = tile.first_group(stretch.split);
        work.num_bands = 0;
        for (int row = 0; row < tile.rows();) {
            const int rows = next_rows(tile.rows() - row);
            const int lowest = lanes.lowest_seen(tile.first_position + row / tile.num_heads);
            const int highest = tile.first_position + (row + rows - 1) / tile.num_heads;
            const int begin = lanes.of(lowest) / GROUP - first, end = lanes.of(highest) / GROUP + 1 - first;
            work.bands[work.num_bands++] = Band{row, rows, begin > 0 ? begin : 0,
                                                end < stretch.count ? end : stretch.count, highest};
            row += rows;
        }
    }

    static constexpr int STEP_BYTES = PER_STEP<C> * sizeof(C);
    Lines key_lines(const C *keys) const { return {(const char *)keys, int64_t(key_stride) * STEP_BYTES}; }
    Lines value_lines(const C *values) const { return {(const char *)values, 16 * STEP_BYTES}; }

    // What to ask for while the keys are read: the keys some groups on, then the values.
    void look_ahead_from_keys(const Stretch<C> &now, Work &work) const {
        const int ahead = GROUPS_AHEAD < now.count ? GROUPS_AHEAD : now.count;
        for (int g = 0; g < now.count; g++) {
            const int then = g + ahead, over = then - now.count;
            work.key_lines[g] = then < now.count ? key_lines(now.keys[then]) : value_lines(now.values[over]);
        }
    }
    // While the values are read: the values some groups on, then the keys of what this thread does next.
    void look_ahead_from_values(const Stretch<C> &now, const Stretch<C> &next, Work &work) const {
        const int ahead = GROUPS_AHEAD < now.count ? GROUPS_AHEAD : now.count;
        for (int g = 0; g < now.count; g++) {
            const int then = g + ahead, over = then - now.count;
            work.value_lines[g] = then < now.count    ? value_lines(now.values[then])
                                  : over < next.count ? key_lines(next.keys[over])
                                                      : value_lines(now.values[g]);
        }
    }

    void score_keys(const Stretch<C> &now, Work &work) const {
        // A few keys at a time for all rows, so that they are still in the nearest cache.
        for (int group = 0; group < now.count; group += GROUPS_AT_ONCE)
            for (int i = 0; i < work.num_bands; i++) {
                const Band &band = work.bands[i];
                const int begin = band.begin > group ? band.begin : group;
                const int end = band.end < group + GROUPS_AT_ONCE ? band.end : group + GROUPS_AT_ONCE;
                if (begin >= end) continue;
                const Queries<C> queries{work.q + band.first * dim, work.q_scales + band.first, dim};
                const Keys<C> keys{now.keys + begin, now.key_scales + begin, i ? nullptr : work.key_lines + begin,
                                   end - begin, key_stride};
                float *scores = work.scores + band.first * SCORE_STRIDE + begin * GROUP;
                with_constant<MOST_ROWS_AT_ONCE>(band.rows, [&](auto rows) { score<C, rows>(queries, keys, scores); });
            }
    }

    // Hides the lanes of one group that the token at `position` does not see.
    void hide(float *scores, int first, int count, int position, int lowest) const {
        count = count < position - first + 1 ? count : position - first + 1;
        for (int i = 0; i < GROUP; i++)
            if (i >= count || i < lowest - first) scores[i] = -__builtin_inff();
    }

    // The highest score of a row, times the scale, once those that the row does not see are hidden.
    float highest_score(const Stretch<C> &now, const Band &band, int position, float *scores) const {
        const int lowest = lanes.lowest_seen(position);
        vfloat most = vfloat{} + LOWEST / scale;
        for (int g = band.begin; g < band.end; g++) {
            float *group = scores + g * GROUP;
            const int first = now.positions[g];
            if (now.counts[g] < GROUP || first + GROUP - 1 > position || first < lowest)
                hide(group, first, now.counts[g], position, lowest);
            for (int i = 0; i < GROUP; i += LANES) most = larger(load(group + i), most);
        }
        const float highest = largest_of(most) * scale;
        return highest > LOWEST ? highest : LOWEST;
    }

    // Turns a row of scores into probabilities relative to the highest, times the scales of their values.
    void soften(const Stretch<C> &now, const Band &band, float *scores, float highest, float &total,
                float &p_scale) const {
        Value *p = reinterpret_cast<Value *>(scores);
        vfloat sum = {}, most = {};
        for (int i = band.begin * GROUP; i < band.end * GROUP; i += LANES) {
            vfloat e = exp2_(load(scores + i) * scale - highest);
            sum += e;
            if constexpr (SCALED<C>) {
                // Behind the last token there could be anything, even a NaN.
                e = e == 0.0f ? e : e * load(now.value_scales[i / GROUP] + i % GROUP);
                most = larger(e, most);
            }
            if constexpr (std::is_same_v<Value, int16_t>)
                store(scores + i, e);
            else
                store_narrow(p + i, e);
        }
        total = sum_of(sum);
        p_scale = 1;
        if constexpr (std::is_same_v<Value, int16_t>) {
            const float largest = largest_of(most), inverse = largest > 0 ? INT16_MAX / largest : 0.0f;
            for (int i = band.begin * GROUP; i < band.end * GROUP; i += LANES)
                store_narrow(p + i, load(scores + i) * inverse);
            p_scale = largest / INT16_MAX;
        }
    }

    // Sums over one split. `then` is called halfway, to find the stretch that this thread does next.
    template <typename Then>
    void run(const Tile &tile, const Stretch<C> &now, Work &work, const Sums &sums, Then then) const {
        cut_bands(tile, now, work);
        look_ahead_from_keys(now, work);
        score_keys(now, work);
        for (int i = 0; i < work.num_bands; i++) {
            const Band &band = work.bands[i];
            // Each row's highest score is a chain of dependent steps: those of several rows overlap.
            for (int r = band.first; r < band.first + band.rows; r++)
                sums.highest[r] = highest_score(now, band, tile.first_position + r / tile.num_heads,
                                                work.scores + r * SCORE_STRIDE);
            for (int r = band.first; r < band.first + band.rows; r++)
                soften(now, band, work.scores + r * SCORE_STRIDE, sums.highest[r], sums.total[r], work.p_scales[r]);
        }
        look_ahead_from_values(now, then(), work);
        for (int i = 0; i < work.num_bands; i++) weigh_values(now, work.bands[i], work, sums, i == 0);
    }

    void weigh_values(const Stretch<C> &now, const Band &band, Work &work, const Sums &sums, bool first) const {
        int counts[SPLIT_GROUPS];
        for (int g = band.begin; g < band.end; g++) {
            const int seen = band.highest_position - now.positions[g] + 1;
            counts[g] = now.counts[g] < seen ? now.counts[g] : seen;
        }
        const Values<C> values{now.values + band.begin, counts + band.begin,
                               first ? work.value_lines + band.begin : nullptr, band.end - band.begin};
        const float *scores = work.scores + band.first * SCORE_STRIDE;
        const Weights<C> p{reinterpret_cast<const Value *>(scores) + band.begin * GROUP, work.p_scales + band.first};
        with_constant<MOST_ROWS_AT_ONCE>(
            band.rows, [&](auto rows) { weigh<C, rows>(p, values, padded, sums.acc + band.first * padded); });
    }

    void write(const Tile &tile, const Sums &sums) const {
        for (int r = 0; r < tile.rows(); r++) {
            const int64_t token = tile.first_token + r / tile.num_heads;
            const int head = tile.first_head + r % tile.num_heads;
            T *to = out + (token * heads.num_heads + head) * dim;
            const float factor = 1.0f / sums.total[r];
            const float *acc = sums.acc + r * padded;
            int i = 0;
            for (; i + LANES <= dim; i += LANES) store_narrow(to + i, load(acc + i) * factor);
            for (; i < dim; i++) to[i] = narrow<T>(acc[i] * factor);
        }
    }

    // Folds the splits of a tile that were run on their own.
    void finish_tile(const Tile &tile, const Sums *splits) const {
        alignas(64) float acc[MAX_ROW_FLOATS];
        float highest[MAX_ROWS], total[MAX_ROWS];
        const Sums all{highest, total, acc};
        clear(all, tile.rows(), padded);
        for (int i = 0; i < tile.end_split() - tile.first_split(); i++) fold(all, splits[i], tile.rows(), padded);
        write(tile, all);
    }
};

// What one thread of a team does for attention: split after split, knowing what comes next before it is there.
template <typename T, typename C> struct Walk {
    const Attention<T, C> &attention;
    const Plan &plan;
    Team &team;
    int64_t task;
    Stretch<C> stretches[2];
    typename Attention<T, C>::Work work;
    alignas(64) float acc[2][MAX_ROW_FLOATS];
    float highest[2][MAX_ROWS], total[2][MAX_ROWS];

    // Without it, all of this would be set to zero first.
    Walk(const Attention<T, C> &attention, const Plan &plan, Team &team)
        : attention(attention), plan(plan), team(team) {}

    // Finds the first stretch of the next task.
    void begin_task(Stretch<C> &stretch) {
        // Who has a sequence's rows has its attention too, as long as it keeps up.
        task = team.take_near(plan.tasks.size());
        stretch.count = 0;
        if (task < 0) return;
        const Plan::Task &taken = plan.tasks[task];
        const Tile &tile = plan.tiles[taken.tile];
        attention.find_groups(tile, taken.split < 0 ? tile.first_split() : taken.split, stretch);
    }

    void run() {
        const Sums all{highest[0], total[0], acc[0]}, one{highest[1], total[1], acc[1]};
        Stretch<C> *now = &stretches[0], *next = &stretches[1];
        for (begin_task(*now); now->count; std::swap(now, next)) {
            const Plan::Task &running = plan.tasks[task];
            const Tile &tile = plan.tiles[running.tile];
            const bool alone = running.split >= 0, first = alone || now->split == tile.first_split();
            const bool last = alone || now->split + 1 == tile.end_split();
            if (first) attention.load_queries(tile, work);
            const Sums &sums = alone ? plan.partials[running.partial] : first ? all : one;
            attention.run(tile, *now, work, sums, [&]() -> const Stretch<C> & {
                if (last)
                    begin_task(*next);
                else
                    attention.find_groups(tile, now->split + 1, *next);
                return *next;
            });
            if (!first) fold(all, one, tile.rows(), attention.padded);
            if (last && !alone) attention.write(tile, all);
        }
    }
};

// Attention as one of a team. Counts its tasks with the counter of the phase that it begins in; whoever goes on to read
// `out`, or to use the plan or that counter again, waits first: there is no wait at its end.
template <typename T, typename C>
void attend(const T *q, T *out, const C *k_cache, const C *v_cache, const Batch &batch, const Heads &heads,
            const Plan &plan, Team &team) {
    const Attention<T, C> attention{q, out, k_cache, v_cache, batch, heads};
    Walk<T, C>(attention, plan, team).run();
    if (plan.divided.empty()) return;
    team.wait();
    const Range mine = team.share(plan.divided.size());
    for (int64_t i = mine.begin; i < mine.end; i++)
        attention.finish_tile(plan.tiles[plan.divided[i].tile], &plan.partials[plan.divided[i].partial]);
}

template <typename T, typename C>
void attention(const T *q, T *out, const C *k_cache, const C *v_cache, const Batch &batch, const Heads &heads) {
    // Its memory is worth keeping: what is freed in pieces this large goes back to the system.
    static thread_local Plan plan;
    plan.make(batch, heads);
    // In the other threads the name would stand for their own.
    const Plan &made = plan;
    with_team(made.worth_sharing(sizeof(C)),
              [&](Team &team) { attend(q, out, k_cache, v_cache, batch, heads, made, team); });
}

} // namespace

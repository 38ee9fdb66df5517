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
template <typename T> struct Stretch {
    int split, count = 0;
    const T *keys[SPLIT_GROUPS], *values[SPLIT_GROUPS];
    int positions[SPLIT_GROUPS], counts[SPLIT_GROUPS];
};

template <typename T> struct Attention {
    using Value = typename Operand<T>::type;

    const T *q;
    T *out;
    const T *k_cache, *v_cache;
    const Batch &batch;
    const Heads &heads;
    const int dim = heads.head_dim;
    const int padded = padded_dim(heads);
    const Lanes lanes{heads};
    const int64_t k_head = k_head_size<T>(heads), v_head = v_head_size<T>(heads);
    const int key_stride = int(k_head / dim);
    // Softmax to the base of 2, which is the cheaper one.
    const float scale = heads.scale * 1.44269504f;

    struct Work {
        alignas(64) Value q[MAX_ROW_FLOATS];
        alignas(64) float scores[MAX_ROWS * SCORE_STRIDE];
        Band bands[MAX_ROWS];
        int num_bands;
        Lines key_lines[SPLIT_GROUPS], value_lines[SPLIT_GROUPS];
    };

    void load_queries(const Tile &tile, Work &work) const {
        const int width = tile.num_heads * dim;
        for (int t = 0; t < tile.num_tokens; t++) {
            const T *from = q + (int64_t(tile.first_token + t) * heads.num_heads + tile.first_head) * dim;
            Value *to = work.q + t * width;
            if constexpr (std::is_same_v<T, Value>)
                std::memcpy(to, from, width * sizeof(T));
            else
                for (int i = 0; i < width; i++) to[i] = widen(from[i]);
        }
    }

    void find_groups(const Tile &tile, int split, Stretch<T> &stretch) const {
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
            stretch.keys[g] = k_cache + head * k_head + offset * PER_STEP<T>;
            stretch.values[g] = v_cache + head * v_head + offset * padded;
            offset += GROUP;
            if (offset == lanes.per_block) offset = 0, index++;
        }
    }

    void cut_bands(const Tile &tile, const Stretch<T> &stretch, Work &work) const {
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

    Lines lines_of(const T *keys) const { return {(const char *)keys, int64_t(key_stride) * 4}; }

    // What to ask for while the keys are read: the keys some groups on, then the values.
    void look_ahead_from_keys(const Stretch<T> &now, Work &work) const {
        const int ahead = GROUPS_AHEAD < now.count ? GROUPS_AHEAD : now.count;
        for (int g = 0; g < now.count; g++) {
            const int then = g + ahead, over = then - now.count;
            work.key_lines[g] = then < now.count ? lines_of(now.keys[then])
                                                 : Lines{(const char *)now.values[over < now.count ? over : g], 64};
        }
    }
    // While the values are read: the values some groups on, then the keys of what this thread does next.
    void look_ahead_from_values(const Stretch<T> &now, const Stretch<T> &next, Work &work) const {
        const int ahead = GROUPS_AHEAD < now.count ? GROUPS_AHEAD : now.count;
        for (int g = 0; g < now.count; g++) {
            const int then = g + ahead, over = then - now.count;
            work.value_lines[g] = then < now.count   ? Lines{(const char *)now.values[then], 64}
                                  : over < next.count ? lines_of(next.keys[over])
                                                      : Lines{(const char *)now.values[g], 64};
        }
    }

    void score_keys(const Stretch<T> &now, Work &work) const {
        // A few keys at a time for all rows, so that they are still in the nearest cache.
        for (int group = 0; group < now.count; group += GROUPS_AT_ONCE)
            for (int i = 0; i < work.num_bands; i++) {
                const Band &band = work.bands[i];
                const int begin = band.begin > group ? band.begin : group;
                const int end = band.end < group + GROUPS_AT_ONCE ? band.end : group + GROUPS_AT_ONCE;
                if (begin >= end) continue;
                const Lines *ahead = i ? nullptr : work.key_lines + begin;
                with_constant<ROWS_AT_ONCE>(band.rows, [&](auto rows) {
                    score<T, rows>(work.q + band.first * dim, dim, now.keys + begin, end - begin, key_stride, ahead,
                                   work.scores + band.first * SCORE_STRIDE + begin * GROUP);
                });
            }
    }

    // Hides the lanes of one group that the token at `position` does not see.
    void hide(float *scores, int first, int count, int position, int lowest) const {
        count = count < position - first + 1 ? count : position - first + 1;
        for (int i = 0; i < GROUP; i++)
            if (i >= count || i < lowest - first) scores[i] = -__builtin_inff();
    }

    // Turns a row of scores into probabilities, relative to the highest score.
    void soften(const Stretch<T> &now, const Band &band, int position, float *scores, float &highest,
                float &total) const {
        const int lowest = lanes.lowest_seen(position);
        vfloat most = vfloat{} + LOWEST / scale, sum = {};
        for (int g = band.begin; g < band.end; g++) {
            float *group = scores + g * GROUP;
            const int first = now.positions[g];
            if (now.counts[g] < GROUP || first + GROUP - 1 > position || first < lowest)
                hide(group, first, now.counts[g], position, lowest);
            for (int i = 0; i < GROUP; i += LANES) most = larger(load(group + i), most);
        }
        highest = largest_of(most) * scale;
        highest = highest > LOWEST ? highest : LOWEST;
        Value *p = reinterpret_cast<Value *>(scores);
        for (int i = band.begin * GROUP; i < band.end * GROUP; i += LANES) {
            const vfloat e = exp2_(load(scores + i) * scale - highest);
            sum += e;
            store_narrow(p + i, e);
        }
        total = sum_of(sum);
    }

    // Sums over one split. `then` is called halfway, to find the stretch that this thread does next.
    template <typename Then>
    void run(const Tile &tile, const Stretch<T> &now, Work &work, const Sums &sums, Then then) const {
        cut_bands(tile, now, work);
        look_ahead_from_keys(now, work);
        score_keys(now, work);
        for (int i = 0; i < work.num_bands; i++) {
            const Band &band = work.bands[i];
            for (int r = band.first; r < band.first + band.rows; r++)
                soften(now, band, tile.first_position + r / tile.num_heads, work.scores + r * SCORE_STRIDE,
                       sums.highest[r], sums.total[r]);
        }
        look_ahead_from_values(now, then(), work);
        for (int i = 0; i < work.num_bands; i++) weigh_values(now, work.bands[i], work, sums, i == 0);
    }

    void weigh_values(const Stretch<T> &now, const Band &band, Work &work, const Sums &sums, bool first) const {
        int counts[SPLIT_GROUPS];
        for (int g = band.begin; g < band.end; g++) {
            const int seen = band.highest_position - now.positions[g] + 1;
            counts[g] = now.counts[g] < seen ? now.counts[g] : seen;
        }
        const Values<T> values{now.values + band.begin, counts + band.begin,
                               first ? work.value_lines + band.begin : nullptr, band.end - band.begin};
        const Value *p = reinterpret_cast<const Value *>(work.scores + band.first * SCORE_STRIDE) + band.begin * GROUP;
        with_constant<ROWS_AT_ONCE>(
            band.rows, [&](auto rows) { weigh<T, rows>(p, values, padded, sums.acc + band.first * padded); });
    }

    void write(const Tile &tile, const Sums &sums) const {
        for (int r = 0; r < tile.rows(); r++) {
            const int64_t token = tile.first_token + r / tile.num_heads;
            const int head = tile.first_head + r % tile.num_heads;
            T *to = out + (token * heads.num_heads + head) * dim;
            const float factor = 1.0f / sums.total[r];
            for (int i = 0; i < dim; i++) to[i] = narrow<T>(sums.acc[r * padded + i] * factor);
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
template <typename T> struct Walk {
    const Attention<T> &attention;
    const Plan &plan;
    Team &team;
    int64_t task;
    Stretch<T> stretches[2];
    typename Attention<T>::Work work;
    alignas(64) float acc[2][MAX_ROW_FLOATS];
    float highest[2][MAX_ROWS], total[2][MAX_ROWS];

    // Without it, all of this would be set to zero first.
    Walk(const Attention<T> &attention, const Plan &plan, Team &team)
        : attention(attention), plan(plan), team(team) {}

    // Finds the first stretch of the next task.
    void begin_task(Stretch<T> &stretch) {
        task = team.take();
        stretch.count = 0;
        if (task >= int64_t(plan.tasks.size())) return;
        const Plan::Task &taken = plan.tasks[task];
        const Tile &tile = plan.tiles[taken.tile];
        attention.find_groups(tile, taken.split < 0 ? tile.first_split() : taken.split, stretch);
    }

    void run() {
        const Sums all{highest[0], total[0], acc[0]}, one{highest[1], total[1], acc[1]};
        Stretch<T> *now = &stretches[0], *next = &stretches[1];
        for (begin_task(*now); now->count; std::swap(now, next)) {
            const Plan::Task &running = plan.tasks[task];
            const Tile &tile = plan.tiles[running.tile];
            const bool alone = running.split >= 0, first = alone || now->split == tile.first_split();
            const bool last = alone || now->split + 1 == tile.end_split();
            if (first) attention.load_queries(tile, work);
            const Sums &sums = alone ? plan.partials[running.partial] : first ? all : one;
            attention.run(tile, *now, work, sums, [&]() -> const Stretch<T> & {
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
template <typename T>
void attend(const T *q, T *out, const T *k_cache, const T *v_cache, const Batch &batch, const Heads &heads,
            const Plan &plan, Team &team) {
    const Attention<T> attention{q, out, k_cache, v_cache, batch, heads};
    Walk<T>(attention, plan, team).run();
    if (plan.divided.empty()) return;
    team.wait();
    const Range mine = team.share(plan.divided.size());
    for (int64_t i = mine.begin; i < mine.end; i++)
        attention.finish_tile(plan.tiles[plan.divided[i].tile], &plan.partials[plan.divided[i].partial]);
}

template <typename T>
void attention(const T *q, T *out, const T *k_cache, const T *v_cache, const Batch &batch, const Heads &heads) {
    // Its memory is worth keeping: what is freed in pieces this large goes back to the system.
    static thread_local Plan plan;
    plan.make(batch, heads);
    // In the other threads the name would stand for their own.
    const Plan &made = plan;
    with_team(made.worth_sharing(sizeof(T)),
              [&](Team &team) { attend(q, out, k_cache, v_cache, batch, heads, made, team); });
}

} // namespace

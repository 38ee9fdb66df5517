// Paged attention with an online softmax, for decodes and prefill chunks in one call.
#pragma once
#include "plan.h"
#include "team.h"

namespace {

constexpr float LOWEST = -1e30f;

inline void clear(const Sums &sums, int rows, int dim) {
    for (int r = 0; r < rows; r++) sums.highest[r] = LOWEST, sums.total[r] = 0;
    std::memset(sums.acc, 0, sizeof(float) * rows * dim);
}

// Adds a split's sums to those of the splits before it.
inline void fold(const Sums &into, const Sums &from, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        const float highest = into.highest[r] > from.highest[r] ? into.highest[r] : from.highest[r];
        const float a = exp_(into.highest[r] - highest), b = exp_(from.highest[r] - highest);
        into.highest[r] = highest;
        into.total[r] = into.total[r] * a + from.total[r] * b;
        for (int i = 0; i < dim; i++) into.acc[r * dim + i] = into.acc[r * dim + i] * a + from.acc[r * dim + i] * b;
    }
}

template <typename T> struct Attention {
    using Value = typename Operand<T>::type;
    static constexpr int NOWHERE = INT32_MAX;

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

    struct Work {
        alignas(64) Value q[MAX_ROW_FLOATS];
        alignas(64) float scores[MAX_ROWS * BLOCK];
        alignas(64) Value p[MAX_ROWS * BLOCK];
        alignas(64) float correction[MAX_ROWS];
    };

    void load_queries(const Tile &tile, Work &work) const {
        for (int t = 0; t < tile.num_tokens; t++) {
            const T *from = q + (int64_t(tile.first_token + t) * heads.num_heads + tile.first_head) * dim;
            Value *to = work.q + t * tile.num_heads * dim;
            for (int i = 0; i < tile.num_heads * dim; i++) to[i] = narrow<Value>(widen(from[i]));
        }
    }

    // Index of the head in the cache that holds the group of lanes at `lane`.
    int64_t head_at(const Tile &tile, int lane) const {
        const int32_t block = batch.block_tables[tile.seq * batch.table_stride + lane / lanes.per_block];
        return int64_t(block) * heads.num_kv_heads + tile.kv_head;
    }
    const T *keys_at(int64_t head, int offset) const { return k_cache + head * k_head + offset * PER_STEP<T>; }
    const T *values_at(int64_t head, int offset) const { return v_cache + head * v_head + offset * padded; }

    // Points at the values of the block of lanes that begins at `lane`, scores its keys, and tells each lane's position.
    Values<T> score_block(const Tile &tile, int lane, Work &work, int *positions) const {
        Values<T> values;
        const int lowest = lanes.lowest_seen(tile.first_position), highest = tile.first_position + tile.num_tokens - 1;
        for (int g = 0; g < GROUPS; g++, lane += GROUP, positions += GROUP) {
            const int index = lane / lanes.per_block, offset = lane % lanes.per_block;
            const int position = index * heads.block_size + offset;
            int count = heads.block_size - offset;
            count = count < GROUP ? count : GROUP;
            count = count < highest - position + 1 ? count : highest - position + 1;
            if (count < 0 || position + count <= lowest) count = 0;
            for (int i = 0; i < GROUP; i++) positions[i] = i < count ? position + i : NOWHERE;
            values.counts[g] = count;
            values.groups[g] = v_cache;
            values.next[g] = nullptr;
            if (!count) continue;
            const int64_t head = head_at(tile, lane);
            values.groups[g] = values_at(head, offset);
            const T *next_keys = nullptr;
            if (const int next = lane + BLOCK; next < tile.last_lane) {
                const int64_t next_head = head_at(tile, next);
                next_keys = keys_at(next_head, next % lanes.per_block);
                values.next[g] = values_at(next_head, next % lanes.per_block);
            }
            score(work.q, tile.rows(), dim, keys_at(head, offset), key_stride, next_keys, work.scores + g * GROUP);
        }
        return values;
    }

    // Turns a row of scores into probabilities relative to the highest score so far; returns the correction of old sums.
    float soften(float *scores, const int *positions, int position, bool hidden, float &highest, float &total,
                 Value *p) const {
        if (hidden) {
            const int lowest = lanes.lowest_seen(position);
#pragma omp simd
            for (int i = 0; i < BLOCK; i++)
                scores[i] = (positions[i] <= position) & (positions[i] >= lowest) ? scores[i] * heads.scale
                                                                                 : -__builtin_inff();
        } else {
#pragma omp simd
            for (int i = 0; i < BLOCK; i++) scores[i] *= heads.scale;
        }
        vfloat most = load(scores), sum = {};
        for (int i = LANES; i < BLOCK; i += LANES) most = load(scores + i) > most ? load(scores + i) : most;
        const float top = across(most, [](float a, float b) { return a > b ? a : b; }, highest);
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) scores[i] = exp_(scores[i] - top);
        for (int i = 0; i < BLOCK; i += LANES) sum += load(scores + i);
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) p[i] = narrow<Value>(scores[i]);
        const float correction = exp_(highest - top);
        highest = top;
        total = across(sum, [](float a, float b) { return a + b; }, total * correction);
        return correction;
    }

    // Sums over the lanes [lane, end) of one split.
    void run_split(const Tile &tile, int lane, int end, Work &work, const Sums &sums) const {
        const int rows = tile.rows();
        for (; lane < end; lane += BLOCK) {
            int positions[BLOCK];
            Values<T> values = score_block(tile, lane, work, positions);
            bool whole = true;
            for (int g = 0; g < GROUPS; g++) whole &= values.counts[g] == GROUP;
            for (int r = 0; r < rows; r++) {
                const int position = tile.first_position + r / tile.num_heads;
                const bool hidden =
                    !whole || positions[BLOCK - 1] > position || positions[0] < lanes.lowest_seen(position);
                work.correction[r] = soften(work.scores + r * BLOCK, positions, position, hidden, sums.highest[r],
                                            sums.total[r], work.p + r * BLOCK);
            }
            weigh<T>(work.p, rows, values, padded, work.correction, sums.acc);
        }
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

    int split_begin(const Tile &tile, int split) const {
        const int lane = tile.first_lane / BLOCK * BLOCK;
        return lane > split * SPLIT ? lane : split * SPLIT;
    }
    int split_end(const Tile &tile, int split) const {
        return tile.last_lane < (split + 1) * SPLIT ? tile.last_lane : (split + 1) * SPLIT;
    }

    // The sums of one split on its own.
    void run_split_alone(const Tile &tile, int split, const Sums &sums) const {
        Work work;
        load_queries(tile, work);
        clear(sums, tile.rows(), padded);
        run_split(tile, split_begin(tile, split), split_end(tile, split), work, sums);
    }

    // All of a tile.
    void run_tile(const Tile &tile) const {
        Work work;
        alignas(64) float acc[2][MAX_ROW_FLOATS];
        float highest[2][MAX_ROWS], total[2][MAX_ROWS];
        const Sums all{highest[0], total[0], acc[0]}, one{highest[1], total[1], acc[1]};
        load_queries(tile, work);
        clear(all, tile.rows(), padded);
        for (int split = tile.first_split(); split < tile.end_split(); split++) {
            // Folding into nothing changes nothing.
            if (split == tile.first_split()) {
                run_split(tile, split_begin(tile, split), split_end(tile, split), work, all);
                continue;
            }
            clear(one, tile.rows(), padded);
            run_split(tile, split_begin(tile, split), split_end(tile, split), work, one);
            fold(all, one, tile.rows(), padded);
        }
        write(tile, all);
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

// Attention as one of a team. Counts its tasks with the counter of the phase that it begins in; whoever goes on to read
// `out`, or to use the plan or that counter again, waits first: there is no wait at its end.
template <typename T>
void attend(const T *q, T *out, const T *k_cache, const T *v_cache, const Batch &batch, const Heads &heads,
            const Plan &plan, Team &team) {
    const Attention<T> attention{q, out, k_cache, v_cache, batch, heads};
    for (int64_t i = team.take(); i < int64_t(plan.tasks.size()); i = team.take()) {
        const Plan::Task &task = plan.tasks[i];
        if (task.split < 0)
            attention.run_tile(plan.tiles[task.tile]);
        else
            attention.run_split_alone(plan.tiles[task.tile], task.split, plan.partials[task.partial]);
    }
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

// Paged attention cut into tasks.
//
// The work is cut into tiles: a run of a sequence's tokens under the query heads of one KV head, so that K and V are
// read once for all of them. Keys are cut into KV splits of fixed size, each with a softmax state of its own, and these
// are combined in order. A tile is one task, except where it is its sequence's only one: then each split is a task, so
// that few long sequences still keep all threads busy. Either way the arithmetic of a row is the same, to the bit.
#pragma once
#include <vector>

#include "amx_attention.h"

namespace {

// Reading this many bytes of K and V takes one thread about as long as waking the others.
constexpr int64_t PARALLEL_BYTES = 128 * 1024;

// Where the tokens of a sequence lie among its lanes (see attention_products.h).
struct Lanes {
    const Heads &heads;
    const int per_block = (heads.block_size + GROUP - 1) / GROUP * GROUP;

    int of(int position) const { return position / heads.block_size * per_block + position % heads.block_size; }

    // The first position that the token at `position` sees.
    int lowest_seen(int position) const {
        return heads.window > 0 && position >= heads.window ? position - heads.window + 1 : 0;
    }

    // The last position that it sees, of a sequence of so many tokens.
    int highest_seen(int position, int length) const {
        if (!heads.both_ways) return position;
        return heads.window > 0 && heads.window < length - position ? position + heads.window - 1 : length - 1;
    }
};

struct Tile {
    int seq, kv_head, first_head, num_heads, first_token, num_tokens;
    int first_position, highest_seen, first_lane, last_lane;
    int rows() const { return num_heads * num_tokens; }
    int first_split() const { return first_lane / KV_SPLIT; }
    int end_split() const { return (last_lane + KV_SPLIT - 1) / KV_SPLIT; }
    int first_group(int split) const {
        const int first = first_lane / GROUP, begin = split * KV_SPLIT_GROUPS;
        return first > begin ? first : begin;
    }
    int end_group(int split) const {
        const int last = (last_lane + GROUP - 1) / GROUP, end = (split + 1) * KV_SPLIT_GROUPS;
        return last < end ? last : end;
    }
};

// The online softmax of some rows: the highest score, the sum of the exponentials, and those times V.
struct SoftmaxState {
    float *row_max, *row_sum, *acc;
};

// What the threads share out among themselves. It depends on nothing but the batch and the heads, so that layers with
// the same heads share one, and it keeps its memory from one step to the next.
struct Plan {
    struct Task {
        int tile, split;  // split < 0: the whole tile
        int64_t partial;  // index of the split's state
    };
    struct SplitTile {
        int tile;
        int64_t partial;
    };
    std::vector<Tile> tiles;
    std::vector<Task> tasks;
    std::vector<SplitTile> split_tiles;
    std::vector<SoftmaxState> partials;

    Plan() = default;
    // The partial states point into this plan's own memory.
    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;

    NOINLINE void make(const Batch &batch, const Heads &heads) {
        tiles.clear(), tasks.clear(), split_tiles.clear(), partials.clear();
        lanes_times_rows = 0;
        padded = padded_dim(heads);
        for (int seq = 0; seq < batch.num_seqs; seq++) add_sequence(batch, heads, seq);
        allocate();
    }

    // Whether there is enough to do for more than one thread, with numbers of this size in the cache.
    bool worth_sharing(int64_t bytes_per_number) const {
        return tasks.size() > 1 && lanes_times_rows / 8 * padded * 2 * bytes_per_number >= PARALLEL_BYTES;
    }

  private:
    std::vector<float> memory;
    int64_t lanes_times_rows = 0;
    int padded = 0;

    void add(const Tile &tile, bool alone) {
        const int index = int(tiles.size()), splits = tile.end_split() - tile.first_split();
        tiles.push_back(tile);
        lanes_times_rows += int64_t(tile.last_lane - tile.first_lane) * (tile.rows() + 8);
        if (!alone || splits == 1) {
            tasks.push_back({index, -1, 0});
            return;
        }
        split_tiles.push_back({index, int64_t(partials.size())});
        for (int split = tile.first_split(); split < tile.end_split(); split++) {
            tasks.push_back({index, split, int64_t(partials.size())});
            partials.push_back({});
        }
    }

    void add_sequence(const Batch &batch, const Heads &heads, int seq) {
        const Lanes lanes{heads};
        const int start = batch.query_start[seq], count = batch.query_start[seq + 1] - start;
        const int groups = heads.num_heads / heads.num_kv_heads;
        const int room = padded > COMMON_HEAD_DIM ? ROWS_OF_LARGE_HEADS : std::min(MAX_ROWS, 64 * 64 / padded);
        const int most_heads = groups < room ? groups : room, most_tokens = room / most_heads;
        // Late tokens see the most keys; the longest tasks go first, so that no thread is left with one at the end.
        for (int token = (count - 1) / most_tokens * most_tokens; token >= 0; token -= most_tokens) {
            const int tokens = count - token < most_tokens ? count - token : most_tokens;
            const int position = batch.context_len[seq] - count + token;
            const int first_lane = lanes.of(lanes.lowest_seen(position));
            const int highest = lanes.highest_seen(position + tokens - 1, batch.context_len[seq]);
            const int last_lane = lanes.of(highest) + 1;
            for (int kv_head = 0; kv_head < heads.num_kv_heads; kv_head++)
                for (int head = 0; head < groups; head += most_heads) {
                    const int num = groups - head < most_heads ? groups - head : most_heads;
                    add(Tile{seq, kv_head, kv_head * groups + head, num, start + token, tokens, position, highest,
                             first_lane, last_lane},
                        count <= most_tokens);
                }
        }
    }

    // Gives each partial state its memory.
    void allocate() {
        size_t floats = 0;
        for (const Task &task : tasks)
            if (task.split >= 0) floats += tiles[task.tile].rows() * (padded + 2);
        if (memory.size() < floats) memory.resize(floats);
        float *next = memory.data();
        for (const Task &task : tasks) {
            if (task.split < 0) continue;
            const int rows = tiles[task.tile].rows();
            partials[task.partial] = SoftmaxState{next, next + rows, next + 2 * rows};
            next += rows * (padded + 2);
        }
    }
};

} // namespace

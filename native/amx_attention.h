// The products of attention by AMX, over a cache of bfloat16: 16 rows at once. A group of 16 lanes lies in the cache as a
// tile wants it: of its keys 16 pairs of dimensions, of its values 8 pairs of tokens under 16 dimensions.
#pragma once
#include <utility>

#include "amx.h"
#include "attention_products.h"

namespace {

// Whether tiles multiply rows, keys and values of T.
#if defined(__AMX_TILE__)
template <typename T> constexpr bool TILED = std::is_same_v<T, bf16>;

template <> class RowProducts<bf16> {
    static constexpr int VALUE_DIMS = 16, PAIRS = GROUP / 2;
    template <int N> using Sequence = std::make_integer_sequence<int, N>;

    // Sums of G groups from number `first` on, in tiles 0 to G - 1.
    template <int... G>
    static void some_scores(const Queries<bf16> &q, const Keys<bf16> &keys, int first, float *scores,
                            int64_t score_stride, std::integer_sequence<int, G...>) {
        (zero_tile<G>(), ...);
        const bf16 *const *groups = keys.groups + first;
        const int64_t stride = keys.stride * int64_t(4);
        for (int at = 0; at < q.dim; at += TILE_DIMS) {
            if (keys.ahead)
                for (int step = at / 2; step < (at + TILE_DIMS) / 2; step++)
                    (keys.ahead[first + G].prefetch(step), ...);
            load_tile<4>(q.rows + at, q.dim * sizeof(bf16));
            ((load_tile<5>(groups[G] + at * keys.stride, stride), add_bf16_products<G, 4, 5>()), ...);
        }
        (store_tile<G>(scores + (first + G) * GROUP, score_stride * sizeof(float)), ...);
    }

    // Sixteen lanes' values under some dimensions: pairs of tokens, `stride` bytes apart.
    struct Lines {
        const char *first;
        int64_t stride;
    };

    // Of the values of a group only `count` are numbers for sure: the rest become zeros, in `whole`.
    static NOINLINE Lines filled_up(const Lines &from, int count, int dims, char *whole) {
        const int64_t bytes = dims * 2 * sizeof(bf16);
        std::memset(whole, 0, PAIRS * bytes);
        for (int pair = 0; pair < (count + 1) / 2; pair++)
            std::memcpy(whole + pair * bytes, from.first + pair * from.stride, bytes);
        auto *last = reinterpret_cast<uint32_t *>(whole + count / 2 * bytes);
        if (count % 2)
            for (int i = 0; i < dims; i++) last[i] &= 0xffff;
        return {whole, bytes};
    }

    // acc[r][first + 16 * D ...] = p[r] . V, in tiles D.
    template <int... D>
    static NOINLINE void weigh_some(const Weights<bf16> &p, int rows, const Values<bf16> &values, int dim, int first,
                                    float *acc, int64_t score_stride, std::integer_sequence<int, D...>) {
        constexpr int DIMS = sizeof...(D) * VALUE_DIMS;
        alignas(64) char whole[PAIRS * DIMS * 2 * sizeof(bf16)];
        (zero_tile<D>(), ...);
        for (int group = 0; group < values.count; group++) {
            Lines lines{reinterpret_cast<const char *>(values.groups[group] + 2 * first), dim * int64_t(4)};
            if (values.ahead)
                for (int pair = 0; pair < PAIRS; pair++)
                    (values.ahead[group].prefetch((pair * dim + first) / VALUE_DIMS + D), ...);
            if (values.counts[group] < GROUP) lines = filled_up(lines, values.counts[group], DIMS, whole);
            load_tile<6>(p.rows + group * GROUP, score_stride * sizeof(float));
            ((load_tile<7>(lines.first + 64 * D, lines.stride), add_bf16_products<D, 6, 7>()), ...);
        }
        if (rows == ROWS) return (void)(store_tile<D>(acc + first + VALUE_DIMS * D, dim * sizeof(float)), ...);
        // What lies behind the last row may be another's.
        alignas(64) float sums[ROWS * DIMS];
        (store_tile<D>(sums + VALUE_DIMS * D, DIMS * sizeof(float)), ...);
        for (int r = 0; r < rows; r++) std::memcpy(acc + r * dim + first, sums + r * DIMS, DIMS * sizeof(float));
    }

  public:
    // Rows of a block, and what a head's dimensions are a multiple of where tiles make its scores.
    static constexpr int ROWS = 16, TILE_DIMS = 32;

    struct Registers {
        TileRegisters tiles{true};
    };

    // All blocks but the last are of 16 rows, so that what is stored behind a block's last row is overwritten or spare.
    static int next_rows(int rows) { return rows < ROWS ? rows : ROWS; }

    static NOINLINE void make_scores(const Queries<bf16> &q, int rows, const Keys<bf16> &keys, float *scores) {
        if (q.dim % TILE_DIMS == 0) return make_scores(q, keys, scores, SCORE_STRIDE);
        for (int r = 0; r < rows;) {
            const int some = rows_at_once(rows - r);
            const Queries<bf16> these{q.rows + r * q.dim, q.scales + r, q.dim};
            with_constant<MOST_ROWS_AT_ONCE>(
                some, [&](auto count) { qk<bf16, count>(these, keys, scores + r * SCORE_STRIDE); });
            r += some;
        }
    }

    // Of ROWS rows, whose scores lie `score_stride` apart.
    static NOINLINE void make_scores(const Queries<bf16> &q, const Keys<bf16> &keys, float *scores,
                                     int64_t score_stride) {
        int done = 0;
        for (; done + 4 <= keys.count; done += 4) some_scores(q, keys, done, scores, score_stride, Sequence<4>{});
        for (; done < keys.count; done++) some_scores(q, keys, done, scores, score_stride, Sequence<1>{});
    }

    // Probabilities lie where the scores were.
    static void weigh(const Weights<bf16> &p, int rows, const Values<bf16> &values, int dim, float *acc,
                      int64_t score_stride = SCORE_STRIDE) {
        int first = 0;
        for (; first + 4 * VALUE_DIMS <= dim; first += 4 * VALUE_DIMS)
            weigh_some(p, rows, values, dim, first, acc, score_stride, Sequence<4>{});
        for (; first + 2 * VALUE_DIMS <= dim; first += 2 * VALUE_DIMS)
            weigh_some(p, rows, values, dim, first, acc, score_stride, Sequence<2>{});
        for (; first < dim; first += VALUE_DIMS)
            weigh_some(p, rows, values, dim, first, acc, score_stride, Sequence<1>{});
    }
};

#else
template <typename T> constexpr bool TILED = false;
#endif

} // namespace

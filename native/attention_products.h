// The two products of attention, Q K^T and P V, for a few rows, a row being one head of one token.
//
// Keys are walked as lanes: each block of the cache takes its tokens rounded up to GROUP lanes, so that a group of 16
// lanes is always one load from one block, whatever the block size. What a row computes depends only on its own query
// and on absolute lane numbers, never on the other rows of the tile.
#pragma once
#include "kv.h"

namespace {

constexpr int GROUP = 16;
constexpr int VECTORS = GROUP / LANES;
// Rows and groups that are multiplied at once: as many sums as fit in the registers.
constexpr int ROWS_AT_ONCE = LANES == 16 ? 6 : 4;
// One more just fits: slower by a few percent for many rows, but faster than two passes over K and V for a few.
constexpr int MOST_ROWS_AT_ONCE = LANES == 16 ? 7 : 4;
constexpr int GROUPS_AT_ONCE = LANES == 16 ? 4 : 1;
constexpr int MAX_ROWS = 64;
// Heads up to this size share tiles by how much of the cache their rows take; of larger ones there are as many as
// are multiplied together.
constexpr int COMMON_HEAD_DIM = 256, ROWS_OF_LARGE_HEADS = 16;
constexpr int MAX_ROW_FLOATS = ROWS_OF_LARGE_HEADS * MAX_HEAD_DIM;
// Products may read as many rows behind the last one.
constexpr int SPARE_ROWS = 16;
constexpr int KV_SPLIT = 256;  // lanes whose softmax and sums are computed on their own
constexpr int KV_SPLIT_GROUPS = KV_SPLIT / GROUP;
constexpr int SCORE_STRIDE = KV_SPLIT + GROUP;  // no power of two, or rows would push each other out of the cache

// How queries and probabilities are kept, to be multiplied with values stored as T, and how the products are summed.
template <typename T> struct Operand {
    using type = float;
    using sum = vfloat;
};
#if defined(__AVX512BF16__)
template <> struct Operand<bf16> {
    using type = bf16;
    using sum = vfloat;
};
#endif
#if defined(__AVX512VNNI__)
// 16 bits are more exact than bfloat16, and the sum of a split cannot overflow: 256 * 127 * 32767 < 2^31. A head may
// have more dimensions than that: see `largest_query`.
template <> struct Operand<int8_t> {
    using type = int16_t;
    using sum = vint;
};
#endif

// What the numbers of a query are rounded to at most, so that their sum of products cannot overflow either.
inline float largest_query(int dim) {
    return dim > COMMON_HEAD_DIM ? float(INT16_MAX) * COMMON_HEAD_DIM / dim : float(INT16_MAX);
}

inline const float *stored(const float *p) { return p; }
inline const uint32_t *stored(const bf16 *p) { return reinterpret_cast<const uint32_t *>(p); }
inline const uint16_t *stored(const int8_t *p) { return reinterpret_cast<const uint16_t *>(p); }

// Pairs of 8-bit numbers, made pairs of 16-bit ones where they are multiplied as such.
inline vint load(const uint16_t *p) {
#if defined(__AVX512VNNI__)
    __m256i pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return (vint)_mm512_cvtepi8_epi16(pairs);
#else
    typedef int16_t pairs_of_lanes __attribute__((vector_size(2 * LANES)));
    pairs_of_lanes pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return __builtin_convertvector(pairs, vint);
#endif
}

// acc + row . values for stored value number `step` (a pair of them for bf16 and int8) of every lane.
inline vfloat multiply_add(vfloat acc, const float *row, int step, vfloat values) { return acc + row[step] * values; }
inline vfloat multiply_add(vfloat acc, const float *row, int step, vuint values) {
    acc += row[2 * step] * low_half(values);
    return acc + row[2 * step + 1] * high_half(values);
}
#if defined(__AVX512BF16__)
inline vfloat multiply_add(vfloat acc, const bf16 *row, int step, vuint values) {
    int32_t pair;
    std::memcpy(&pair, row + 2 * step, sizeof pair);
    return (vfloat)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)values);
}
#endif
#if defined(__AVX512VNNI__)
inline vint multiply_add(vint acc, const int16_t *row, int step, vint values) {
    int32_t pair;
    std::memcpy(&pair, row + 2 * step, sizeof pair);
    return (vint)_mm512_dpwssd_epi32((__m512i)acc, _mm512_set1_epi32(pair), (__m512i)values);
}
#else
inline vfloat multiply_add(vfloat acc, const float *row, int step, vint values) {
    acc += row[2 * step] * to_float(values << 24 >> 24);
    return acc + row[2 * step + 1] * to_float(values >> 8);
}
#endif

// Probabilities take the place of the scores they are made from, so their rows lie as far apart.
template <typename Value> constexpr int P_STRIDE = SCORE_STRIDE * int(sizeof(float) / sizeof(Value));
#if defined(__AVX512VNNI__)
// For what lies between the range of 16 bits already.
inline void store_narrow(int16_t *p, vfloat v) {
    const __m256i narrowed = _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_cvtps_epi32(0xffff, (__m512)v));
    std::memcpy(p, &narrowed, sizeof narrowed);
}
#endif

// The hardware does not follow a block table, so each step of a loop prefetches a line that will be read some groups
// later. All of them at once would stall the loop; without any it would wait for memory.
struct PrefetchLines {
    const char *first;
    int64_t stride;
    void prefetch(int index) const { __builtin_prefetch(first + index * stride, 0, 2); }
};

// Calls f with n as a constant, 1 <= n <= Most.
template <int Most, typename F> void with_constant(int n, F f) {
    if constexpr (Most > 1)
        if (n < Most) return with_constant<Most - 1>(n, f);
    f(std::integral_constant<int, Most>{});
}

// The queries of some rows. A row's scale is used only where it is rounded to integers.
template <typename T> struct Queries {
    const typename Operand<T>::type *rows;
    const float *scales;
    int dim;
};

// The keys of consecutive groups of lanes, with the scales of their tokens if there are any.
template <typename T> struct Keys {
    const T *const *groups;
    const float *const *scales;
    const PrefetchLines *ahead;  // or null
    int count, stride;
};

// scores[r][g * 16 ...] = q[r] . K for R rows and G groups of lanes, from group number `first` on.
template <typename T, int R, int G>
NOINLINE void qk_rows(const Queries<T> &q, const Keys<T> &keys, int first, float *scores) {
    typename Operand<T>::sum acc[R][G * VECTORS] = {};
    const T *const *groups = keys.groups + first;
    const int steps = q.dim / PER_STEP<T>;
    for (int step = 0; step < steps; step++) {
        if (keys.ahead)
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) keys.ahead[first + g].prefetch(step);
#pragma GCC unroll 8
        for (int v = 0; v < G * VECTORS; v++) {
            const auto values = load(stored(groups[v / VECTORS]) + step * keys.stride + v % VECTORS * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[r][v] = multiply_add(acc[r][v], q.rows + r * q.dim, step, values);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < G * VECTORS; v++) {
            vfloat qk = to_float(acc[r][v]);
            if constexpr (SCALED<T>)
                qk *= load(keys.scales[first + v / VECTORS] + v % VECTORS * LANES) * q.scales[r];
            store(scores + r * SCORE_STRIDE + (first * VECTORS + v) * LANES, qk);
        }
}

template <typename T, int R> void qk(const Queries<T> &q, const Keys<T> &keys, float *scores) {
    int done = 0;
    if constexpr (GROUPS_AT_ONCE > 2) {
        for (; done + 4 <= keys.count; done += 4) qk_rows<T, R, 4>(q, keys, done, scores);
        for (; done + 2 <= keys.count; done += 2) qk_rows<T, R, 2>(q, keys, done, scores);
    }
    for (; done < keys.count; done++) qk_rows<T, R, 1>(q, keys, done, scores);
}

// The values of consecutive groups of lanes: `counts` of each are valid, the rest must not be read as numbers.
template <typename T> struct Values {
    const T *const *groups;
    const int *counts;
    const PrefetchLines *ahead;  // or null
    int count;
};

// The probabilities of some rows. A row's scale is used only where it is rounded to integers.
template <typename T> struct Weights {
    const typename Operand<T>::type *rows;
    const float *scales;
};

// acc[r][0:C * LANES] = p[r] . V for R rows and C vectors of dimensions, from dimension `first` on.
template <typename T, int R, int C>
NOINLINE void pv_rows(const Weights<T> &p, const Values<T> &values, int dim, int first, float *acc) {
    using Value = typename Operand<T>::type;
    constexpr int LINE = 16;
    typename Operand<T>::sum sum[R][C] = {};
    for (int group = 0; group < values.count; group++) {
        const auto *from = stored(values.groups[group]) + first;
        const Value *row = p.rows + group * GROUP;
        const int count = values.counts[group];
        // Whatever integers lie behind the last one, times 0 they are 0.
        const int steps = (SCALED<T> ? count + 1 : count) / PER_STEP<T>;
        for (int step = 0; step < steps; step++, from += dim) {
            if (values.ahead)
#pragma GCC unroll 4
                for (int c = 0; c < C * LANES; c += LINE) values.ahead[group].prefetch((step * dim + first + c) / LINE);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const auto value = load(from + c * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    sum[r][c] = multiply_add(sum[r][c], row + r * P_STRIDE<Value>, step, value);
            }
        }
        if constexpr (sizeof(T) == 2) {
            // The other half of the last pair was never written for this sequence and could hold anything.
            if (count % 2)
                for (int c = 0; c < C; c++) {
                    const vuint value = load(from + c * LANES) & 0xffffu;
                    for (int r = 0; r < R; r++)
                        sum[r][c] = multiply_add(sum[r][c], row + r * P_STRIDE<Value>, steps, value);
                }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            store(acc + r * dim + c * LANES, to_float(sum[r][c]) * (SCALED<T> ? p.scales[r] : 1.0f));
}

template <typename T, int R> void pv(const Weights<T> &p, const Values<T> &values, int dim, float *acc) {
    constexpr int C = LANES == 16 ? 4 : LANES == 8 ? 2 : 1;
    int first = 0;
    for (; first + C * LANES <= dim; first += C * LANES) pv_rows<T, R, C>(p, values, dim, first, acc + first);
    if constexpr (C > 2)
        if (first + 2 * LANES <= dim) {
            pv_rows<T, R, 2>(p, values, dim, first, acc + first);
            first += 2 * LANES;
        }
    if constexpr (C > 1)
        if (first < dim) pv_rows<T, R, 1>(p, values, dim, first, acc + first);
}

// How many of `rows` to multiply at once.
inline int rows_at_once(int rows) {
    return rows >= 2 * ROWS_AT_ONCE ? ROWS_AT_ONCE : rows > MOST_ROWS_AT_ONCE ? (rows + 1) / 2 : rows;
}

// The products of a block of rows, of which `next_rows` says how many of those left to take.
template <typename T> struct RowProducts {
    // Nothing is to be set before.
    struct Registers {
        ~Registers() {}
    };

    static int next_rows(int rows) { return rows_at_once(rows); }
    static void make_scores(const Queries<T> &q, int rows, const Keys<T> &keys, float *scores) {
        with_constant<MOST_ROWS_AT_ONCE>(rows, [&](auto count) { qk<T, count>(q, keys, scores); });
    }
    static void weigh(const Weights<T> &p, int rows, const Values<T> &values, int dim, float *acc) {
        with_constant<MOST_ROWS_AT_ONCE>(rows, [&](auto count) { pv<T, count>(p, values, dim, acc); });
    }
};

} // namespace

// The two products of attention for a few rows, a row being one head of one token.
//
// Keys are walked as lanes: each block of the cache takes its tokens rounded up to GROUP lanes, so that a group of 16
// lanes is always one load from one block, whatever the block size. What a row computes depends only on its own query
// and on absolute lane numbers, never on the other rows of the tile.
#pragma once
#include <type_traits>

#include "kv.h"

namespace {

constexpr int GROUP = 16;
constexpr int VECTORS = GROUP / LANES;
// Rows and groups that are multiplied at once: as many sums as fit in the registers.
constexpr int ROWS_AT_ONCE = LANES == 16 ? 6 : 4;
constexpr int GROUPS_AT_ONCE = LANES == 16 ? 4 : 1;
constexpr int MAX_ROWS = 64;
constexpr int MAX_ROW_FLOATS = MAX_ROWS * 64;
constexpr int SPLIT = 256;  // lanes that are summed on their own
constexpr int SPLIT_GROUPS = SPLIT / GROUP;
constexpr int SCORE_STRIDE = SPLIT + GROUP;  // no power of two, or rows would push each other out of the cache

// How queries and probabilities are kept, to be multiplied with values stored as T.
template <typename T> struct Operand {
    using type = float;
    static constexpr bool paired = false;
};
#if defined(__AVX512BF16__)
template <> struct Operand<bf16> {
    using type = bf16;
    static constexpr bool paired = true;
};
#endif

// acc + row . values for stored value number `step` (a pair of them for bf16) of every lane.
inline vfloat multiply_add(vfloat acc, const float *row, int step, vfloat values, const float *) {
    return acc + row[step] * values;
}
inline vfloat multiply_add(vfloat acc, const float *row, int step, vuint values, const bf16 *) {
    acc += row[2 * step] * low_half(values);
    return acc + row[2 * step + 1] * high_half(values);
}
#if defined(__AVX512BF16__)
inline vfloat multiply_add(vfloat acc, const bf16 *row, int step, vuint values, const bf16 *) {
    int32_t pair;
    std::memcpy(&pair, row + 2 * step, sizeof pair);
    return (vfloat)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)values);
}
#endif

inline const float *stored(const float *p) { return p; }
inline const uint32_t *stored(const bf16 *p) { return reinterpret_cast<const uint32_t *>(p); }
template <typename T> constexpr int PER_STEP = sizeof(T) == 2 ? 2 : 1;

// Probabilities take the place of the scores they are made from, so their rows lie as far apart.
template <typename Value> constexpr int P_STRIDE = SCORE_STRIDE * int(sizeof(float) / sizeof(Value));
inline void store_narrow(float *p, vfloat v) { store(p, v); }
#if defined(__AVX512BF16__)
inline void store_narrow(bf16 *p, vfloat v) {
    const __m256bh narrowed = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &narrowed, sizeof narrowed);
}
#endif

// The hardware does not follow a block table, so each step of a loop asks for a line that will be read some groups
// later. Asking for all of them at once would stall the loop; asking for none leaves it waiting for memory.
struct Lines {
    const char *first;
    int64_t stride;
    void fetch(int index) const { __builtin_prefetch(first + index * stride, 0, 2); }
};

// Calls f with n as a constant, 1 <= n <= Most.
template <int Most, typename F> void with_constant(int n, F f) {
    if constexpr (Most > 1)
        if (n < Most) return with_constant<Most - 1>(n, f);
    f(std::integral_constant<int, Most>{});
}

// How many of `rows` to multiply at once.
inline int next_rows(int rows) {
    return rows >= 2 * ROWS_AT_ONCE ? ROWS_AT_ONCE : rows > ROWS_AT_ONCE ? (rows + 1) / 2 : rows;
}

// scores[r][g * 16 ...] = q[r] . K for R rows and G groups of lanes, each group having its keys and lines to fetch.
template <typename T, int R, int G>
void score_rows(const typename Operand<T>::type *q, int dim, const T *const *keys, int key_stride, const Lines *ahead,
                float *scores) {
    vfloat acc[R][G * VECTORS] = {};
    const int steps = dim / PER_STEP<T>;
    for (int step = 0; step < steps; step++) {
        if (ahead)
            for (int g = 0; g < G; g++) ahead[g].fetch(step);
#pragma GCC unroll 8
        for (int v = 0; v < G * VECTORS; v++) {
            const auto values = load(stored(keys[v / VECTORS]) + step * key_stride + v % VECTORS * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                acc[r][v] = multiply_add(acc[r][v], q + r * dim, step, values, (const T *)nullptr);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < G * VECTORS; v++) store(scores + r * SCORE_STRIDE + v * LANES, acc[r][v]);
}

template <typename T, int R>
void score(const typename Operand<T>::type *q, int dim, const T *const *keys, int count, int key_stride,
           const Lines *ahead, float *scores) {
    const auto run = [&](auto groups) {
        score_rows<T, R, groups>(q, dim, keys, key_stride, ahead, scores);
        keys += groups, scores += groups * GROUP, count -= groups;
        if (ahead) ahead += groups;
    };
    if constexpr (GROUPS_AT_ONCE > 2) {
        while (count >= 4) run(std::integral_constant<int, 4>{});
        if (count >= 2) run(std::integral_constant<int, 2>{});
    }
    while (count > 0) run(std::integral_constant<int, 1>{});
}

// The values of consecutive groups of lanes: `counts` of each are valid, the rest must not be read as numbers.
template <typename T> struct Values {
    const T *const *groups;
    const int *counts;
    const Lines *ahead;  // or null
    int count;
};

// acc[r][0:C * LANES] = p[r] . V for R rows and C vectors of dimensions, from dimension `first` on.
template <typename T, int R, int C>
void weigh_rows(const typename Operand<T>::type *p, const Values<T> &values, int dim, int first, float *acc) {
    using Value = typename Operand<T>::type;
    constexpr int LINE = 16;
    vfloat sum[R][C] = {};
    for (int group = 0; group < values.count; group++) {
        const auto *from = stored(values.groups[group]) + first;
        const Value *row = p + group * GROUP;
        const int steps = values.counts[group] / PER_STEP<T>;
        for (int step = 0; step < steps; step++, from += dim) {
            if (values.ahead)
                for (int c = 0; c < C * LANES; c += LINE) values.ahead[group].fetch((step * dim + first + c) / LINE);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const auto value = load(from + c * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    sum[r][c] = multiply_add(sum[r][c], row + r * P_STRIDE<Value>, step, value, (const T *)nullptr);
            }
        }
        if constexpr (PER_STEP<T> == 2) {
            // The other half of the last pair was never written for this sequence and could hold anything.
            if (values.counts[group] % 2)
                for (int c = 0; c < C; c++) {
                    const vuint value = load(from + c * LANES) & 0xffffu;
                    for (int r = 0; r < R; r++)
                        sum[r][c] = multiply_add(sum[r][c], row + r * P_STRIDE<Value>, steps, value, (const T *)nullptr);
                }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(acc + r * dim + c * LANES, sum[r][c]);
}

template <typename T, int R>
void weigh(const typename Operand<T>::type *p, const Values<T> &values, int dim, float *acc) {
    constexpr int C = LANES == 16 ? 4 : LANES == 8 ? 2 : 1;
    int first = 0;
    for (; first + C * LANES <= dim; first += C * LANES) weigh_rows<T, R, C>(p, values, dim, first, acc + first);
    if constexpr (C > 2)
        if (first + 2 * LANES <= dim) {
            weigh_rows<T, R, 2>(p, values, dim, first, acc + first);
            first += 2 * LANES;
        }
    if constexpr (C > 1)
        if (first < dim) weigh_rows<T, R, 1>(p, values, dim, first, acc + first);
}

} // namespace

// The two products of attention for a tile of rows, a row being one head of one token.
//
// Keys are walked as lanes: each block of the cache takes its tokens rounded up to GROUP lanes, so that a group of 16
// lanes is always one load from one block, whatever the block size. What a row computes depends only on its own query
// and on absolute lane numbers, never on the other rows of the tile.
#pragma once
#include "elementwise.h"

namespace {

constexpr int GROUP = 16;
constexpr int BLOCK = 64;   // lanes that go through one step of the online softmax
constexpr int GROUPS = BLOCK / GROUP;
constexpr int VECTORS = GROUP / LANES;
constexpr int MAX_ROWS = 64;
constexpr int MAX_ROW_FLOATS = MAX_ROWS * 64;

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

// The hardware does not follow a block table, so each step of a loop asks for the line that its twin in the next block of
// lanes will read. Asking for all of them at once would stall the loop; asking for none leaves it waiting for memory.
template <typename Line> inline void prefetch(const Line *line) { __builtin_prefetch(line, 0, 2); }

// scores[r][0:16] = q[r] . K[:, 0:16] for R rows and one group of lanes.
template <typename T, int R>
void score_rows(const typename Operand<T>::type *q, int dim, const T *keys, int key_stride, const T *next,
                float *scores) {
    vfloat acc[R][VECTORS] = {};
    const int steps = dim / PER_STEP<T>;
    const auto *from = stored(keys);
    for (int step = 0; step < steps; step++, from += key_stride) {
        if (next) prefetch(stored(next) + step * key_stride);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const auto values = load(from + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                acc[r][v] = multiply_add(acc[r][v], q + r * dim, step, values, (const T *)nullptr);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(scores + r * BLOCK + v * LANES, acc[r][v]);
}

template <typename T>
void score(const typename Operand<T>::type *q, int rows, int dim, const T *keys, int key_stride, const T *next,
           float *scores) {
    constexpr int R = LANES == 16 ? 8 : 4;
    while (rows > 0) {
        int done = rows < R ? rows < 4 ? rows : 4 : R;
        if (done == R)
            score_rows<T, R>(q, dim, keys, key_stride, next, scores);
        else if (done == 4)
            score_rows<T, 4>(q, dim, keys, key_stride, next, scores);
        else if (done == 3)
            score_rows<T, 3>(q, dim, keys, key_stride, next, scores);
        else if (done == 2)
            score_rows<T, 2>(q, dim, keys, key_stride, next, scores);
        else
            score_rows<T, 1>(q, dim, keys, key_stride, next, scores);
        next = nullptr;
        rows -= done;
        q += done * dim;
        scores += done * BLOCK;
    }
}

// The values of a block of lanes: `count` of each group are valid, the rest must not be read as numbers.
template <typename T> struct Values {
    const T *groups[GROUPS];
    const T *next[GROUPS];  // what the next block of lanes will read, or null
    int counts[GROUPS];
};

// acc[r][0:C * LANES] = acc * correction[r] + p[r] . V for R rows and C vectors of dimensions, from dimension `first` on.
template <typename T, int R, int C>
void weigh_rows(const typename Operand<T>::type *p, const Values<T> &values, int dim, int first,
                const float *correction, float *acc) {
    vfloat sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = load(acc + r * dim + c * LANES) * correction[r];
    for (int group = 0; group < GROUPS; group++) {
        const auto *from = stored(values.groups[group]) + first;
        const auto *row = p + group * GROUP;
        const int steps = values.counts[group] / PER_STEP<T>;
        const auto *next = values.next[group] ? stored(values.next[group]) + first : nullptr;
        for (int step = 0; step < steps; step++, from += dim) {
            if (next)
                for (int c = 0; c < C * LANES; c += 16) prefetch(next + step * dim + c);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const auto value = load(from + c * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    sum[r][c] = multiply_add(sum[r][c], row + r * BLOCK, step, value, (const T *)nullptr);
            }
        }
        if constexpr (PER_STEP<T> == 2) {
            // The other half of the last pair was never written for this sequence and could hold anything.
            if (values.counts[group] % 2)
                for (int c = 0; c < C; c++) {
                    const vuint value = load(from + c * LANES) & 0xffffu;
                    for (int r = 0; r < R; r++)
                        sum[r][c] = multiply_add(sum[r][c], row + r * BLOCK, steps, value, (const T *)nullptr);
                }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(acc + r * dim + c * LANES, sum[r][c]);
}

template <typename T, int R>
void weigh_dims(const typename Operand<T>::type *p, const Values<T> &values, int dim, const float *correction,
                float *acc) {
    constexpr int C = LANES == 16 ? 4 : LANES == 8 ? 2 : 1;
    int first = 0;
    for (; first + C * LANES <= dim; first += C * LANES)
        weigh_rows<T, R, C>(p, values, dim, first, correction, acc + first);
    if constexpr (C > 2)
        if (first + 2 * LANES <= dim) {
            weigh_rows<T, R, 2>(p, values, dim, first, correction, acc + first);
            first += 2 * LANES;
        }
    if constexpr (C > 1)
        if (first < dim) weigh_rows<T, R, 1>(p, values, dim, first, correction, acc + first);
}

template <typename T>
void weigh(const typename Operand<T>::type *p, int rows, Values<T> &values, int dim, const float *correction,
           float *acc) {
    while (rows > 0) {
        const int done = rows < 4 ? rows : 4;
        if (done == 4)
            weigh_dims<T, 4>(p, values, dim, correction, acc);
        else if (done == 3)
            weigh_dims<T, 3>(p, values, dim, correction, acc);
        else if (done == 2)
            weigh_dims<T, 2>(p, values, dim, correction, acc);
        else
            weigh_dims<T, 1>(p, values, dim, correction, acc);
        for (const T *&next : values.next) next = nullptr;
        rows -= done;
        p += done * BLOCK;
        correction += done;
        acc += done * dim;
    }
}

} // namespace

// Rows that are multiplied with what other rows make of their numbers, and the functions for it.
#pragma once
#include <cstring>

#include "simd.h"
#include "team.h"

namespace {

inline vfloat logistic(vfloat x) { return 1.0f / (exp2_(vmin(x * -1.44269504f, vfloat{} + 126.0f)) + 1.0f); }

// log(1 + exp(x)), which is x where that is all there is of it, as PyTorch has it.
inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

// Numbers as they are once they were stored.
template <typename T> inline vfloat stored(vfloat x) {
    T kept[LANES];
    store_narrow(kept, x);
    return load_wide(static_cast<const T *>(kept));
}

// x = f(x, y) for each of two rows' numbers.
template <typename X, typename Y, typename F>
inline __attribute__((always_inline)) void combine_rows(X *x, const Y *y, int64_t size, F f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_narrow(x + i, f(load_wide(static_cast<const X *>(x + i)), load_wide(y + i)));
    if (i == size) return;
    X left[LANES] = {};
    Y right[LANES] = {};
    std::memcpy(left, x + i, (size - i) * sizeof(X));
    std::memcpy(right, y + i, (size - i) * sizeof(Y));
    store_narrow(left, f(load_wide(static_cast<const X *>(left)), load_wide(static_cast<const Y *>(right))));
    std::memcpy(x + i, left, (size - i) * sizeof(X));
}

// Multiplies each row of x [rows, size] with the logistic function of its gates, which lie `stride` apart.
template <typename T>
void gate_rows(T *x, const T *gates, int64_t size, int64_t stride, const Range &rows) {
    for (int64_t row = rows.begin; row < rows.end; row++)
        combine_rows(x + row * size, gates + row * stride, size,
                     [](vfloat made, vfloat gate) { return made * stored<T>(logistic(gate)); });
}

} // namespace

// What becomes of the sums of a tile of a product.
#pragma once
#include "elementwise.h"

namespace {

// What is multiplied: rows of bfloat16 or, for int8 weights, of unsigned bytes with a scale each. In each tile the rows
// lie interleaved by steps, so that one cache line feeds a whole step: with one line for each row, the addresses alone
// cost a tenth of the speed.
struct Rows {
    const char *data;
    int64_t row_bytes;
    const float *scales = nullptr;  // null unless quantized
    const float *shifts = nullptr;  // null unless quantized from the lowest to the highest: see quantize_between
};

// The likeliest token of each row so far, as one thread has seen it.
struct Best {
    float *value;
    int64_t *index;
};

enum class Into {
    ROWS,       // out = sums
    RESIDUAL,   // out += sums
    GATED,      // out = activation(gate) * up, the two lying in the halves of a panel
    FLOATS,     // floats = sums
    BEST,       // only each row's highest sum and where it is are kept
};

// One row's sums under a panel, and half as many.
constexpr int WIDTH = PANEL / LANES;
using Wide = vfloat[WIDTH];
using Half = vfloat[WIDTH / 2];

// What the sums of a panel are scaled by and added to, inlined into each use: passing values through memory costs a tenth
// of the speed.
struct Settling {
    const Weight &weight;
    const int64_t first;    // the panel's first output

    inline __attribute__((always_inline)) void settle(const float *sums, const Rows &, int64_t, Wide &values) const {
        for (int i = 0; i < WIDTH; i++) values[i] = load(sums + i * LANES);
        add_bias(values);
    }

    inline __attribute__((always_inline)) void settle(const int32_t *sums, const Rows &x, int64_t row,
                                                      Wide &values) const {
        const float scale = x.scales[row];
        for (int i = 0; i < WIDTH; i++) {
            values[i] = to_float(load(sums + i * LANES));
            if (x.shifts) values[i] += to_float(load(weight.starts + first + i * LANES)) * x.shifts[row];
            values[i] *= load(weight.scales + first + i * LANES) * scale;
        }
        add_bias(values);
    }

  private:
    inline __attribute__((always_inline)) void add_bias(Wide &values) const {
        if (!weight.bias) return;
        for (int i = 0; i < WIDTH; i++) values[i] += load(weight.bias + first + i * LANES);
    }
};

template <typename T> struct Sink {
    Into into;
    T *out = nullptr;
    float *floats = nullptr;
    int64_t stride = 0;     // elements of out or floats
    Best best = {};

    // Takes the sums of rows [row, row + rows) under a panel of a weight, after scaling and bias.
    template <typename Sum>
    void take(const Weight &weight, int64_t panel, int64_t row, int rows, const Rows &x, const Sum *sums) const {
        const bool gated = into == Into::GATED;
        const int64_t first = panel * (gated ? PANEL / 2 : PANEL), left = weight.outs / (gated ? 2 : 1) - first;
        const int most = gated ? PANEL / 2 : PANEL, count = left < most ? int(left) : most;
        const Settling settling{weight, panel * PANEL};
        const auto each_row = [&](auto use) __attribute__((always_inline)) {
            for (int64_t r = row; r < row + rows; r++, sums += PANEL) {
                Wide values;
                settling.settle(sums, x, r, values);
                use(r, values);
            }
        };
        const auto at = [&](auto *to, int64_t r) { return to + r * stride + first; };
        switch (into) {
        case Into::ROWS: return each_row([&](int64_t r, Wide &values) { store(at(out, r), values, count); });
        case Into::RESIDUAL: return each_row([&](int64_t r, Wide &values) { add(at(out, r), values, count); });
        case Into::GATED:
            return with_activation(weight.activation, [&](auto constant) __attribute__((always_inline)) {
                each_row([&](int64_t r, Wide &values) { gate<constant.value>(at(out, r), values, count); });
            });
        case Into::FLOATS: return each_row([&](int64_t r, Wide &values) { store(at(floats, r), values, count); });
        case Into::BEST: return each_row([&](int64_t r, Wide &values) { keep_best(r, first, values, count); });
        }
    }

  private:
    // Writes the first `count` of the values.
    template <typename To, int N> static void store(To *to, const vfloat (&values)[N], int count) {
        if (count == N * LANES) {
            for (int i = 0; i < N; i++) store_narrow(to + i * LANES, values[i]);
        } else {
            To all[N * LANES];
            for (int i = 0; i < N; i++) store_narrow(all + i * LANES, values[i]);
            std::memcpy(to, all, sizeof(To) * count);
        }
    }

    static void add(T *to, Wide &values, int count) {
        T some[PANEL];
        const T *from = to;
        if (count < PANEL) {
            std::memset(some, 0, sizeof some);
            std::memcpy(some, to, sizeof(T) * count);
            from = some;
        }
        for (int i = 0; i < WIDTH; i++) values[i] += load_wide(from + i * LANES);
        store(to, values, count);
    }

    template <Activation A> static void gate(T *to, const Wide &values, int count) {
        Half gated;
        for (int i = 0; i < WIDTH / 2; i++) gated[i] = activated<A>(values[i]) * values[i + WIDTH / 2];
        store(to, gated, count);
    }

    // Whether anything is above `high`, or no number. What lies past the outputs is zero, which may raise a false alarm.
    static bool any_above(const Wide &values, float high) {
        vint above = {};
        for (int i = 0; i < WIDTH; i++) above |= ~(values[i] <= high);
        return any(above);
    }

    // Of equal sums the first counts, and a sum that is no number above all others, so that it is noticed.
    void keep_best(int64_t row, int64_t first, const Wide &values, int count) const {
        float high = best.value[row];
        if (!any_above(values, high) || high != high) return;
        float all[PANEL];
        store(all, values, PANEL);
        for (int i = 0; i < count; i++)
            if (!(all[i] <= high)) {
                best.value[row] = high = all[i];
                best.index[row] = first + i;
                if (high != high) return;
            }
    }
};

} // namespace

// Epilogues of products: what is done with the sums of a tile while they are in registers.
#pragma once
#include <cmath>

#include "elementwise.h"

namespace {

// Packed activations: rows of bfloat16 or, for quantized weights, of unsigned bytes with a scale each. How those of a
// tile lie is RowTile's (interleave.h): so that one cache line feeds a whole step, since with one line for each row the
// addresses alone cost a tenth of the speed, or as AMX reads them.
struct Rows {
    const char *data;
    int64_t row_bytes;
    const float *scales = nullptr;  // null unless quantized
    const float *zero_offsets = nullptr;  // null unless quantized asymmetrically: see quantize_asymmetric
    bool is_plain = false;  // one after the other, as they came: see reads_plain_rows
};

// The `most` highest sums of each row so far and their outputs, the highest first, as one thread has seen them. Of a row
// that has a bit for each output in `allowed`, only outputs whose bit is set count, and only the highest is kept.
struct Highest {
    float *value;
    int64_t *index;
    int64_t most = 1;
    const uint32_t *const *allowed = nullptr;

    const uint32_t *of(int64_t row) const { return allowed ? allowed[row] : nullptr; }

    // How many of a row's sums are kept.
    int64_t count(int64_t row) const { return of(row) ? 1 : most; }

    // Begins with nothing: values below all sums.
    void clear(int64_t rows) const {
        for (int64_t i = 0; i < rows * most; i++) value[i] = -__builtin_inff(), index[i] = 0;
    }

    // Takes in a sum, if it is one of the row's highest. Of equal sums the first output's counts, and a sum that is no
    // number above all others, so that it is noticed.
    void insert(int64_t row, float sum, int64_t output) const {
        float *const values = value + row * most;
        int64_t *const outputs = index + row * most;
        if (sum != sum) {
            values[0] = sum, outputs[0] = output;
            return;
        }
        const auto beats = [&](int64_t place) {
            return sum > values[place] || (sum == values[place] && output < outputs[place]);
        };
        int64_t place = count(row) - 1;
        if (!beats(place)) return;
        for (; place > 0 && beats(place - 1); place--)
            values[place] = values[place - 1], outputs[place] = outputs[place - 1];
        values[place] = sum, outputs[place] = output;
    }

    // A bit for each output of the panel that begins with this one.
    uint32_t bits(int64_t row, int64_t first) const {
        static_assert(PANEL == 32);
        const uint32_t *words = of(row);
        return words ? words[first / PANEL] : ~0u;
    }
};

enum class EpilogueMode {
    STORE,          // out = sums
    ADD,            // out += sums
    GATE,           // out = activation(gate) * up, the two lying in the halves of a panel
    ACTIVATE,       // out = activation(sums)
    STORE_FLOAT32,  // floats = sums
    HIGHEST,        // only each row's highest sums and their outputs are kept
};

// One row's sums under a panel, and half as many.
constexpr int WIDTH = PANEL / LANES;
using Wide = vfloat[WIDTH];
using Half = vfloat[WIDTH / 2];

// Makes floats of the sums of a panel: scales, zero points and bias. Inlined into each use: passing values through memory
// costs a tenth of the speed.
struct Dequantizer {
    const Weight &weight;
    const int64_t first;    // the panel's first output

    inline __attribute__((always_inline)) void dequantize(const float *sums, const Rows &, int64_t,
                                                          Wide &values) const {
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) values[i] = load(sums + i * LANES);
        add_bias(values);
    }

    inline __attribute__((always_inline)) void dequantize(const int32_t *sums, const Rows &x, int64_t row,
                                                          Wide &values) const {
        const float scale = x.scales[row];
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) {
            values[i] = to_float(load(sums + i * LANES));
            if (x.zero_offsets)
                values[i] += to_float(load(weight.compensation + first + i * LANES)) * x.zero_offsets[row];
            values[i] *= load(weight.scales + first + i * LANES) * scale;
        }
        add_bias(values);
    }

  private:
    inline __attribute__((always_inline)) void add_bias(Wide &values) const {
        if (!weight.bias) return;
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) values[i] += load(weight.bias + first + i * LANES);
    }
};

template <typename T> struct Epilogue {
    using Type = T;
    EpilogueMode mode;
    T *out = nullptr;
    float *floats = nullptr;
    int64_t stride = 0;     // elements of out or floats
    Highest highest = {};

    // Uses the sums of rows [row, row + rows) under a panel of a weight, after scaling and bias.
    template <typename Sum>
    void apply(const Weight &weight, int64_t panel, int64_t row, int rows, const Rows &x, const Sum *sums) const {
        const bool gated = mode == EpilogueMode::GATE;
        const int64_t first = panel * (gated ? PANEL / 2 : PANEL), left = weight.out_features / (gated ? 2 : 1) - first;
        const int most = gated ? PANEL / 2 : PANEL, count = left < most ? int(left) : most;
        const Dequantizer dequantizer{weight, panel * PANEL};
        const auto each_row = [&](auto use) __attribute__((always_inline)) {
            for (int64_t r = row; r < row + rows; r++, sums += PANEL) {
                Wide values;
                dequantizer.dequantize(sums, x, r, values);
                use(r, values);
            }
        };
        const auto at = [&](auto *to, int64_t r) { return to + r * stride + first; };
        using Mode = EpilogueMode;
        switch (mode) {
        case Mode::STORE: return each_row([&](int64_t r, Wide &values) { store(at(out, r), values, count); });
        case Mode::ADD: return each_row([&](int64_t r, Wide &values) { add(at(out, r), values, count); });
        case Mode::GATE:
            return with_activation(weight.activation, [&](auto constant) __attribute__((always_inline)) {
                each_row([&](int64_t r, Wide &values) { gate<constant.value>(at(out, r), values, count); });
            });
        case Mode::ACTIVATE:
            return each_row([&](int64_t r, Wide &values) {
                activate(values, weight.activation);
                store(at(out, r), values, count);
            });
        case Mode::STORE_FLOAT32:
            return each_row([&](int64_t r, Wide &values) { store(at(floats, r), values, count); });
        case Mode::HIGHEST: return each_row([&](int64_t r, Wide &values) { update_highest(r, first, values, count); });
        }
    }

  private:
    // Writes the first `count` of the values.
    template <typename To, int N> static void store(To *to, const vfloat (&values)[N], int count) {
        if (count == N * LANES) {
#pragma GCC unroll 8
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
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) values[i] += load_wide(from + i * LANES);
        store(to, values, count);
    }

    // By a switch of its own, since one around all rows would be compiled once more for each activation.
    static NOINLINE void activate(Wide &values, int32_t activation) {
        with_activation(activation, [&](auto constant) {
            for (vfloat &value : values) value = activated<constant.value>(value);
        });
    }

    template <Activation A> static void gate(T *to, const Wide &values, int count) {
        Half made;
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2; i++) made[i] = gated<A>(values[i], values[i + WIDTH / 2]);
        store(to, made, count);
    }

    // A bit for each value that is above `high` or NaN. Padding past the outputs is zero and may be above it as well.
    static uint32_t above(const Wide &values, float high) {
        uint32_t bits = 0;
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH; i++) bits |= lane_bits(~(values[i] <= high)) << (i * LANES);
        return bits;
    }

    void update_highest(int64_t row, int64_t first, const Wide &values, int count) const {
        const int64_t start = row * highest.most, last = start + highest.count(row) - 1;
        const float best = highest.value[start], high = highest.value[last];
        if (best != best) return;
        // A thread does not take all panels in their order; of equal sums the first output's counts.
        const float bar = first < highest.index[last] ? std::nextafter(high, -__builtin_inff()) : high;
        uint32_t some = above(values, bar);
        if (!some) return;
        some &= highest.bits(row, first) & ~0u >> (PANEL - count);
        if (!some) return;
        float all[PANEL];
        store(all, values, PANEL);
        for (; some; some &= some - 1) {
            const int i = __builtin_ctz(some);
            highest.insert(row, all[i], first + i);
        }
    }
};

} // namespace

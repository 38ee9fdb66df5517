// What becomes of the sums of a tile of a product.
#pragma once
#include "elementwise.h"

namespace {

// The likeliest token of each row so far, as one thread has seen it.
struct Best {
    float *value;
    int64_t *index;
};

enum class Into {
    ROWS,       // out = sums
    RESIDUAL,   // out += sums
    GATED,      // out = silu(gate) * up, the two lying in the halves of a panel
    FLOATS,     // floats = sums
    BEST,       // only each row's highest sum and where it is are kept
};

template <typename T> struct Sink {
    Into into;
    T *out = nullptr;
    float *floats = nullptr;
    int64_t stride = 0;     // elements of out or floats
    Best best = {};

    // Takes the sums of rows [row, row + rows) under a panel of a weight, after scaling and bias.
    template <typename Sum>
    void take(const Weight &weight, int64_t panel, int64_t row, int rows, const float *scales, Sum *sums) const {
        const bool gated = into == Into::GATED;
        const int64_t first = panel * (gated ? PANEL / 2 : PANEL), left = weight.outs / (gated ? 2 : 1) - first;
        const int most = gated ? PANEL / 2 : PANEL, count = left < most ? int(left) : most;
        for (int r = 0; r < rows; r++) {
            alignas(64) float values[PANEL];
            settle(weight, panel, sums + r * PANEL, scales ? scales[row + r] : 1.0f, values);
            switch (into) {
            case Into::ROWS: store(out + (row + r) * stride + first, values, count); break;
            case Into::RESIDUAL: add(out + (row + r) * stride + first, values, count); break;
            case Into::GATED: gate(out + (row + r) * stride + first, values, count); break;
            case Into::FLOATS: std::memcpy(floats + (row + r) * stride + first, values, sizeof(float) * count); break;
            case Into::BEST: keep_best(row + r, first, values, count); break;
            }
        }
    }

  private:
    static void settle(const Weight &weight, int64_t panel, const float *sums, float, float *values) {
        std::memcpy(values, sums, sizeof(float) * PANEL);
        add_bias(weight, panel, values);
    }

    // Quantized inputs are offset by 128 to be unsigned, which adds 128 times the output's weights to each sum.
    static void settle(const Weight &weight, int64_t panel, const int32_t *sums, float scale, float *values) {
        const float *scales = weight.scales + panel * PANEL;
        const int32_t *offsets = weight.offsets + panel * PANEL;
#pragma omp simd
        for (int i = 0; i < PANEL; i++) values[i] = float(sums[i] - offsets[i]) * (scale * scales[i]);
        add_bias(weight, panel, values);
    }

    static void add_bias(const Weight &weight, int64_t panel, float *values) {
        if (!weight.bias) return;
        const float *bias = weight.bias + panel * PANEL;
#pragma omp simd
        for (int i = 0; i < PANEL; i++) values[i] += bias[i];
    }

    static void store(T *to, const float *values, int count) { narrow_row(values, to, count); }

    static void add(T *to, float *values, int count) {
        for (int i = 0; i < count; i++) values[i] += widen(to[i]);
        narrow_row(values, to, count);
    }

    static void gate(T *to, float *values, int count) {
#pragma omp simd
        for (int i = 0; i < PANEL / 2; i++)
            values[i] = values[i] / (1.0f + exp_(-values[i])) * values[i + PANEL / 2];
        narrow_row(values, to, count);
    }

    // Whether anything is above `high`, or no number. What lies past the outputs is zero, which may raise a false alarm.
    static bool any_above(const float *values, float high) {
#if defined(__AVX512F__)
        const __m512 limit = _mm512_set1_ps(high);
        return _mm512_cmp_ps_mask(_mm512_loadu_ps(values), limit, _CMP_NLE_UQ) |
               _mm512_cmp_ps_mask(_mm512_loadu_ps(values + 16), limit, _CMP_NLE_UQ);
#else
        bool above = false;
#pragma omp simd reduction(| : above)
        for (int i = 0; i < PANEL; i++) above |= !(values[i] <= high);
        return above;
#endif
    }

    // Of equal sums the first counts, and a sum that is no number above all others, so that it is noticed.
    void keep_best(int64_t row, int64_t first, const float *values, int count) const {
        float high = best.value[row];
        if (!any_above(values, high) || high != high) return;
        for (int i = 0; i < count; i++)
            if (!(values[i] <= high)) {
                best.value[row] = high = values[i];
                best.index[row] = first + i;
                if (high != high) return;
            }
    }
};

} // namespace

// What an encoder does with rows beside multiplying them: layer norms, activations, and sinks of products.
#pragma once
#include "interleave.h"
#include "sink.h"

namespace {

// Calls use(i, values) for each vector of a normalized row; `dim` is a multiple of the lanes.
template <typename T, typename Use>
inline __attribute__((always_inline)) void layer_norm(const T *x, const LayerNorm &norm, int64_t dim, float eps,
                                                      Use use) {
    vfloat sum = {}, squares = {};
    for (int64_t i = 0; i < dim; i += LANES) sum += load_wide(x + i);
    const float mean = sum_of(sum) / float(dim);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vfloat apart = load_wide(x + i) - mean;
        squares += apart * apart;
    }
    const float factor = 1.0f / __builtin_sqrtf(sum_of(squares) / float(dim) + eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vfloat value = (load_wide(x + i) - mean) * factor * load(norm.weight + i);
        use(i, norm.bias ? value + load(norm.bias + i) : value);
    }
}

// x * Phi(x), by a polynomial for Phi that was fitted to 4.5 standard deviations: off by less than 3e-6 within 3 of
// them and 3e-5 everywhere, where bfloat16 rounds by as much from 0.01 on.
inline vfloat gelu(vfloat x) {
    constexpr float END = 4.5f;
    const vfloat c = smaller(larger(x, vfloat{} - END), vfloat{} + END);
    const vfloat v = c * c * (2 / (END * END)) - 1.0f;
    vfloat p = v * 1.638684533e-03f - 4.518324121e-03f;
    p = p * v + 6.158428278e-03f;
    p = p * v - 1.082649845e-02f;
    p = p * v + 2.231408169e-02f;
    p = p * v - 3.782965978e-02f;
    p = p * v + 5.674414891e-02f;
    p = p * v - 8.026894848e-02f;
    p = p * v + 1.093835046e-01f;
    p = p * v - 1.543845644e-01f;
    p = p * v + 3.138101753e-01f;
    return x * (c * p * 0.5f + 0.5f);
}

// 0.5 * (1 + tanh(u)) is the logistic function of 2 * u.
inline vfloat gelu_tanh(vfloat x) {
    const vfloat twice = (x + x * x * x * 0.044715f) * 1.5957691216f;
    return x / (exp2_(smaller(twice * -1.44269504f, vfloat{} + 126.0f)) + 1.0f);
}

template <Activation A> inline vfloat activated(vfloat x) {
    if constexpr (A == GELU) return gelu(x);
    if constexpr (A == GELU_TANH) return gelu_tanh(x);
    if constexpr (A == RELU) return larger(x, vfloat{});
    return silu(x);
}

// Activates sums, and of a gated weight multiplies with the upper half's. Into rows, or, since bfloat16 needs nothing
// more, laid out at once as the next product reads them.
template <typename T> struct ActivatingSink {
    int32_t activation;
    T *out;             // rows, null if laid out
    Rows next;
    int64_t stride;

    template <typename Sum>
    void take(const Weight &weight, int64_t panel, int64_t row, int rows, const Rows &x, const Sum *sums) const {
        switch (activation) {
        case GELU: return take_by<GELU>(weight, panel, row, rows, x, sums);
        case GELU_TANH: return take_by<GELU_TANH>(weight, panel, row, rows, x, sums);
        case RELU: return take_by<RELU>(weight, panel, row, rows, x, sums);
        default: return take_by<SILU>(weight, panel, row, rows, x, sums);
        }
    }

  private:
    template <Activation A, typename Sum>
    void take_by(const Weight &weight, int64_t panel, int64_t row, int rows, const Rows &x, const Sum *sums) const {
        const Settling settling{weight, panel * PANEL};
        const int width = weight.gated ? PANEL / 2 : PANEL;
        const int64_t first = panel * width, left = stride - first;
        const int count = left < width ? int(left) : width;
        alignas(64) T tile[TILE_ROWS][PANEL];
        for (int r = 0; r < rows; r++) {
            Wide values;
            settling.settle(sums + r * PANEL, x, row + r, values);
            for (int i = 0; i < WIDTH; i++) {
                if (weight.gated && i == WIDTH / 2) break;
                vfloat value = activated<A>(values[i]);
                if (weight.gated) value *= values[i + WIDTH / 2];
                store_narrow(tile[r] + i * LANES, value);
            }
            if (out) std::memcpy(out + (row + r) * stride + first, tile[r], sizeof(T) * count);
        }
        if (out) return;
        constexpr int PER_WORD = 4 / sizeof(T);
        auto *to = reinterpret_cast<uint32_t *>(const_cast<char *>(next.data) + row * next.row_bytes);
        interleave(reinterpret_cast<const uint32_t *>(tile), PANEL / PER_WORD, rows, count / PER_WORD,
                   to + first / PER_WORD * rows);
    }
};

} // namespace

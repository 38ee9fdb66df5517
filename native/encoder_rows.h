// What an encoder does with rows beside multiplying them: layer norms, and the epilogue of its gated products.
#pragma once
#include "interleave.h"
#include "epilogue.h"

namespace {

// Calls use(i, values) for each vector of a normalized row; `dim` is a multiple of the lanes. An RMS norm leaves the mean
// where it is.
template <typename T, typename Use>
inline __attribute__((always_inline)) void layer_norm(const T *x, const LayerNorm &norm, bool rms, int64_t dim,
                                                      float eps, Use use) {
    vfloat sum = {}, squares = {};
    for (int64_t i = 0; i < dim; i += LANES) sum += load_wide(x + i);
    const float mean = rms ? 0.0f : reduce_add(sum) / float(dim);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vfloat apart = load_wide(x + i) - mean;
        squares += apart * apart;
    }
    const float factor = 1.0f / __builtin_sqrtf(reduce_add(squares) / float(dim) + eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vfloat value = (load_wide(x + i) - mean) * factor * load(norm.weight + i);
        use(i, norm.bias ? value + load(norm.bias + i) : value);
    }
}

// Activates sums, and of a gated weight multiplies them with the upper half's. Stores rows or, since bfloat16 needs no
// quantization, packs them at once as the next product reads them.
template <typename T> struct ActivationEpilogue {
    using Type = T;
    int32_t activation;
    T *out;             // rows, null if packed
    Rows next;
    int64_t stride;

    template <typename Sum>
    NOINLINE void apply(const Weight &weight, int64_t panel, int64_t row, int rows, const Rows &x,
                        const Sum *sums) const {
        with_activation(activation, [&](auto constant) {
            apply_as<constant.value>(weight, panel, row, rows, x, sums);
        });
    }

  private:
    template <Activation A, typename Sum>
    void apply_as(const Weight &weight, int64_t panel, int64_t row, int rows, const Rows &x, const Sum *sums) const {
        const Dequantizer dequantizer{weight, panel * PANEL};
        const int width = weight.gated ? PANEL / 2 : PANEL;
        const int64_t first = panel * width, left = stride - first;
        const int count = left < width ? int(left) : width;
        alignas(64) T tile[TILE_ROWS][PANEL];
        for (int r = 0; r < rows; r++) {
            Wide values;
            dequantizer.dequantize(sums + r * PANEL, x, row + r, values);
#pragma GCC unroll 8
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
        const RowTile laid{to, rows, stride / PER_WORD, next.row_bytes / 4};
        laid.put(reinterpret_cast<const uint32_t *>(tile), PANEL / PER_WORD, first / PER_WORD, count / PER_WORD);
    }
};

} // namespace

// Weights re-laid for gemm.h, and read back; activations quantized for it.
#pragma once
#include "elementwise.h"
#include "gemm.h"

namespace {

// The output of a weight that lies at place `i` of a panel, or -1 if the panel is wider than the weight.
inline int64_t output_at(const Weight &weight, int64_t panel, int64_t i) {
    if (!weight.gated) return panel * PANEL + i < weight.outs ? panel * PANEL + i : -1;
    const int64_t half = weight.outs / 2, unit = panel * (PANEL / 2) + i % (PANEL / 2);
    return unit < half ? unit + i / (PANEL / 2) * half : -1;
}

// One output's weights as whole numbers from -127 to 127.
template <typename T>
void pack_int8(const T *row, const Weight &weight, int64_t panel, int64_t i) {
    auto *to = static_cast<int8_t *>(const_cast<void *>(weight.packed)) + panel * weight.steps() * 4 * PANEL + 4 * i;
    const float highest = largest_size(row, weight.ins), inverse = highest > 0 ? 127.0f / highest : 0.0f;
    int32_t sum = 0;
    for (int64_t k = 0; k < weight.ins; k++) {
        const auto value = int8_t(whole(widen(row[k]) * inverse));
        to[k / 4 * 4 * PANEL + k % 4] = value;
        sum += value;
    }
    const_cast<float *>(weight.scales)[panel * PANEL + i] = highest / 127.0f;
    const_cast<int32_t *>(weight.starts)[panel * PANEL + i] = -128 * sum;
}

inline void pack_bf16(const bf16 *row, const Weight &weight, int64_t panel, int64_t i) {
    auto *to = static_cast<bf16 *>(const_cast<void *>(weight.packed)) + panel * weight.steps() * 2 * PANEL + 2 * i;
    for (int64_t k = 0; k < weight.ins; k++) to[k / 2 * 2 * PANEL + k % 2] = row[k];
}

// Packs into zeroed memory.
template <typename T> void pack(const T *weight, const T *bias, const Weight &packed) {
#pragma omp parallel for schedule(static) if (packed.outs * packed.ins >= PARALLEL_PRODUCTS)
    for (int64_t panel = 0; panel < packed.panels(); panel++)
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = output_at(packed, panel, i);
            if (output < 0) continue;
            if (bias) const_cast<float *>(packed.bias)[panel * PANEL + i] = widen(bias[output]);
            if (packed.int8)
                pack_int8(weight + output * packed.ins, packed, panel, i);
            else if constexpr (sizeof(T) == sizeof(bf16))
                pack_bf16(weight + output * packed.ins, packed, panel, i);
        }
}

// One output's weights, read back. The weight is not gated.
template <typename T> void unpack(const Weight &weight, int64_t output, T *out) {
    const int64_t base = output / PANEL * weight.steps() * PANEL, i = output % PANEL;
    if (weight.int8) {
        const int8_t *from = static_cast<const int8_t *>(weight.packed) + 4 * (base + i);
        for (int64_t k = 0; k < weight.ins; k++)
            out[k] = narrow<T>(float(from[k / 4 * 4 * PANEL + k % 4]) * weight.scales[output]);
    } else {
        const bf16 *from = static_cast<const bf16 *>(weight.packed) + 2 * (base + i);
        for (int64_t k = 0; k < weight.ins; k++) out[k] = narrow<T>(widen(from[k / 2 * 2 * PANEL + k % 2]));
    }
}

// Bytes of a row of `width` quantized activations: a whole number of steps.
inline int64_t quantized_size(int64_t width) { return (width + 3) / 4 * 4; }

// A row as whole numbers from 1 to 255, 128 standing for zero; returns what one unit is worth.
template <typename T> float quantize_row(const T *x, int64_t width, uint8_t *out) {
    const float highest = largest_size(x, width), inverse = highest > 0 ? 127.0f / highest : 0.0f;
    int64_t i = 0;
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == sizeof(bf16))
        for (; i + 16 <= width; i += 16) {
            const __m512 scaled = _mm512_mul_ps(load_wide(x + i, 0xffff), _mm512_set1_ps(inverse));
            const __m512i units = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), _mm512_set1_epi32(128));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), _mm512_cvtepi32_epi8(units));
        }
#endif
#pragma omp simd
    for (int64_t k = i; k < width; k++) out[k] = uint8_t(int32_t(whole(widen(x[k]) * inverse)) + 128);
    for (int64_t i = width; i < quantized_size(width); i++) out[i] = 128;
    return highest / 127.0f;
}

// A row as whole numbers from 0 to 255, its lowest to its highest, or zero if that is beyond: steps are finer where
// numbers lie mostly to one side, as they do behind GELU and in what few inputs of a layer norm's weights stick out.
// Returns what one unit is worth. As sums begin 128 units of each weight too low, those of a row whose zero is `zero`
// are too high by (128 - zero) weights: `shift` times where they begin is to be added.
template <typename T> float quantize_between(const T *x, int64_t width, uint8_t *out, float &shift) {
    vfloat low = {}, high = {}, broken = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vfloat value = load_wide(x + i);
        low = smaller(value, low), high = larger(value, high);
        broken += value * 0.0f;
    }
    float lowest = -largest_of(-low), highest = largest_of(high), fault = sum_of(broken);
    for (; i < width; i++) {
        const float value = widen(x[i]);
        lowest = value < lowest ? value : lowest, highest = value > highest ? value : highest;
        fault += value * 0.0f;
    }
    const float span = highest - lowest, inverse = span > 0 ? 254.0f / span : 0.0f, zero = whole(-lowest * inverse);
    i = 0;
#if defined(__AVX512F__)
    for (; i + LANES <= width; i += LANES) {
        const __m512i units = _mm512_maskz_cvtps_epi32(0xffff, (__m512)(load_wide(x + i) * inverse + zero));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), _mm512_maskz_cvtepi32_epi8(0xffff, units));
    }
#endif
#pragma omp simd
    for (int64_t k = i; k < width; k++) out[k] = uint8_t(int32_t(whole(widen(x[k]) * inverse + zero)));
    for (int64_t k = width; k < quantized_size(width); k++) out[k] = 0;
    shift = (zero - 128.0f) / 128.0f;
    return span / 254.0f + fault;
}

} // namespace

// Rows of activations rounded to unsigned bytes, to be multiplied with weights of 8 bits or fewer.
#pragma once
#include "elementwise.h"

namespace {

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

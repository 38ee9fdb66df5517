// Rows of activations quantized to unsigned bytes, for products with weights of 8 bits or fewer.
#pragma once
#include "elementwise.h"

namespace {

// Bytes of a row of `width` quantized activations: a whole number of steps.
inline int64_t quantized_size(int64_t width) { return (width + 3) / 4 * 4; }

// A row as integers from 1 to 255 with a zero point of 128; returns the scale. Bytes behind it are zero and not 128, as
// compensations do not count the weights there.
template <typename T> NOINLINE float quantize_symmetric(const T *x, int64_t width, uint8_t *out) {
    const float highest = max_abs(x, width), inverse = highest > 0 ? 127.0f / highest : 0.0f;
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
    for (int64_t k = i; k < width; k++) out[k] = uint8_t(int32_t(nearest_integer(widen(x[k]) * inverse)) + 128);
    for (int64_t i = width; i < quantized_size(width); i++) out[i] = 0;
    return highest / 127.0f;
}

// A row as integers from 0 to 255 with a zero point of its own: from its lowest to its highest number, or zero if that
// is beyond. Steps are finer where numbers lie mostly to one side, as they do behind GELU and in what few inputs of a
// layer norm's weights stick out. Returns the scale. As sums start from a compensation for a zero point of 128,
// `zero_offset` times that compensation is to be added.
template <typename T> NOINLINE float quantize_asymmetric(const T *x, int64_t width, uint8_t *out, float &zero_offset) {
    vfloat low = {}, high = {}, broken = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vfloat value = load_wide(x + i);
        low = vmin(value, low), high = vmax(value, high);
        broken += value * 0.0f;
    }
    float lowest = -reduce_max(-low), highest = reduce_max(high), fault = reduce_add(broken);
    for (; i < width; i++) {
        const float value = widen(x[i]);
        lowest = value < lowest ? value : lowest, highest = value > highest ? value : highest;
        fault += value * 0.0f;
    }
    const float span = highest - lowest, inverse = span > 0 ? 254.0f / span : 0.0f;
    const float zero = nearest_integer(-lowest * inverse);
    i = 0;
#if defined(__AVX512F__)
    for (; i + LANES <= width; i += LANES) {
        const __m512i units = _mm512_maskz_cvtps_epi32(0xffff, (__m512)(load_wide(x + i) * inverse + zero));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), _mm512_maskz_cvtepi32_epi8(0xffff, units));
    }
#endif
#pragma omp simd
    for (int64_t k = i; k < width; k++) out[k] = uint8_t(int32_t(nearest_integer(widen(x[k]) * inverse + zero)));
    for (int64_t k = width; k < quantized_size(width); k++) out[k] = 0;
    zero_offset = (zero - 128.0f) / 128.0f;
    return span / 254.0f + fault;
}

} // namespace

// Numbers and vectors of one instruction set. Everything is in an unnamed namespace: the objects of the instruction
// sets must not share a single inline function, or the linker would keep one of them for all.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));

struct bf16 {
    uint16_t bits;
};

template <typename To, typename From> inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

template <typename T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could carry the payload of a NaN over into infinity or zero.
    return bf16{uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
}

inline vfloat load(const float *p) {
    vfloat v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vuint load(const uint32_t *p) {
    vuint v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float *p, vfloat v) { std::memcpy(p, &v, sizeof v); }
inline vfloat low_half(vuint v) { return (vfloat)(v << 16); }
inline vfloat high_half(vuint v) { return (vfloat)(v & 0xffff0000u); }

// Combines the lanes of v pairwise, then with `start`.
template <typename Combine> inline float across(vfloat v, Combine combine, float start) {
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
    return combine(lanes[0], start);
}

// exp, good to 2e-7, exactly 1 at 0 and exactly 0 below -87.3; written so that loops over it vectorize.
inline float exp_(float x) {
    constexpr float magic = 12582912.0f;
    float c = x < -87.3f ? -87.3f : x;
    c = c > 88.3f ? 88.3f : c;
    const float shifted = c * 1.44269504f + magic;
    const float n = shifted - magic;
    const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float y = p * (r * r) + r + 1.0f;
    const float scaled = bit_cast<float>(bit_cast<uint32_t>(y) + (bit_cast<uint32_t>(shifted) << 23));
    return x < -87.3f ? 0.0f : scaled;
}

} // namespace

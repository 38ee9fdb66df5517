// Numbers and vectors of one instruction set. Everything is in an unnamed namespace: of an inline function that the
// objects of the instruction sets shared, the linker would keep one for all. What they do share is the C++ library's
// templates (std::vector); setup.py has it keep the copy that runs on every processor.
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
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalves __attribute__((vector_size(4 * LANES)));
typedef int16_t vshort __attribute__((vector_size(4 * LANES)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
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

// Below 2^-14 its numbers are 2^-24 apart.
inline float widen(f16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    const uint32_t bits = rest < 0x7c00 ? bit_cast<uint32_t>(bit_cast<float>(rest << 13) * 0x1p112f) : 0x7f800000 | rest << 13;
    return bit_cast<float>(sign | bits);
}

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
inline vint load(const int32_t *p) { return (vint)load(reinterpret_cast<const uint32_t *>(p)); }
inline void store(float *p, vfloat v) { std::memcpy(p, &v, sizeof v); }
inline void store(int32_t *p, vint v) { std::memcpy(p, &v, sizeof v); }
inline vfloat to_float(vfloat v) { return v; }
inline vfloat to_float(vint v) { return __builtin_convertvector(v, vfloat); }
inline vint lane_numbers() {
    vint numbers{};
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}
inline vfloat low_half(vuint v) { return (vfloat)(v << 16); }
inline vfloat high_half(vuint v) { return (vfloat)(v & 0xffff0000u); }

inline vfloat vmax(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    // One instruction, where GCC makes two of the comparison.
    return (vfloat)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline vfloat vmin(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// Combines the lanes of v pairwise.
template <typename Combine> inline float reduce(vfloat v, Combine combine) {
#if defined(__AVX512F__)
    // The unmasked intrinsics, here and below, make GCC warn of what it takes for uninitialized.
    v = combine(v, (vfloat)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)v, (__m512)v, 0x4e));
    v = combine(v, (vfloat)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)v, (__m512)v, 0xb1));
    v = combine(v, (vfloat)_mm512_maskz_permute_ps(0xffff, (__m512)v, 0x4e));
    return combine(v, (vfloat)_mm512_maskz_permute_ps(0xffff, (__m512)v, 0xb1))[0];
#else
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
    return lanes[0];
#endif
}
struct Larger {
    vfloat operator()(vfloat a, vfloat b) const { return vmax(a, b); }
    float operator()(float a, float b) const { return a > b ? a : b; }
};
inline float reduce_max(vfloat v) { return reduce(v, Larger{}); }
inline float reduce_add(vfloat v) {
    return reduce(v, [](auto a, auto b) { return a + b; });
}

// Numbers in memory as floats, and back.
inline vfloat load_wide(const float *p) { return load(p); }
inline vfloat load_wide(const bf16 *p) {
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    halves bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vfloat)(__builtin_convertvector(bits, vuint) << 16);
}
#if defined(__F16C__)
inline vfloat load_wide(const f16 *p) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#else
    return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#endif
}
#endif
inline void store_narrow(float *p, vfloat v) { store(p, v); }
inline void store_narrow(bf16 *p, vfloat v) {
#if defined(__AVX512BF16__)
    const __m256bh narrowed = _mm512_cvtneps_pbh((__m512)v);
#else
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    const vuint bits = (vuint)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const auto number = (bits & 0x7fffffff) <= 0x7f800000;
    const halves narrowed = __builtin_convertvector(number ? rounded : vuint{} + 0x7fc0, halves);
#endif
    std::memcpy(p, &narrowed, sizeof narrowed);
}

#if defined(__AVX512BW__)
// Of each lane the products of its two numbers of 16 bits, summed; of each two neighbouring bytes, unsigned of `a` and signed
// of `b`, the same in 16 bits.
inline vint pair_products(vint a, vint b) { return (vint)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
inline vshort byte_products(vint a, vint b) { return (vshort)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
inline vint pair_products(vint a, vint b) { return (vint)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
inline vshort byte_products(vint a, vint b) { return (vshort)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
#endif

// Has the compiler make a sum before it goes on to the next: left to itself it makes all products first, and the registers
// do not hold them.
template <typename V> inline void settle(V &sum) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(sum));
#elif defined(__AVX2__)
    asm volatile("" : "+x"(sum));
#endif
}

// A bit for each lane of a comparison's result that holds.
inline uint32_t lane_bits(vint lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)lanes));
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= uint32_t(lanes[i] != 0) << i;
    return bits;
#endif
}

#if defined(__AVX512BF16__)
// Calls f(i, lanes) for every 16 of `count`; masks are dear, so only what is left over at the end has one.
template <typename F> inline __attribute__((always_inline)) void by_lanes(int64_t count, F f) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) f(i, __mmask16(0xffff));
    if (i < count) f(i, __mmask16((1u << (count - i)) - 1));
}
inline __m512 load_wide(const bf16 *from, __mmask16 lanes) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}
inline __m512 load_wide(const float *from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
inline void store_narrow(bf16 *to, __mmask16 lanes, __m512 v) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(v));
}
inline __m512 rounded(__m512 v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}
#endif

// The nearest integer, by adding and subtracting a number whose last place is one; written to vectorize.
inline float nearest_integer(float x) { return (x + 12582912.0f) - 12582912.0f; }
inline vfloat nearest_integer(vfloat x) { return (x + 12582912.0f) - 12582912.0f; }

template <> inline f16 narrow<f16>(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
    const float size = bit_cast<float>(bits & 0x7fffffff);
    uint32_t rest;
    if (size < 0x1p-14f)
        rest = uint32_t(nearest_integer(size * 0x1p24f));
    else if (size < 65520.0f)
        rest = ((bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1) >> 13) - (112 << 10);
    else
        rest = size == size ? 0x7c00 : 0x7e00;
    return f16{uint16_t(sign | rest)};
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

// 2^x for x < 127, good to 2e-7, exactly 1 at 0 and exactly 0 from far below -126 on.
inline vfloat exp2_(vfloat x) {
#if defined(__AVX512F__)
    const vfloat c = vmax(x, vfloat{} - 200.0f);
    const vfloat n = (vfloat)_mm512_maskz_roundscale_ps(0xffff, (__m512)c, _MM_FROUND_TO_NEAREST_INT);
    const vfloat r = c - n;
#else
    constexpr float magic = 12582912.0f;
    const vfloat low = vfloat{} - 126.0f, c = x < low ? low : x;
    const vfloat shifted = c + magic, n = shifted - magic, r = c - n;
#endif
    vfloat p = r * 1.326472731e-3f + 9.671512991e-3f;
    p = p * r + 5.550733581e-2f;
    p = p * r + 2.402224243e-1f;
    p = p * r + 6.931470037e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (vfloat)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
    return x < low ? vfloat{} : (vfloat)((vuint)p + ((vuint)shifted << 23));
#endif
}

inline vfloat silu(vfloat x) {
    // Beyond this the quotient is 0 or infinite either way.
    return x / (exp2_(vmin(x * -1.44269504f, vfloat{} + 126.0f)) + 1.0f);
}

} // namespace

// The micro-kernels of products: MicroKernel<Format>::run computes sums[r][0:PANEL], those of ROWS rows under one
// panel. PATH names the instructions that do it, and is null where a format's products are left to others.
#pragma once
#include "amx_products.h"
#include "avx_vnni.h"
#include "int4_few.h"
#include "int4_products.h"
#include "widened.h"

namespace {

template <typename Format> struct MicroKernel;

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
// For formats whose step of a panel is two vectors: Lanes says how sums start and grow.
template <typename Format, typename Lanes, int ROWS>
inline void avx512_microkernel(const char *x, const Panel &panel, typename Lanes::Sum *sums) {
    static_assert(Format::STEP_BYTES == 128, "a step is two vectors");
    typename Lanes::Vector sum[ROWS][2];
    // Loops over rows are unrolled by order: left to itself, the compiler may keep the sums in memory.
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) sum[r][0] = Lanes::start(panel, 0), sum[r][1] = Lanes::start(panel, 1);
    const bool streams = panel.prefetch_stride == Format::STEP_BYTES;
    for (int64_t step = 0; step < panel.steps; step++) {
        const char *weights = panel.weights + step * Format::STEP_BYTES;
        const __m512i first = _mm512_loadu_si512(weights), second = _mm512_loadu_si512(weights + 64);
        if (streams) {
            __builtin_prefetch(panel.prefetch_from + step * Format::STEP_BYTES);
            __builtin_prefetch(panel.prefetch_from + step * Format::STEP_BYTES + 64);
        } else {
            // Into L2: the panel in use fills L1.
            __builtin_prefetch(panel.prefetch_from + step * panel.prefetch_stride, 0, 2);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, x + word_offset(step, r, ROWS), sizeof four);
            const __m512i inputs = _mm512_set1_epi32(four);
            sum[r][0] = Lanes::add(sum[r][0], inputs, first);
            sum[r][1] = Lanes::add(sum[r][1], inputs, second);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        std::memcpy(sums + r * PANEL, &sum[r][0], 64);
        std::memcpy(sums + r * PANEL + 16, &sum[r][1], 64);
    }
}
#endif

#if defined(__AVX512VNNI__)
struct VnniLanes {
    using Sum = int32_t;
    using Vector = __m512i;
    static Vector start(const Panel &panel, int half) { return _mm512_loadu_si512(panel.compensation + 16 * half); }
    static Vector add(Vector sum, __m512i inputs, __m512i weights) { return _mm512_dpbusd_epi32(sum, inputs, weights); }
};
#endif

#if defined(__AMX_TILE__)
template <> struct MicroKernel<Bf16Format> : AmxMicroKernel<Bf16Format, AmxBf16Lanes> {};

template <> struct MicroKernel<Int8Format> : AmxMicroKernel<Int8Format, AmxInt8Lanes> {
    // A few rows are multiplied sooner by vectors, and as these sums are exact it does not matter by what.
    static void run(const AmxRows &x, int64_t rows, const Panel &panel, Sum *sums) {
        switch (rows) {
            case 1: return few<1>(x.data, panel, sums);
            case 2: return few<2>(x.data, panel, sums);
            case 3: return few<3>(x.data, panel, sums);
            case 4: return few<4>(x.data, panel, sums);
        }
        AmxMicroKernel::run(x, rows, panel, sums);
    }

  private:
    template <int ROWS> static NOINLINE void few(const char *x, const Panel &panel, Sum *sums) {
        avx512_microkernel<Int8Format, VnniLanes, ROWS>(x, panel, sums);
    }
};
#else
#if defined(__AVX512BF16__)
template <> struct MicroKernel<Bf16Format> {
    using Sum = float;
    static constexpr const char *PATH = "avx512bf16";

    struct Lanes {
        using Sum = float;
        using Vector = __m512;
        static Vector start(const Panel &, int) { return _mm512_setzero_ps(); }
        static Vector add(Vector sum, __m512i inputs, __m512i weights) {
            return _mm512_dpbf16_ps(sum, (__m512bh)inputs, (__m512bh)weights);
        }
    };

    template <int ROWS> static NOINLINE void run(const char *x, const Panel &panel, Sum *sums) {
        avx512_microkernel<Bf16Format, Lanes, ROWS>(x, panel, sums);
    }
};
#elif defined(__AVX2__)
template <> struct MicroKernel<Bf16Format> : WidenedMicroKernel<Bf16Format> {};
#else
template <> struct MicroKernel<Bf16Format> {
    using Sum = float;
    static constexpr const char *PATH = nullptr;
};
#endif

#if defined(__AVX512VNNI__)
template <> struct MicroKernel<Int8Format> {
    using Sum = int32_t;
    static constexpr const char *PATH = "avx512vnni";

    template <int ROWS> static NOINLINE void run(const char *x, const Panel &panel, Sum *sums) {
        avx512_microkernel<Int8Format, VnniLanes, ROWS>(x, panel, sums);
    }
};
#elif defined(HAVE_AVX_VNNI)
template <> struct MicroKernel<Int8Format> : AvxVnniMicroKernel {};
#elif defined(__AVX2__)
template <> struct MicroKernel<Int8Format> : WidenedMicroKernel<Int8Format> {};
#else
template <> struct MicroKernel<Int8Format> {
    using Sum = int32_t;
    static constexpr const char *PATH = "baseline";

    template <int ROWS> static NOINLINE void run(const char *x, const Panel &panel, Sum *sums) {
        for (int r = 0; r < ROWS; r++, x += 4, sums += PANEL) {
            int32_t sum[PANEL];
            std::memcpy(sum, panel.compensation, sizeof sum);
            const auto *bytes = reinterpret_cast<const uint8_t *>(x);
            const auto *weights = reinterpret_cast<const int8_t *>(panel.weights);
            for (int64_t step = 0; step < panel.steps; step++, bytes += 4 * ROWS, weights += Int8Format::STEP_BYTES)
                for (int o = 0; o < PANEL; o++)
                    for (int i = 0; i < 4; i++) sum[o] += int32_t(bytes[i]) * weights[4 * o + i];
            std::memcpy(sums, sum, sizeof sum);
        }
    }
};
#endif

#endif // AMX

#if defined(HAVE_FLOAT32_PRODUCTS)
template <> struct MicroKernel<Float32Format> : WidenedMicroKernel<Float32Format> {};
template <> struct MicroKernel<Float16Format> : WidenedMicroKernel<Float16Format> {};
template <> struct MicroKernel<WideBf16Format> : WidenedMicroKernel<WideBf16Format> {};
#else
template <> struct MicroKernel<Float32Format> {
    using Sum = float;
    static constexpr const char *PATH = nullptr;
};
template <> struct MicroKernel<Float16Format> : MicroKernel<Float32Format> {};
template <> struct MicroKernel<WideBf16Format> : MicroKernel<Float32Format> {};
#endif

#if defined(HAVE_INT4_PRODUCTS)
template <> struct MicroKernel<Int4Format> : Int4MicroKernel {};
#else
template <> struct MicroKernel<Int4Format> {
    using Sum = int32_t;
    static constexpr const char *PATH = MicroKernel<Int8Format>::PATH;
};
#endif

// What a format is expanded to where it is multiplied: nothing else, where it has a micro-kernel for any number of rows.
#if defined(HAVE_INT4_PRODUCTS)
template <typename Format> using Multiplied = Format;
#else
template <typename Format> using Multiplied = typename Format::Multiplied;
#endif
template <typename Format> constexpr bool EXPANDS = !std::is_same_v<Format, Multiplied<Format>>;

// Whether a micro-kernel takes rows in another form than they are prepared in.
template <typename Kernel> constexpr auto takes_other_rows(int) -> decltype(Kernel::TAKES_OTHER_ROWS) {
    return Kernel::TAKES_OTHER_ROWS;
}
template <typename Kernel> constexpr bool takes_other_rows(long) { return false; }

// What multiplies a few rows, at most MOST, where that is faster by other means than many.
template <typename Format> struct FewRows {
    static constexpr int MOST = 0;
};
#if defined(HAVE_INT4_FEW_ROWS)
template <> struct FewRows<Int4Format> : Int4FewRows {};
#endif

} // namespace

// Products of weights that are widened in registers, for processors that multiply their format not at all or more slowly:
// bfloat16 to float32, by a shift and a mask, whose products are exact, so that only sums round; bytes to 16 bits, whose
// products are summed exactly. What widening takes is shared by all rows of a tile, and rows are widened once for all panels.
// And those of float32, which are as wide as they are multiplied, or are widened from 16 bits.
#pragma once
#include "blocks.h"
#include "format.h"
#include "team.h"

namespace {

// How a format is widened, if it is. A step has one word of each row, and a word so many NUMBERS; `number` makes a vector
// of one of each of some outputs' weights in a step, `widen` the same of a row's word, and `Number` is what products are
// summed in.
template <typename Format> struct Widening;

// The words of some outputs in a step.
inline vuint words_at(const char *step, int output) { return load(reinterpret_cast<const uint32_t *>(step) + output); }

#if defined(__AVX2__) && !defined(__AVX512BF16__)
template <> struct Widening<Bf16Format> {
    using Number = float;
    using Vector = vfloat;
    static constexpr int NUMBERS = 2;
    static constexpr bool WIDENS = true;

    static Vector number(const char *step, int output, int which) {
        const vuint words = words_at(step, output);
        return (vfloat)(which ? words & 0xffff0000u : words << 16);
    }
    static Vector add(Vector sum, Vector weights, Number input) { return sum + weights * input; }
    static Vector start(const Panel &, int) { return Vector{}; }
    static void widen(uint32_t word, uint32_t *to) { to[0] = word << 16, to[1] = word & 0xffff0000u; }
};
#endif

// Sets of kernels with more instructions for other formats leave these to the set below them: see dispatch.cpp.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define HAVE_FLOAT32_PRODUCTS
template <> struct Widening<Float32Format> {
    using Number = float;
    using Vector = vfloat;
    static constexpr int NUMBERS = 1;
    static constexpr bool WIDENS = false;

    static Vector number(const char *step, int output, int) { return (vfloat)words_at(step, output); }
    static Vector add(Vector sum, Vector weights, Number input) { return sum + weights * input; }
    static Vector start(const Panel &, int) { return Vector{}; }
};

template <typename Format> struct WideningHalves : Widening<Float32Format> {
    static constexpr bool WIDENS = true;

    static Vector number(const char *step, int output, int) {
        return load_wide(reinterpret_cast<const typename Format::Half *>(step) + output);
    }
};
template <> struct Widening<Float16Format> : WideningHalves<Float16Format> {};
template <> struct Widening<WideBf16Format> : WideningHalves<WideBf16Format> {};
#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define WIDENS_BYTES
// The first and third byte of a word are a pair, and the second and fourth, so that it takes no more than shifts.
template <> struct Widening<Int8Format> {
    using Number = int32_t;
    using Vector = vint;
    static constexpr int NUMBERS = 2;
    static constexpr bool WIDENS = true;

    static Vector number(const char *step, int output, int which) {
        const auto words = (vshort)words_at(step, output);
        return (vint)((which ? words : words << 8) >> 8);
    }
    static Vector add(Vector sum, Vector weights, Number input) {
        sum += pair_products(weights, vint{} + input);
        settle(sum);
        return sum;
    }
    static Vector start(const Panel &panel, int output) { return load(panel.compensation + output); }
    static void widen(uint32_t word, uint32_t *to) { to[0] = word & 0x00ff00ffu, to[1] = word >> 8 & 0x00ff00ffu; }
};
#endif

// So many steps are summed by themselves, which keeps float sums small and so more exact. Widened they leave room in the
// nearest cache for what a tile needs of its rows.
template <typename Format> constexpr int64_t PART_STEPS = 128 / Widening<Format>::NUMBERS;

// A part of a panel, widened: of each step the first number of every output's weights, then the second.
template <typename Format> void widen_part(const char *weights, int64_t steps, typename Widening<Format>::Number *out) {
    for (int64_t step = 0; step < steps; step++, weights += Format::STEP_BYTES)
        for (int which = 0; which < Widening<Format>::NUMBERS; which++, out += PANEL)
            for (int o = 0; o < PANEL; o += LANES) store(out + o, Widening<Format>::number(weights, o, which));
}

// One of the numbers of some outputs in a step, of weights as they are packed or widened before.
template <typename Format, bool WIDENED>
inline typename Widening<Format>::Vector step_weights(const char *weights, int64_t step, int which, int output) {
    using How = Widening<Format>;
    if constexpr (WIDENED)
        return load(reinterpret_cast<const typename How::Number *>(weights) + (How::NUMBERS * step + which) * PANEL + output);
    return How::number(weights + step * Format::STEP_BYTES, output, which);
}

// Rows [FIRST, FIRST + COUNT) of a tile of ROWS, under so many vectors of a panel from output number OUTPUT on: begins the
// sums with the products of a part's steps, or adds those. x holds the numbers of a step for each row, then the next
// step's.
template <typename Format, bool WIDENED, int ROWS, int FIRST, int COUNT, int OUTPUT, int VECTORS>
inline __attribute__((always_inline)) void add_widened(const typename Widening<Format>::Number *x, const Panel &part,
                                                       bool adds, typename Widening<Format>::Number *sums) {
    using How = Widening<Format>;
    typename How::Vector sum[COUNT][VECTORS] = {};
    const bool streams = part.prefetch_stride == Format::STEP_BYTES;
    for (int64_t step = 0; step < part.steps; step++) {
        const auto *inputs = x + How::NUMBERS * (step * ROWS + FIRST);
        if (streams) {
            constexpr int EACH = Format::STEP_BYTES / PANEL;
            for (int i = 0; i < VECTORS * LANES; i += 64 / EACH)
                __builtin_prefetch(part.prefetch_from + step * Format::STEP_BYTES + EACH * (OUTPUT + i));
        } else if (OUTPUT == 0 && FIRST == 0) {
            __builtin_prefetch(part.prefetch_from + step * part.prefetch_stride, 0, 2);
        }
#pragma GCC unroll 2
        for (int which = 0; which < How::NUMBERS; which++) {
            typename How::Vector weights[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                weights[v] = step_weights<Format, WIDENED>(part.weights, step, which, OUTPUT + v * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    sum[r][v] = How::add(sum[r][v], weights[v], inputs[How::NUMBERS * r + which]);
            // Words are read again, since sixteen registers do not hold them meanwhile.
            if (LANES == 8 && How::NUMBERS > 1) asm volatile("" ::: "memory");
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            auto *to = sums + (FIRST + r) * PANEL + OUTPUT + v * LANES;
            store(to, sum[r][v] + (adds ? load(to) : How::start(part, OUTPUT + v * LANES)));
        }
}

// 24 of 32 registers for sums, or 12 of 16, since fewer would wait for each other; the others hold weights and a row's
// input.
struct WidenedBlocks {
    static constexpr int MOST = LANES == 16 ? 12 : 6, ALL = PANEL / LANES;
    static constexpr int vectors(int rows) { return LANES == 16 || rows > 3 ? 2 : 4; }
};

// A part's steps for a whole tile.
template <typename Format, bool WIDENED, int ROWS>
inline void widened_part(const typename Widening<Format>::Number *x, const Panel &part, bool adds,
                         typename Widening<Format>::Number *sums) {
    in_blocks<WidenedBlocks, ROWS>([&](auto first, auto rows, auto vector, auto vectors) {
        add_widened<Format, WIDENED, ROWS, first, rows, vector * LANES, vectors>(x, part, adds, sums);
    });
}

// The micro-kernel of such a format.
template <typename Format> struct WidenedMicroKernel {
    static constexpr int NUMBERS = Widening<Format>::NUMBERS;
    static constexpr bool WIDENS = Widening<Format>::WIDENS;
    using Sum = typename Widening<Format>::Number;
    static constexpr const char *PATH = LANES == 16 ? "avx512" : "avx2";
    static constexpr bool TAKES_OTHER_ROWS = NUMBERS > 1;

    // Words of a row of so many, widened.
    static int64_t row_words(int64_t inputs) { return NUMBERS * Format::steps(inputs); }

    // Widens the rows of a tile.
    static void take_rows(const uint32_t *from, int64_t rows, int64_t inputs, uint32_t *to) {
        for (int64_t i = 0; i < rows * Format::steps(inputs); i++) Widening<Format>::widen(from[i], to + NUMBERS * i);
    }

    template <int ROWS> static NOINLINE void run(const char *x, const Panel &panel, Sum *sums) {
        constexpr int64_t MOST = PART_STEPS<Format>;
        for (int64_t from = 0; from < panel.steps; from += MOST, x += MOST * row_step<ROWS>()) {
            Panel part = panel;
            part.weights += from * Format::STEP_BYTES;
            part.prefetch_from += from * panel.prefetch_stride;
            part.steps = panel.steps - from < MOST ? panel.steps - from : MOST;
            if constexpr (!WIDENS)
                run_part<ROWS>(x, part, sums, from > 0);
            else
                widened_part<Format, false, ROWS>(numbers(x), part, from > 0, sums);
        }
    }

    // Steps of a panel that were widened, added to the sums or the first of them.
    template <int ROWS> static NOINLINE void run_part(const char *x, const Panel &part, Sum *sums, bool adds) {
        widened_part<Format, WIDENS, ROWS>(numbers(x), part, adds, sums);
    }

    // Bytes of a step of so many rows.
    template <int ROWS> static constexpr int64_t row_step() { return 4 * NUMBERS * ROWS; }

  private:
    static const Sum *numbers(const char *x) { return reinterpret_cast<const Sum *>(x); }
};

} // namespace

// Products with packed weights by AMX. A panel's steps lie in memory as a tile of weights wants them; rows lie as a
// RowTile puts them.
#pragma once
#include "amx.h"
#include "epilogue.h"
#include "format.h"

#if defined(__AMX_TILE__)
namespace {

// Up to 32 rows, from some step on: a RowTile's, or `plain` ones.
struct AmxRows {
    const char *data;
    int64_t row_bytes;
    bool plain;

    AmxRows(const Rows &rows, int64_t first, int64_t step = 0)
        : data(rows.data + first * rows.row_bytes), row_bytes(rows.row_bytes), plain(rows.is_plain) {
        data += step / AMX_STEPS * block_bytes();
    }
    // From one row of a block of steps to the next, and from a block to the next.
    int64_t stride() const { return plain ? row_bytes : 4 * AMX_STEPS; }
    int64_t block_bytes() const { return plain ? 4 * AMX_STEPS : 4 * AMX_STEPS * AMX_ROWS; }
};

// Tiles 0 to 3 are sums, of the first 16 rows and the others under either half of a panel; 4 and 5 are rows, 6 and 7
// weights.
// Lanes says how sums start and grow.
template <typename Format, typename Lanes, bool TWO> class AmxProduct {
    static_assert(Format::STEP_BYTES == 128, "a step is a row of two tiles");

    static inline __attribute__((always_inline)) void multiply(const char *x, const char *others, int64_t stride,
                                                               const char *weights) {
        load_tile<4>(x, stride);
        load_tile<6>(weights, 128);
        load_tile<7>(weights + 64, 128);
        Lanes::template add<0, 4, 6>();
        Lanes::template add<1, 4, 7>();
        if constexpr (TWO) {
            load_tile<5>(others, stride);
            Lanes::template add<2, 5, 6>();
            Lanes::template add<3, 5, 7>();
        }
    }

  public:
    // With `resumes` the sums go on from what they are.
    static void run(const AmxRows &rows, const Panel &panel, typename Lanes::Sum *sums, bool resumes) {
        constexpr int64_t STRIDE = PANEL * sizeof(*sums);
        constexpr int64_t BLOCK = AMX_STEPS * Format::STEP_BYTES;
        const char *x = rows.data, *others = rows.data + AMX_ROWS * rows.row_bytes, *weights = panel.weights;
        const int64_t stride = rows.stride(), block_bytes = rows.block_bytes();
        if (resumes) {
            load_tile<0>(sums, STRIDE);
            load_tile<1>(sums + PANEL / 2, STRIDE);
            if constexpr (TWO) {
                load_tile<2>(sums + AMX_ROWS * PANEL, STRIDE);
                load_tile<3>(sums + AMX_ROWS * PANEL + PANEL / 2, STRIDE);
            }
        } else {
            Lanes::template start<0, 1>(panel);
            if constexpr (TWO) Lanes::template start<2, 3>(panel);
        }
        const int64_t blocks = panel.steps / AMX_STEPS, left = panel.steps % AMX_STEPS;
        const char *prefetch = panel.prefetch_from;
        const int64_t prefetch_bytes = AMX_STEPS * panel.prefetch_stride;
        const bool streams = prefetch_bytes == BLOCK;
        for (int64_t block = 0; block < blocks; block++, x += block_bytes, others += block_bytes, weights += BLOCK) {
            if (streams)
                for (int64_t i = 0; i < BLOCK; i += 64) __builtin_prefetch(prefetch + i);
            else
                for (int64_t i = 0; i < prefetch_bytes; i += 64) __builtin_prefetch(prefetch + i, 0, 2);
            prefetch += prefetch_bytes;
            multiply(x, others, stride, weights);
        }
        if (left) {
            alignas(64) char last[BLOCK] = {};
            std::memcpy(last, weights, left * Format::STEP_BYTES);
            multiply(x, others, stride, last);
        }
        store_tile<0>(sums, STRIDE);
        store_tile<1>(sums + PANEL / 2, STRIDE);
        if constexpr (TWO) {
            store_tile<2>(sums + AMX_ROWS * PANEL, STRIDE);
            store_tile<3>(sums + AMX_ROWS * PANEL + PANEL / 2, STRIDE);
        }
    }
};

// What both formats' micro-kernels are: up to 32 rows under a panel.
template <typename Format, typename Lanes> struct AmxMicroKernel {
    using Sum = typename Lanes::Sum;
    static constexpr const char *PATH = "amx";

    static void run(const AmxRows &x, int64_t rows, const Panel &panel, Sum *sums) {
        run_part(x, rows, panel, sums, false);
    }

    // A part of a panel: whether its sums go on from what they are.
    static NOINLINE void run_part(const AmxRows &x, int64_t rows, const Panel &panel, Sum *sums, bool resumes) {
        if (rows > AMX_ROWS)
            AmxProduct<Format, Lanes, true>::run(x, panel, sums, resumes);
        else
            AmxProduct<Format, Lanes, false>::run(x, panel, sums, resumes);
    }
};

struct AmxBf16Lanes {
    using Sum = float;
    template <int LOW, int HIGH> static void start(const Panel &) {
        zero_tile<LOW>();
        zero_tile<HIGH>();
    }
    template <int SUM, int ROWS, int WEIGHTS> static void add() { add_bf16_products<SUM, ROWS, WEIGHTS>(); }
};

struct AmxInt8Lanes {
    using Sum = int32_t;
    template <int LOW, int HIGH> static void start(const Panel &panel) {
        // The same for every row.
        load_tile<LOW>(panel.compensation, 0);
        load_tile<HIGH>(panel.compensation + PANEL / 2, 0);
    }
    template <int SUM, int ROWS, int WEIGHTS> static void add() { add_int8_products<SUM, ROWS, WEIGHTS>(); }
};

} // namespace
#endif

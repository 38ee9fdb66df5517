// Products with packed weights by AMX. A panel's steps lie in memory as a tile of weights wants them; rows lie as a
// RowTile puts them.
#pragma once
#include "amx.h"
#include "epilogue.h"
#include "format.h"

#if defined(__AMX_TILE__)
namespace {

// Up to 16 rows, from some step on: a RowTile's, or `plain` ones.
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

// Up to 16 rows under a panel. Tiles 0 and 1 are sums, under either half of it; 4 is rows, 6 and 7 are weights. Two
// tiles of rows at once would load a third less, and be no faster where the weights lie in the nearest cache; but on a
// machine that others share, products with all eight tiles in use take up to four times as long at times, these twice.
// Lanes says how sums start and grow.
template <typename Format, typename Lanes> struct AmxMicroKernel {
    static_assert(Format::STEP_BYTES == 128, "a step is a row of two tiles");
    using Sum = typename Lanes::Sum;
    static constexpr const char *PATH = "amx";

    static void run(const AmxRows &x, int64_t, const Panel &panel, Sum *sums) { run_part(x, panel, sums, false); }

    // A part of a panel: with `resumes` the sums go on from what they are.
    static void run_part(const AmxRows &rows, const Panel &panel, Sum *sums, bool resumes) {
        run_part(rows, panel, sums, resumes, [](int64_t) {});
    }

    // The same, where `make(block)` writes the weights of a block of steps: one block ahead, while tiles are multiplied.
    template <typename Make>
    static NOINLINE void run_part(const AmxRows &rows, const Panel &panel, Sum *sums, bool resumes, const Make &make) {
        constexpr int64_t STRIDE = PANEL * sizeof(*sums);
        constexpr int64_t BLOCK = AMX_STEPS * Format::STEP_BYTES;
        const char *x = rows.data, *weights = panel.weights;
        const int64_t stride = rows.stride(), block_bytes = rows.block_bytes();
        if (resumes) {
            load_tile<0>(sums, STRIDE);
            load_tile<1>(sums + PANEL / 2, STRIDE);
        } else {
            Lanes::start(panel);
        }
        const int64_t blocks = panel.steps / AMX_STEPS, left = panel.steps % AMX_STEPS;
        const char *prefetch = panel.prefetch_from;
        const int64_t prefetch_bytes = AMX_STEPS * panel.prefetch_stride;
        const bool streams = prefetch_bytes == BLOCK;
        make(0);
        for (int64_t block = 0; block < blocks; block++, x += block_bytes, weights += BLOCK) {
            make(block + 1);
            if (streams)
                for (int64_t i = 0; i < BLOCK; i += 64) __builtin_prefetch(prefetch + i);
            else
                for (int64_t i = 0; i < prefetch_bytes; i += 64) __builtin_prefetch(prefetch + i, 0, 2);
            prefetch += prefetch_bytes;
            multiply(x, stride, weights);
        }
        if (left) {
            alignas(64) char last[BLOCK] = {};
            std::memcpy(last, weights, left * Format::STEP_BYTES);
            multiply(x, stride, last);
        }
        store_tile<0>(sums, STRIDE);
        store_tile<1>(sums + PANEL / 2, STRIDE);
    }

  private:
    static inline __attribute__((always_inline)) void multiply(const char *x, int64_t stride, const char *weights) {
        load_tile<4>(x, stride);
        load_tile<6>(weights, 128);
        load_tile<7>(weights + 64, 128);
        Lanes::template add<0, 4, 6>();
        Lanes::template add<1, 4, 7>();
    }
};

struct AmxBf16Lanes {
    using Sum = float;
    static void start(const Panel &) {
        zero_tile<0>();
        zero_tile<1>();
    }
    template <int SUM, int ROWS, int WEIGHTS> static void add() { add_bf16_products<SUM, ROWS, WEIGHTS>(); }
};

struct AmxInt8Lanes {
    using Sum = int32_t;
    static void start(const Panel &panel) {
        // The same for every row.
        load_tile<0>(panel.compensation, 0);
        load_tile<1>(panel.compensation + PANEL / 2, 0);
    }
    template <int SUM, int ROWS, int WEIGHTS> static void add() { add_int8_products<SUM, ROWS, WEIGHTS>(); }
};

} // namespace
#endif

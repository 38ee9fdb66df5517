// Products by AMX, whose registers are tiles: 16 rows of 64 bytes.
//
// A tile of rows times one of weights adds the products of 16 rows, 16 outputs and 16 steps to a tile of sums. A panel's
// steps lie in memory as such a tile of weights wants them; rows lie as lay_out in interleave.h puts them.
#pragma once
#include "format.h"

#if defined(__AMX_TILE__)
namespace {

constexpr int AMX_STEPS = 16;   // of one tile
constexpr int AMX_ROWS = 16;

// Instructions on tiles. GCC's own macros do not say that they read memory, so that it would drop what is written for
// them, and take no template's number.
template <int TILE> inline __attribute__((always_inline)) void load_tile(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> inline __attribute__((always_inline)) void store_tile(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> inline __attribute__((always_inline)) void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// The tiles of a thread, all of full size. Where fewer rows are multiplied the sums of others are made and not read: a
// panel that streams from memory comes no faster than sixteen rows are multiplied, and another shape takes longer to set.
class TileRegisters {
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };

  public:
    TileRegisters() {
        const Config config;
        asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    }
    // A thread whose tiles are in use takes longer to switch from and to.
    ~TileRegisters() { asm volatile("tilerelease"); }
    TileRegisters(const TileRegisters &) = delete;
    TileRegisters &operator=(const TileRegisters &) = delete;
};

// Tiles 0 to 3 are sums, of the first 16 rows and the others under either half of a panel, 4 and 5 rows, 6 and 7 weights.
// Lanes says how sums start and grow.
template <typename Format, typename Lanes, bool TWO> class AmxProduct {
    static_assert(Format::STEP_BYTES == 128, "a step is a row of two tiles");

    static inline __attribute__((always_inline)) void multiply(const char *x, const char *others, const char *weights) {
        load_tile<4>(x, 64);
        load_tile<6>(weights, 128);
        load_tile<7>(weights + 64, 128);
        Lanes::template add<0, 4, 6>();
        Lanes::template add<1, 4, 7>();
        if constexpr (TWO) {
            load_tile<5>(others, 64);
            Lanes::template add<2, 5, 6>();
            Lanes::template add<3, 5, 7>();
        }
    }

  public:
    static void run(const char *x, int64_t row_bytes, const Panel &panel, typename Lanes::Sum *sums) {
        constexpr int64_t BLOCK = AMX_STEPS * Format::STEP_BYTES;
        const char *others = x + AMX_ROWS * row_bytes, *weights = panel.weights;
        Lanes::template start<0, 1>(panel);
        if constexpr (TWO) Lanes::template start<2, 3>(panel);
        const int64_t blocks = panel.steps / AMX_STEPS, left = panel.steps % AMX_STEPS;
        const char *prefetch = panel.prefetch_from;
        const int64_t prefetch_bytes = AMX_STEPS * panel.prefetch_stride;
        for (int64_t block = 0; block < blocks; block++, x += 1024, others += 1024, weights += BLOCK) {
            for (int64_t i = 0; i < prefetch_bytes; i += 64) __builtin_prefetch(prefetch + i, 0, 2);
            prefetch += prefetch_bytes;
            multiply(x, others, weights);
        }
        if (left) {
            alignas(64) char last[BLOCK] = {};
            std::memcpy(last, weights, left * Format::STEP_BYTES);
            multiply(x, others, last);
        }
        constexpr int64_t STRIDE = PANEL * sizeof(*sums);
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

    static NOINLINE void run(const char *x, int64_t row_bytes, int64_t rows, const Panel &panel, Sum *sums) {
        if (rows > AMX_ROWS)
            AmxProduct<Format, Lanes, true>::run(x, row_bytes, panel, sums);
        else
            AmxProduct<Format, Lanes, false>::run(x, row_bytes, panel, sums);
    }
};

struct AmxBf16Lanes {
    using Sum = float;
    template <int LOW, int HIGH> static void start(const Panel &) {
        zero_tile<LOW>();
        zero_tile<HIGH>();
    }
    template <int SUM, int ROWS, int WEIGHTS> static void add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(WEIGHTS));
    }
};

struct AmxInt8Lanes {
    using Sum = int32_t;
    template <int LOW, int HIGH> static void start(const Panel &panel) {
        // The same for every row.
        load_tile<LOW>(panel.compensation, 0);
        load_tile<HIGH>(panel.compensation + PANEL / 2, 0);
    }
    template <int SUM, int ROWS, int WEIGHTS> static void add() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(WEIGHTS));
    }
};

} // namespace
#endif

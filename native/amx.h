// AMX, whose registers are tiles: 16 rows of 64 bytes. A tile of rows times one of columns adds the products of 16 rows
// and 16 columns, each over 16 steps of 4 bytes, to a tile of sums.
#pragma once
#include <cstdint>

namespace {

#if defined(__AMX_TILE__)

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

template <int SUM, int ROWS, int COLUMNS> inline __attribute__((always_inline)) void add_bf16_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(COLUMNS));
}
template <int SUM, int ROWS, int COLUMNS> inline __attribute__((always_inline)) void add_int8_products() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(COLUMNS));
}

// The tiles of a thread while this lives, all of full size unless tiles 6 and 7 are said to take `half` as many steps.
// Where fewer rows are multiplied the sums of others are made and not read: what streams from memory comes no faster
// than sixteen rows are multiplied, and another shape takes longer to set.
class TileRegisters {
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };

  public:
    explicit TileRegisters(bool half = false) {
        Config config;
        if (half) config.row_bytes[6] = 32, config.rows[7] = 8;
        asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    }
    // A thread whose tiles are in use takes longer to switch from and to.
    ~TileRegisters() { asm volatile("tilerelease"); }
    TileRegisters(const TileRegisters &) = delete;
    TileRegisters &operator=(const TileRegisters &) = delete;
};

#else
// Nothing is to be set before a product.
struct TileRegisters {
    ~TileRegisters() {}
};
#endif

} // namespace

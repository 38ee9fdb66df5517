// Activations packed for a product: quantized if its weights are, and laid out as it reads them.
#pragma once
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "interleave.h"
#include "pack.h"

namespace {

// Memory that is kept from pass to pass, in huge pages where the system has them, like the weights and the KV cache.
class Arena {
    static constexpr size_t HUGE_PAGE = 2 << 20;
    char *bytes = nullptr;
    size_t size = 0, used = 0;

  public:
    Arena() = default;
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;
    ~Arena() { std::free(bytes); }

    void reset(size_t wanted) {
        used = 0;
        if (wanted <= size) return;
        std::free(bytes);
        size = 0;   // until there is more: whoever is refused it may be asked for less the next time
        const size_t whole = (wanted + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        bytes = static_cast<char *>(std::aligned_alloc(HUGE_PAGE, whole));
        if (!bytes) throw std::bad_alloc();
        size = whole;
#if defined(__linux__)
        madvise(bytes, size, MADV_HUGEPAGE);
#endif
    }

    template <typename T> T *take(int64_t count) {
        T *taken = reinterpret_cast<T *>(bytes + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }
};

// Buffers for the packed rows of one product.
template <typename T> class Staging {
    char *inputs = nullptr;     // the rows as they are multiplied; a single tile once for each thread
    float *scales = nullptr, *zero_offsets = nullptr;
    T *row = nullptr;           // one for each thread
    uint32_t *words = nullptr;  // a tile for each thread, row after row
    int64_t width = 0;

    // A row's elements, up to a whole number of steps of any format.
    static int64_t rounded(int64_t widest) {
        return rounded_up(widest, Formats::MOST_INPUTS * ROW_STEPS);
    }

  public:
    static int64_t size(int64_t rows, int64_t widest, int64_t threads) {
        const int64_t all = rows + TILE_ROWS * threads, width = rounded(widest);
        return all * (width * sizeof(T) + 2 * sizeof(float)) + threads * width * sizeof(T) * (1 + TILE_ROWS) + 5 * 64;
    }

    // If asymmetric, rows are quantized with a zero point each.
    void take(Arena &arena, int64_t rows, int64_t widest, int64_t threads, bool asymmetric = false) {
        const int64_t all = rows + TILE_ROWS * threads;
        width = rounded(widest);
        inputs = arena.take<char>(all * width * sizeof(T));
        scales = arena.take<float>(all);
        zero_offsets = asymmetric ? arena.take<float>(all) : nullptr;
        row = arena.take<T>(threads * width);
        words = arena.take<uint32_t>(threads * width * sizeof(T) * TILE_ROWS / 4);
    }

    // The tiles' rows, which `row_at(index, buffer for one)` points to, as the weight wants them; all of the team must
    // call this. Every thread prepares a single tile for itself, which costs less than waiting for each other.
    template <typename RowAt> Rows prepare(const Tiles &tiles, const Weight &weight, Team &team, RowAt row_at) const {
        Rows made;
        with_format(weight, [&](auto format) {
            if constexpr (TAKES<decltype(format), T>) made = prepare_as(format, tiles, weight, team, row_at);
        });
        return made;
    }

    // The same of rows that lie one after the other: as they are, if the product reads them so. `has_more`: whether as
    // many as a tile has may be read behind the last one.
    Rows prepare_all(const Tiles &tiles, const Weight &weight, Team &team, const T *x, bool has_more) const {
        if (!tiles.list && (has_more || tiles.rows % ROW_BLOCK == 0) && reads_plain_rows<T>(weight)) {
            Rows plain{reinterpret_cast<const char *>(x), int64_t(sizeof(T)) * weight.in_features};
            plain.is_plain = true;
            return plain;
        }
        return prepare(tiles, weight, team, [&](int64_t row, T *) { return x + row * weight.in_features; });
    }

  private:
    template <typename Format, typename RowAt>
    NOINLINE Rows prepare_as(Format, const Tiles &tiles, const Weight &weight, Team &team, RowAt row_at) const {
        const bool alone = tiles.count == 1;
        const int64_t steps = Format::steps(weight), own = alone ? team.thread * TILE_ROWS : 0;
        // As far apart as the widest, so that a thread's rows lie in the same memory for products of any width.
        const int64_t row_bytes = 4 * (width / Format::INPUTS);
        const Rows made{inputs + own * row_bytes, row_bytes, Format::SCALED ? scales + own : nullptr,
                        Format::SCALED && zero_offsets ? zero_offsets + own : nullptr};
        const Range mine = alone ? Range{0, 1} : team.share(tiles.count);
        uint32_t *tile_words = words + team.thread * width * sizeof(T) * TILE_ROWS / 4;
        for (int64_t tile = mine.begin; tile < mine.end; tile++) {
            const int64_t first = tiles.first(tile), count = tiles.rows_of(tile);
            auto *to = reinterpret_cast<uint32_t *>(inputs + (own + first) * row_bytes);
            // A row on its own is put there at once, unless its words lie apart.
            const bool at_once = count == 1 && ROW_STEPS == 1;
            for (int64_t i = 0; i < count; i++) {
                const T *from = row_at(first + i, row + team.thread * width);
                uint32_t *put = at_once ? to : tile_words + i * steps;
                if constexpr (Format::SCALED)
                    quantize_row(own + first + i, from, weight.in_features, reinterpret_cast<uint8_t *>(put));
                else
                    std::memcpy(put, from, sizeof(T) * weight.in_features);
            }
            if (!at_once) RowTile{to, count, steps, row_bytes / 4}.put(tile_words, steps, 0, steps);
        }
        if (!alone) team.wait();
        return made;
    }

    void quantize_row(int64_t index, const T *from, int64_t count, uint8_t *to) const {
        scales[index] = zero_offsets ? quantize_asymmetric(from, count, to, zero_offsets[index])
                                     : quantize_symmetric(from, count, to);
    }
};

} // namespace

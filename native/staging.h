// What is multiplied, made ready: quantized if the weight is, and interleaved.
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
        size = (wanted + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        bytes = static_cast<char *>(std::aligned_alloc(HUGE_PAGE, size));
        if (!bytes) throw std::bad_alloc();
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

// Room for the rows of one product.
template <typename T> class Staging {
    char *inputs = nullptr;     // the rows as they are multiplied; a single tile once for each thread
    float *scales = nullptr, *shifts = nullptr;
    T *row = nullptr;           // one for each thread
    uint32_t *words = nullptr;  // a tile for each thread, row after row
    int64_t width = 0;

    // A row's elements, up to a whole number of steps of any kind.
    static int64_t rounded(int64_t widest) { return (widest + 3) / 4 * 4; }

  public:
    static int64_t size(int64_t rows, int64_t widest, int64_t threads) {
        const int64_t all = rows + TILE_ROWS * threads, width = rounded(widest);
        return all * (width * sizeof(T) + 2 * sizeof(float)) + threads * width * sizeof(T) * (1 + TILE_ROWS) + 5 * 64;
    }

    // With `between`, rows are quantized from their lowest to their highest.
    void take(Arena &arena, int64_t rows, int64_t widest, int64_t threads, bool between = false) {
        const int64_t all = rows + TILE_ROWS * threads;
        width = rounded(widest);
        inputs = arena.take<char>(all * width * sizeof(T));
        scales = arena.take<float>(all);
        shifts = between ? arena.take<float>(all) : nullptr;
        row = arena.take<T>(threads * width);
        words = arena.take<uint32_t>(threads * width * sizeof(T) * TILE_ROWS / 4);
    }

    // The tiles' rows, which `row_at(index, room for one)` points to, as the weight wants them; all of the team must call this.
    // Every thread prepares a single tile for itself, which costs less than waiting for each other.
    template <typename RowAt> Rows prepare(const Tiles &tiles, const Weight &weight, Team &team, RowAt row_at) const {
        const bool alone = tiles.count == 1;
        const int64_t steps = weight.steps(), own = alone ? team.thread * TILE_ROWS : 0;
        // As far apart as the widest, so that a thread's rows lie in the same memory for products of any width.
        const int64_t row_bytes = width * (weight.int8 ? 1 : sizeof(T));
        const Rows made{inputs + own * row_bytes, row_bytes, weight.int8 ? scales + own : nullptr,
                        weight.int8 && shifts ? shifts + own : nullptr};
        const Range mine = alone ? Range{0, 1} : team.share(tiles.count);
        uint32_t *tile_words = words + team.thread * width * sizeof(T) * TILE_ROWS / 4;
        for (int64_t tile = mine.begin; tile < mine.end; tile++) {
            const int64_t first = tiles.first(tile), count = tiles.first(tile + 1) - first;
            auto *to = reinterpret_cast<uint32_t *>(inputs + (own + first) * row_bytes);
            for (int64_t i = 0; i < count; i++) {
                const T *from = row_at(first + i, row + team.thread * width);
                uint32_t *put = count > 1 ? tile_words + i * steps : to;
                auto *bytes = reinterpret_cast<uint8_t *>(put);
                if (weight.int8 && shifts)
                    scales[own + first + i] = quantize_between(from, weight.ins, bytes, shifts[own + first + i]);
                else if (weight.int8)
                    scales[own + first + i] = quantize_row(from, weight.ins, bytes);
                else
                    std::memcpy(put, from, sizeof(T) * weight.ins);
            }
            // A row on its own was put there at once.
            if (count > 1) interleave(tile_words, steps, count, steps, to);
        }
        if (!alone) team.wait();
        return made;
    }
};

} // namespace

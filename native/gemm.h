// Products with weights that are packed once: x * weight^T, summed in float32 or, of int8 and int4, exactly in int32.
//
// The weight [out_features, in_features] is packed in panels of 32 outputs, and a panel in steps, each holding every
// output's weights for as many inputs as lie in 4 bytes of a row: one of float32, two of bfloat16 or four bytes. So much
// one vdpbf16ps or vpdpbusd multiplies. At few rows the weight streams from memory once; at many a panel stays in the cache
// while the rows pass by. A row's sums run over the inputs in one order, whatever the number of rows or threads.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>
#include <numeric>
#include <vector>

#include "microkernel.h"
#include "epilogue.h"
#include "team.h"

namespace {

constexpr int64_t BYTES_AHEAD = 3072; // how far to prefetch what streams
// So many multiplications take one thread as long as waking the others.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 19;

// Tiles of rows that are multiplied with weights of their own, group by group: see experts.h.
struct TileList {
    std::vector<int64_t> first, rows;   // of each tile: where its rows begin, a whole block, and how many they are
    std::vector<int64_t> begin;         // of each group the first of its tiles; at the end how many tiles there are
    std::vector<int64_t> weight;        // of each group: which of the weights

    void clear() { first.clear(), rows.clear(), begin.clear(), weight.clear(); }

    // Makes room for so many groups and, in all of them, tiles.
    void reserve(size_t groups, size_t tiles) {
        first.reserve(tiles), rows.reserve(tiles), begin.reserve(groups + 1), weight.reserve(groups);
    }

    // One more group: `count` rows from `place` on, which are multiplied with weight number `which`.
    void add_group(int64_t which, int64_t place, int64_t count) {
        weight.push_back(which);
        begin.push_back(int64_t(first.size()));
        const int64_t blocks = (count + ROW_BLOCK - 1) / ROW_BLOCK, tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t at = blocks * tile / tiles * ROW_BLOCK;
            first.push_back(place + at);
            rows.push_back(std::min(count, blocks * (tile + 1) / tiles * ROW_BLOCK) - at);
        }
    }

    // There are no more groups.
    void finish() { begin.push_back(int64_t(first.size())); }
};

// Rows cut into tiles of nearly equal size, and those into groups. Where there are enough of them every thread has a
// group, of as many tiles as any other: what it prepares it multiplies itself, and little travels from core to core.
struct Tiles {
    int64_t rows, blocks, count, groups;
    const TileList *list = nullptr;

    Tiles(int64_t rows, const Team &team)
        : rows(rows), blocks((rows + ROW_BLOCK - 1) / ROW_BLOCK), count((rows + TILE_ROWS - 1) / TILE_ROWS), groups(1) {
        if (count < LEAST_TILES * team.threads) return;
        groups = team.threads;
        count = (count + groups - 1) / groups * groups;
    }
    explicit Tiles(const TileList &list)
        : rows(0), blocks(0), count(int64_t(list.first.size())), groups(int64_t(list.weight.size())), list(&list) {}

    int64_t first(int64_t tile) const {
        return list ? list->first[tile] : std::min(rows, blocks * tile / count * ROW_BLOCK);
    }
    int64_t rows_of(int64_t tile) const { return list ? list->rows[tile] : first(tile + 1) - first(tile); }
    Range group(int64_t index) const {
        if (list) return {list->begin[index], list->begin[index + 1]};
        return {count * index / groups, count * (index + 1) / groups};
    }
    // What a group is multiplied with: the weight, or of a list's groups that of as many behind it.
    const Weight &weight_of(int64_t index, const Weight &weight) const {
        return list ? (&weight)[list->weight[index]] : weight;
    }
};

#if defined(__AMX_TILE__)
template <typename Format>
inline void multiply_tile(const Rows &x, int64_t first, int64_t rows, const Panel &panel,
                          typename MicroKernel<Format>::Sum *sums) {
    MicroKernel<Format>::run(AmxRows(x, first), rows, panel, sums);
}
#else
template <typename Format>
inline void multiply_tile(const Rows &x, int64_t first, int64_t rows, const Panel &panel,
                          typename MicroKernel<Format>::Sum *sums) {
    with_rows(rows, [&](auto count) {
        MicroKernel<Format>::template run<count>(x.data + first * x.row_bytes, panel, sums);
    });
}
#endif

// Memory of a thread's own that only grows: an expanded panel, or widened rows.
class Scratch {
    char *bytes = nullptr;
    int64_t size = 0;

  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { std::free(bytes); }

    char *reserve(int64_t wanted) {
        if (wanted > size) {
            std::free(bytes);
            size = 0;
            bytes = static_cast<char *>(std::aligned_alloc(64, rounded_up(wanted, 4096)));
            if (!bytes) throw std::bad_alloc();
            size = rounded_up(wanted, 4096);
        }
        return bytes;
    }
};

// Rows as a micro-kernel takes them.
template <typename Kernel, bool OTHERS = takes_other_rows<Kernel>(0)> struct RowsTaken {
    const Rows &x;
    RowsTaken(const Rows &x, const Tiles &, int64_t) : x(x) {}
    const Rows &of(int64_t) { return x; }
};

// Those of the group that was asked for last, made for it.
template <typename Kernel> class RowsTaken<Kernel, true> {
    const Rows &x;
    const Tiles &tiles;
    const int64_t inputs;
    int64_t group = -1;
    Rows made;

  public:
    RowsTaken(const Rows &x, const Tiles &tiles, int64_t inputs) : x(x), tiles(tiles), inputs(inputs), made(x) {}

    const Rows &of(int64_t wanted) {
        if (wanted != group) take_group(group = wanted);
        return made;
    }

  private:
    void take_group(int64_t index) {
        static thread_local Scratch scratch;
        const Range some = tiles.group(index);
        made.row_bytes = 4 * Kernel::row_words(inputs);
        if (some.begin == some.end) return;
        const int64_t last = tiles.first(some.end - 1) + tiles.rows_of(some.end - 1);
        char *to = scratch.reserve(last * made.row_bytes);
        made.data = to;
        for (int64_t tile = some.begin; tile < some.end; tile++) {
            const int64_t first = tiles.first(tile);
            Kernel::take_rows(reinterpret_cast<const uint32_t *>(x.data + first * x.row_bytes), tiles.rows_of(tile),
                              inputs, reinterpret_cast<uint32_t *>(to + first * made.row_bytes));
        }
    }
};

// Which tiles of a panel prefetch the next one, or what follows a part of it, and how many bytes for each step of theirs.
// AMX takes what it needs from the second cache nearly as fast as that gives it, so what comes from memory meanwhile is
// spread over all tiles.
struct Ahead {
    int64_t tiles = 2, stride;

    Ahead(int64_t count, int64_t panel_bytes, int64_t steps) : stride(panel_bytes / steps / 2) {
        [[maybe_unused]] const int64_t step_bytes = panel_bytes / steps;
#if defined(__AMX_TILE__)
        constexpr int64_t LEAST = 64 / AMX_STEPS;   // a line of the cache for each block of steps
        tiles = std::clamp<int64_t>(count, 1, std::max<int64_t>(step_bytes / LEAST, 1));
        stride = rounded_up((step_bytes + tiles - 1) / tiles, LEAST);
#endif
    }
};

// How a panel is multiplied in parts, for a few tiles at once, so that what these need of it and their sums stay in the
// nearest caches: `take` is told where a part lies, and `multiply` multiplies it, in the order of its tiles.
template <typename Format> struct Parts;
template <typename Format> constexpr bool HAS_PARTS = false;

#if defined(__AMX_TILE__)
// A panel of few steps stays there anyway.
template <typename Format> struct AmxParts {
    static constexpr bool PREFETCHES_PARTS = true;
    static constexpr int64_t TILES_AT_ONCE = 16, MOST_STEPS = 192, FEW_STEPS = 160;

    static bool pay(int64_t tiles, int64_t steps) { return tiles > 1 && steps > FEW_STEPS; }
    static int64_t steps(int64_t all) {
        const int64_t parts = (all + MOST_STEPS - 1) / MOST_STEPS;
        return rounded_up((all + parts - 1) / parts, AMX_STEPS);
    }

    const char *take(const char *weights, int64_t) { return weights; }
    static void multiply(const Rows &x, int64_t first, int64_t, int64_t from, const Panel &part,
                         typename MicroKernel<Format>::Sum *sums) {
        MicroKernel<Format>::run_part(AmxRows(x, first, from), part, sums, from > 0);
    }
};

// Weights of 4 bits: each part is expanded by the first of its tiles, as vectors and tiles are multiplied side by side.
struct AmxExpandedParts : AmxParts<Int8Format> {
    static constexpr bool PREFETCHES_PARTS = false;
    alignas(64) char expanded[MOST_STEPS * Int8Format::STEP_BYTES];
    const char *stored = nullptr;   // null once it is expanded

    static bool pay(int64_t, int64_t) { return true; }

    const char *take(const char *weights, int64_t) {
        stored = weights;
        return expanded;
    }
    void multiply(const Rows &x, int64_t first, int64_t, int64_t from, const Panel &part, int32_t *sums) {
        const AmxRows rows(x, first, from);
        if (!stored) return MicroKernel<Int8Format>::run_part(rows, part, sums, from > 0);
        MicroKernel<Int8Format>::run_part(rows, part, sums, from > 0, [&](int64_t block) {
            const int64_t step = block * AMX_STEPS;
            if (step >= part.steps) return;
            expand_int4_block(stored + block * INT4_BLOCK_BYTES, part.steps - step, expanded + step * Int8Format::STEP_BYTES);
        });
        stored = nullptr;
    }
};
template <> struct Parts<Bf16Format> : AmxParts<Bf16Format> {};
template <> struct Parts<Int8Format> : AmxParts<Int8Format> {};
template <> inline constexpr bool HAS_PARTS<Bf16Format> = true;
template <> inline constexpr bool HAS_PARTS<Int8Format> = true;
template <> struct Parts<Int4Format> : AmxExpandedParts {};
template <> inline constexpr bool HAS_PARTS<Int4Format> = true;
#elif defined(__AVX2__)
// Each part is widened once for all tiles, if that makes up for what it takes.
template <typename Format> struct WidenedParts {
    using Number = typename Widening<Format>::Number;
    static constexpr bool WIDENS = Widening<Format>::WIDENS, PREFETCHES_PARTS = false;
    static constexpr int64_t TILES_AT_ONCE = 24, MOST = PART_STEPS<Format>;
    alignas(64) Number widened[WIDENS ? MOST * Widening<Format>::NUMBERS * PANEL : 1];

    static bool pay(int64_t tiles, int64_t) { return tiles >= (LANES == 16 && WIDENS ? 8 : 2); }
    static int64_t steps(int64_t) { return MOST; }

    const char *take(const char *weights, int64_t steps) {
        if constexpr (WIDENS) {
            widen_part<Format>(weights, steps, widened);
            return reinterpret_cast<const char *>(widened);
        }
        return weights;
    }
    static void multiply(const Rows &x, int64_t first, int64_t rows, int64_t from, const Panel &part, Number *sums) {
        const char *row = x.data + first * x.row_bytes;
        with_rows(rows, [&](auto count) {
            using Kernel = MicroKernel<Format>;
            Kernel::template run_part<count>(row + from * Kernel::template row_step<count>(), part, sums, from > 0);
        });
    }
};
#if defined(HAVE_FLOAT32_PRODUCTS)
template <> struct Parts<Float32Format> : WidenedParts<Float32Format> {};
template <> inline constexpr bool HAS_PARTS<Float32Format> = true;
template <> struct Parts<Float16Format> : WidenedParts<Float16Format> {};
template <> inline constexpr bool HAS_PARTS<Float16Format> = true;
template <> struct Parts<WideBf16Format> : WidenedParts<WideBf16Format> {};
template <> inline constexpr bool HAS_PARTS<WideBf16Format> = true;
#endif
#if !defined(__AVX512BF16__)
template <> struct Parts<Bf16Format> : WidenedParts<Bf16Format> {};
template <> inline constexpr bool HAS_PARTS<Bf16Format> = true;
#endif
#if defined(WIDENS_BYTES)
template <> struct Parts<Int8Format> : WidenedParts<Int8Format> {};
template <> inline constexpr bool HAS_PARTS<Int8Format> = true;
#endif
#endif

// As `multiply`, in parts.
template <typename Format, typename AnyEpilogue>
NOINLINE void multiply_in_parts(const Rows &x, const Tiles &tiles, const Range &some, const Weight &weight,
                                int64_t index, const Panel &panel, const char *next, const Ahead &ahead,
                                const AnyEpilogue &epilogue) {
    Parts<Format> parts;
    alignas(64) typename MicroKernel<Format>::Sum sums[parts.TILES_AT_ONCE][TILE_ROWS * PANEL];
    const int64_t all = panel.steps, most = parts.steps(all);
    // So few tiles read each part once, and meanwhile what follows it comes from memory; else it is the next panel.
    const bool follows = parts.PREFETCHES_PARTS && some.end - some.begin <= parts.TILES_AT_ONCE;
    for (int64_t begin = some.begin; begin < some.end; begin += parts.TILES_AT_ONCE) {
        const int64_t end = std::min(begin + parts.TILES_AT_ONCE, some.end);
        for (int64_t from = 0; from < all; from += most) {
            const int64_t steps = std::min(most, all - from);
            const char *weights = parts.take(panel.weights + from * Format::STEP_BYTES, steps);
            const char *rest = panel.weights + (from + most) * Format::STEP_BYTES;
            Panel part{weights, panel.compensation, steps, panel.weights, 0};
            for (int64_t tile = begin; tile < end; tile++) {
                const int64_t nth = tile - some.begin, first = tiles.first(tile), rows = tiles.rows_of(tile);
                part.prefetch_stride = follows || (next && nth < ahead.tiles) ? ahead.stride : 0;
                if (part.prefetch_stride)
                    part.prefetch_from =
                        follows ? rest + nth * steps * ahead.stride : next + (nth * all + from) * ahead.stride;
                auto *own = sums[most < all ? tile - begin : 0];
                parts.multiply(x, first, rows, from, part, own);
                if (from + steps == all) epilogue.apply(weight, index, first, int(rows), x, own);
            }
        }
    }
}

// The rows of some tiles under one panel of a weight, which is expanded if its format is; `next` is the panel to
// prefetch meanwhile, or null.
template <typename Format, typename AnyEpilogue>
void multiply(const Rows &x, const Tiles &tiles, const Range &some, const Weight &weight, int64_t index,
              const char *next, const AnyEpilogue &epilogue) {
    using Own = Multiplied<Format>;
    constexpr int64_t STEP_BYTES = Own::STEP_BYTES;
    const int64_t steps = Format::steps(weight), panel_bytes = Format::panel_bytes(weight);
    Panel panel{static_cast<const char *>(weight.packed) + index * panel_bytes,
                Format::COMPENSATED ? weight.compensation + index * PANEL : nullptr, steps, nullptr, 0};
    const bool single = some.end - some.begin == 1;
    const Ahead ahead(some.end - some.begin, panel_bytes, steps);
    // What expands a panel reads ahead, into the next one: enough for a single tile.
    if (EXPANDS<Format> && single) next = nullptr;
    if constexpr (HAS_PARTS<Format>)
        if (Parts<Format>::pay(some.end - some.begin, steps))
            return multiply_in_parts<Format>(x, tiles, some, weight, index, panel, next, ahead, epilogue);
    alignas(64) typename MicroKernel<Own>::Sum sums[TILE_ROWS * PANEL];
    if constexpr (EXPANDS<Format>) {
        static thread_local Scratch expanded;
        char *weights = expanded.reserve(steps * STEP_BYTES);
        Format::expand(panel.weights, steps, weights);
        panel.weights = weights;
    }
    for (int64_t tile = some.begin; tile < some.end; tile++) {
        // A single tile reads the panel as it streams from memory; several prefetch the next.
        const int64_t nth = tile - some.begin;
        const bool prefetch = next && nth < ahead.tiles;
        panel.prefetch_stride = single && !EXPANDS<Format> ? STEP_BYTES : prefetch ? ahead.stride : 0;
        panel.prefetch_from = single && !EXPANDS<Format> ? panel.weights + BYTES_AHEAD
                              : prefetch                     ? next + nth * steps * ahead.stride
                                                             : panel.weights;
        const int64_t first = tiles.first(tile), rows = tiles.rows_of(tile);
        multiply_tile<Own>(x, first, rows, panel, sums);
        epilogue.apply(weight, index, first, int(rows), x, sums);
    }
}

// Whether some tiles are few rows, which a format multiplies by other means.
template <typename Format> inline bool are_few(const Tiles &tiles, const Range &some) {
    return some.end - some.begin == 1 && tiles.rows_of(some.begin) <= FewRows<Format>::MOST;
}

// The same of them, as FewRows takes them.
template <typename Format, typename AnyEpilogue>
void multiply_few(const Rows &x, const Tiles &tiles, int64_t tile, const Weight &weight, int64_t index,
                  const AnyEpilogue &epilogue) {
    const char *weights = static_cast<const char *>(weight.packed) + index * Format::panel_bytes(weight);
    const Panel panel{weights, Format::COMPENSATED ? weight.compensation + index * PANEL : nullptr,
                      Format::steps(weight), weights + BYTES_AHEAD, Format::STEP_BYTES};
    const int64_t first = tiles.first(tile), rows = tiles.rows_of(tile);
    alignas(64) typename FewRows<Format>::Sum sums[FewRows<Format>::MOST * PANEL];
    FewRows<Format>::run(x.data + first * x.row_bytes, x.row_bytes, rows, panel, sums);
    epilogue.apply(weight, index, first, int(rows), x, sums);
}

// Tiles in the groups that a product takes them in, where a row and a weight take so many bytes. AMX is so fast that a
// weight hardly comes from memory as soon as it is multiplied, unless it is small: by few tiles, which every thread's
// cache holds all of, each panel is multiplied by one thread only, and so it is where panels are expanded first. Of more,
// each thread has rows of its own, no more at once than its cache holds.
template <typename Format> Tiles grouped(const Tiles &tiles, const Weight &weight, const Team &team) {
    Tiles found = tiles;
#if defined(__AMX_TILE__)
    constexpr int64_t FEW_TILES = 8, FEW_BYTES = 1536 << 10, MOST_BYTES = 1200 << 10, SMALL_WEIGHT = 1 << 20;
    const int64_t bytes = tiles.rows * 4 * Format::steps(weight), each = bytes / (team.threads * MOST_BYTES);
    const bool is_small = weight.panels() * Format::panel_bytes(weight) <= SMALL_WEIGHT;
    if (!tiles.list && tiles.groups > 1 && (EXPANDS<Format> || !is_small))
        found.groups = tiles.count <= FEW_TILES * team.threads && bytes <= FEW_BYTES
                           ? 1
                           : std::min(team.threads * std::max<int64_t>(each, 1), tiles.count);
#else
    // Where rows are widened first few are by each thread, so that each part of a panel is widened once, and of many no
    // more at once than come quickly from the farther caches, as every panel needs all of them.
    if constexpr (LANES == 8 && HAS_PARTS<Format>) {
        constexpr int64_t FEW_BYTES = 512 << 10, MOST_BYTES = 1 << 20, LEAST = 4;
        const int64_t bytes = tiles.rows * 4 * MicroKernel<Format>::row_words(weight.in_features);
        // Fewer tiles would not make up for what they widen.
        const int64_t most = std::max<int64_t>(tiles.count / (team.threads * LEAST), 1);
        const int64_t each = std::min((bytes - 1) / (team.threads * MOST_BYTES) + 1, most);
        if (!tiles.list && (tiles.groups > 1 || each > 1))
            found.groups = bytes <= FEW_BYTES ? 1 : std::min(team.threads * each, tiles.count);
    }
#endif
    return found;
}

// This thread's part of a product; the caller waits before and after.
template <typename Format, typename AnyEpilogue>
NOINLINE void product_of(const Rows &x, const Tiles &given, const Weight &weight, const AnyEpilogue &epilogue,
                         Team &team) {
    const int64_t panels = weight.panels(), panel_bytes = Format::panel_bytes(weight);
    const Tiles tiles = grouped<Format>(given, weight, team);
    const int64_t tasks = panels * tiles.groups;
    const TileRegisters registers;
    RowsTaken<MicroKernel<Multiplied<Format>>> taken(x, tiles, weight.in_features);
    RowsTaken<FewRows<Format>> few(x, tiles, weight.in_features);
    // Neighbouring panels follow each other in memory, so what a thread takes streams.
    for (int64_t task = team.take_near(tasks); task >= 0; task = team.take_near(tasks)) {
        const int64_t panel = task % panels, group = task / panels;
        const Weight &own = tiles.weight_of(group, weight);
        if constexpr (FewRows<Format>::MOST > 0)
            if (are_few<Format>(tiles, tiles.group(group))) {
                multiply_few<Format>(few.of(group), tiles, tiles.group(group).begin, own, panel, epilogue);
                continue;
            }
        const char *next = static_cast<const char *>(own.packed) + (panel + 1) * panel_bytes;
        multiply<Format>(taken.of(group), tiles, tiles.group(group), own, panel, panel + 1 < panels ? next : nullptr,
                         epilogue);
    }
}

// Whether a product with the weight reads rows of T as they came: AMX loads a row of a tile from wherever it lies. Not
// under many panels, as rows that lie apart come a little slower from the second cache, nor if so few sets of a cache
// have all of their lines that a tile of them does not fit.
template <typename T> bool reads_plain_rows([[maybe_unused]] const Weight &weight) {
    bool reads = false;
#if defined(__AMX_TILE__)
    constexpr int64_t MOST_PANELS = 64, MOST_SHARED = 16;
    with_format(weight, [&](auto format) {
        using Format = decltype(format);
        const int64_t inputs = Format::INPUTS * AMX_STEPS, lines = weight.in_features / inputs;
        if constexpr (std::is_same_v<Format, Bf16Format> && TAKES<Format, T>)
            reads = weight.panels() <= MOST_PANELS && weight.in_features % inputs == 0 &&
                    std::gcd(lines, int64_t(64)) <= MOST_SHARED;
    });
#endif
    return reads;
}

// The epilogue is an Epilogue or the encoder's.
template <typename AnyEpilogue>
void product(const Rows &x, const Tiles &tiles, const Weight &weight, const AnyEpilogue &epilogue, Team &team) {
    with_format(weight, [&](auto format) {
        using Format = decltype(format);
        if constexpr (MicroKernel<Format>::PATH != nullptr && TAKES<Format, typename AnyEpilogue::Type>)
            team.attempt([&] { product_of<Format>(x, tiles, weight, epilogue, team); });
    });
}

} // namespace

// Latent attention: one wide head of keys is kept, and queries and values of all heads go through weights of their own.
// See chairlift/ops/latent.py for what is computed.
#pragma once
#include <cstring>

#include "elementwise.h"
#include "staging.h"

namespace {

// Some tokens' rows under each head: head after head, those of one beginning with a whole block.
struct HeadRows {
    TileList tiles;
    int64_t stride = 0;     // from one head's rows to the next one's

    static int64_t places(int64_t heads, int64_t rows) { return heads * rounded_up(rows, ROW_BLOCK); }

    void make(int64_t heads, int64_t rows) {
        stride = rounded_up(rows, ROW_BLOCK);
        tiles.clear();
        for (int64_t head = 0; head < heads; head++) tiles.add_group(head, head * stride, rows);
        tiles.finish();
    }

    int64_t head_of(int64_t place) const { return place / stride; }
    int64_t row_of(int64_t place) const { return place % stride; }
    int64_t place(int64_t head, int64_t row) const { return head * stride + row; }
};

// Buffers that the threads of a pass share, where any layer's attention is latent.
template <typename T> struct LatentWorkspace {
    T *made, *queries, *taken, *mixed;
    Staging<T> staging;     // of heads' rows

    // How many numbers the largest of the layers need for as many tokens.
    struct Sizes {
        int64_t made = 0, queries = 0, taken = 0, mixed = 0, widest = 0, places = 0;

        Sizes(const Decoder &decoder, int64_t tokens) {
            for (int64_t i = 0; i < decoder.num_layers; i++)
                if (decoder.layers[i].latent) add(*decoder.layers[i].latent, decoder.heads.num_heads, tokens);
        }

        int64_t numbers() const { return made + queries + taken + mixed; }

      private:
        void add(const Latent &latent, int64_t heads, int64_t tokens) {
            const auto raise = [](int64_t &most, int64_t wanted) { most = std::max(most, wanted); };
            raise(places, HeadRows::places(heads, tokens));
            raise(made, tokens * latent.first.out_features);
            if (latent.query.packed) raise(queries, tokens * latent.query.out_features);
            raise(taken, places * std::max(latent.rank, latent.value));
            raise(mixed, tokens * heads * latent.value);
            raise(widest, std::max(latent.rank, latent.plain));
        }
    };

    void take(Arena &arena, const Sizes &sizes, int64_t threads) {
        made = arena.take<T>(sizes.made);
        queries = arena.take<T>(sizes.queries);
        taken = arena.take<T>(sizes.taken);
        mixed = arena.take<T>(sizes.mixed);
        if (sizes.places) staging.take(arena, sizes.places, sizes.widest, threads);
    }
};

// Puts what is rotated and the latent of a head where it wants them: half of each, then the others. Without the former
// there are zeros.
template <typename T> void spread(const Latent &sizes, const T *rotated, const T *latent, T *to) {
    const int64_t turned = sizes.rotated / 2, kept = sizes.rank / 2;
    for (int half = 0; half < 2; half++, to += turned + kept) {
        if (rotated)
            std::memcpy(to, rotated + half * turned, sizeof(T) * turned);
        else
            std::memset(static_cast<void *>(to), 0, sizeof(T) * turned);
        std::memcpy(to + turned, latent + half * kept, sizeof(T) * kept);
    }
}

// The latent of such a head.
template <typename T> void gather(const Latent &sizes, const T *head, T *latent) {
    const int64_t turned = sizes.rotated / 2, kept = sizes.rank / 2;
    for (int half = 0; half < 2; half++)
        std::memcpy(latent + half * kept, head + half * (turned + kept) + turned, sizeof(T) * kept);
}

} // namespace

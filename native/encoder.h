// An encoder's whole pass over a batch of texts.
//
// Texts never meet, so a thread can take some of them through all layers on its own: what it makes stays in its cache,
// nobody waits, and a layer's weights are read for each such share of a hundred or two tokens. Where the texts are too
// few or too unlike for that, all threads go through the layers together, as a decoder's do.
#pragma once
#include <algorithm>

#include "self_attention.h"
#include "staging.h"

namespace {

// Tokens of a share: enough to use each panel of a weight many times, few enough to stay in a core's cache.
constexpr int64_t SHARE = 192, LEAST_SHARE = 48;

// A text of a share: which of the batch, and its rows of the share's.
struct Placed {
    int64_t text, first, end;
    int64_t tokens() const { return end - first; }
};

// Some texts that are computed together, and how long that takes, in tokens without their attention. (Containers are of
// types of this namespace alone, or the instruction sets would share their functions.)
struct Share {
    std::vector<Placed> texts;
    int64_t cost = 0;
    int64_t tokens() const { return texts.back().end; }
};

// A batch cut into shares, the longest texts first and the smallest shares last, so that threads end together.
class Shares {
    // Attention takes a text of this many tokens about twice the time that the rest does.
    static constexpr int64_t ATTENTION_DOUBLES = 1500;
    static int64_t cost(int64_t tokens) { return tokens + tokens * tokens / ATTENTION_DOUBLES; }

    void add(const Placed &text, bool begins) {
        if (begins) all.emplace_back();
        Share &share = all.back();
        const int64_t first = begins ? 0 : share.tokens();
        share.texts.push_back({text.text, first, first + text.tokens()});
        share.cost += cost(text.tokens());
    }

    // All texts, with their rows of the batch.
    static std::vector<Placed> placed(const Texts &texts) {
        std::vector<Placed> found;
        for (int64_t i = 0; i < texts.count; i++) found.push_back({i, texts.starts[i], texts.starts[i + 1]});
        return found;
    }

  public:
    std::vector<Share> all;

    Shares(const Texts &texts, int threads) {
        std::vector<Placed> order = placed(texts);
        std::sort(order.begin(), order.end(), [](const Placed &a, const Placed &b) {
            return a.tokens() > b.tokens() || (a.tokens() == b.tokens() && a.text < b.text);
        });
        int64_t left = texts.starts[texts.count], room = 0;
        for (const Placed &text : order) {
            const bool begins = room < text.tokens();
            if (begins) {
                const int64_t fair = left / (4 * threads);
                room = fair > SHARE ? SHARE : fair < LEAST_SHARE ? LEAST_SHARE : fair;
            }
            add(text, begins);
            room -= text.tokens();
            left -= text.tokens();
        }
    }

    // Whether threads that take one share after the other are busy for most of the time.
    bool keep_busy(int threads) const {
        std::vector<Share> busy(threads);
        const auto less = [](const Share &a, const Share &b) { return a.cost < b.cost; };
        int64_t costs = 0;
        for (const Share &share : all) {
            std::min_element(busy.begin(), busy.end(), less)->cost += share.cost;
            costs += share.cost;
        }
        return 5 * costs >= 4 * threads * std::max_element(busy.begin(), busy.end(), less)->cost;
    }

    // All in one, in the order of the batch.
    void join(const Texts &texts) {
        all.clear();
        for (const Placed &text : placed(texts)) add(text, text.text == 0);
    }
};

// Memory of a team for one share after the other.
template <typename T> struct EncoderRoom {
    T *residual, *kept, *qkv, *mixed, *middle;
    Rows laid;
    Staging<T> staging;
    std::vector<AttentionRoom<T>> attention;    // of each thread

    static int64_t widest(const Encoder &encoder) { return std::max(encoder.layers->down.ins, encoder.hidden_size); }
    static int64_t laid_bytes(const Encoder &encoder, int64_t tokens) {
        return tokens * laid_row_bytes(encoder.layers->down);
    }

    static int64_t size(const Encoder &encoder, int64_t tokens, int64_t longest, int threads) {
        const int64_t rows = tokens * (6 * encoder.hidden_size + encoder.layers->down.ins);
        return rows * sizeof(T) + laid_bytes(encoder, tokens) + Staging<T>::size(tokens, widest(encoder), threads) +
               threads * AttentionRoom<T>::size(longest, encoder.hidden_size / encoder.num_heads) + 16 * 64;
    }

    EncoderRoom(Arena &arena, const Encoder &encoder, int64_t tokens, int64_t longest, int threads)
        : attention(threads) {
        const int64_t hidden = encoder.hidden_size;
        residual = arena.take<T>(tokens * hidden);
        kept = arena.take<T>(tokens * hidden);
        qkv = arena.take<T>(tokens * 3 * hidden);
        mixed = arena.take<T>(tokens * hidden);
        middle = arena.take<T>(tokens * encoder.layers->down.ins);
        laid = Rows{arena.take<char>(laid_bytes(encoder, tokens)), laid_row_bytes(encoder.layers->down)};
        staging.take(arena, tokens, widest(encoder), threads, true);
        for (auto &room : attention) room.take(arena, longest, hidden / encoder.num_heads);
    }
};

// One thread's view of a pass over one share.
template <typename T> class EncoderPass {
    const Encoder &encoder;
    const Texts &texts;
    const Share &share;
    const EncoderRoom<T> &room;
    Team &team;
    const int64_t hidden = encoder.hidden_size;

    void norm_row(const T *x, const LayerNorm &norm, T *to) const {
        layer_norm(x, norm, hidden, encoder.eps, [&](int64_t i, vfloat value) { store_narrow(to + i, value); });
    }

    void norm_rows(T *x, const LayerNorm &norm, int64_t rows) {
        const Range mine = team.share(rows);
        for (int64_t row = mine.begin; row < mine.end; row++) norm_row(x + row * hidden, norm, x + row * hidden);
        team.wait();
    }

    // Rows as the weight wants them: normalized before, in a pre-norm encoder.
    Rows prepared(const T *x, const Tiles &tiles, const LayerNorm &norm, const Weight &weight) {
        const bool normed = encoder.pre_norm && norm.weight;
        return room.staging.prepare(tiles, weight, team, [&](int64_t row, T *space) {
            const T *from = x + row * weight.ins;
            if (!normed) return from;
            norm_row(from, norm, space);
            return static_cast<const T *>(space);
        });
    }

    template <typename Into> void multiply(const Rows &x, const Tiles &tiles, const Weight &weight, const Into &sink) {
        product(x, tiles, weight, sink, team);
        team.wait();
    }

    void embed_row(const Placed &text, int64_t at, T *to) const {
        const int64_t token = texts.starts[text.text] + at;
        const int64_t type = texts.type_ids ? texts.type_ids[token] : 0;
        const T *word = static_cast<const T *>(encoder.words) + texts.token_ids[token] * hidden;
        const T *place = encoder.positions
                             ? static_cast<const T *>(encoder.positions) + (encoder.first_position + at) * hidden
                             : nullptr;
        const T *kind = encoder.types ? static_cast<const T *>(encoder.types) + type * hidden : nullptr;
        float sum[MOST_HIDDEN];
        for (int64_t i = 0; i < hidden; i += LANES) {
            vfloat value = load_wide(word + i);
            if (kind) value += load_wide(kind + i);
            if (place) value += load_wide(place + i);
            store(sum + i, value);
        }
        layer_norm(sum, encoder.embedding_norm, hidden, encoder.eps,
                   [&](int64_t i, vfloat value) { store_narrow(to + i, value); });
    }

    void embed() {
        const Range mine = team.share(share.tokens());
        for (const Placed &text : share.texts)
            for (int64_t row = text.first; row < text.end; row++)
                if (row >= mine.begin && row < mine.end)
                    embed_row(text, row - text.first, room.residual + row * hidden);
        team.wait();
    }

    void attend(const EncoderLayer &layer) {
        SelfAttention<T> attention(encoder, layer, room.attention[team.thread]);
        int64_t next = team.take(), task = 0;
        for (const Placed &text : share.texts) {
            const int64_t first = text.first, tokens = text.tokens();
            // A thread of its own has no need to cut texts that see all of themselves.
            const int64_t stretch = team.threads == 1 && layer.window < 0 ? tokens : STRETCH;
            for (int64_t from = 0; from < tokens; from += stretch)
                for (int head = 0; head < encoder.num_heads; head++, task++) {
                    if (task != next) continue;
                    attention.run(room.qkv + first * 3 * hidden, int(tokens), head, int(from),
                                  int(std::min(from + stretch, tokens)), room.mixed + first * hidden);
                    next = team.take();
                }
        }
        team.wait();
    }

    // Keeps one row of each text: after the last layer's attention tokens no longer meet.
    void keep() {
        const Range mine = team.share(share.texts.size());
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t row = texts.output == FIRST ? share.texts[i].first : share.texts[i].end - 1;
            std::memcpy(room.kept + i * hidden, room.residual + row * hidden, sizeof(T) * hidden);
            std::memcpy(room.qkv + i * hidden, room.mixed + row * hidden, sizeof(T) * hidden);
        }
        team.wait();
    }

    // What follows attention, but for the last layer's norm.
    void feed_forward(const EncoderLayer &layer, const T *mixed, T *residual, int64_t rows) {
        const Tiles tiles(rows, team);
        const Sink<T> onto{Into::RESIDUAL, residual, nullptr, hidden};
        multiply(prepared(mixed, tiles, {}, layer.out), tiles, layer.out, onto);
        if (!encoder.pre_norm) norm_rows(residual, layer.attention_norm, rows);
        const Rows x = prepared(residual, tiles, layer.mlp_norm, layer.up);
        T *middle = rounds_rows(layer.down) ? room.middle : nullptr;
        multiply(x, tiles, layer.up, ActivatingSink<T>{encoder.activation, middle, room.laid, layer.down.ins});
        const Rows y = middle ? prepared(middle, tiles, {}, layer.down) : room.laid;
        multiply(y, tiles, layer.down, onto);
    }

    // Writes what is wanted of the rows, normalized: one row for each text if one was kept.
    void finish(const T *rows, bool kept, float *out) {
        const LayerNorm &last = encoder.layers[encoder.num_layers - 1].mlp_norm;
        const LayerNorm &norm = encoder.pre_norm ? encoder.final_norm : last;
        const Range mine = team.share(share.texts.size());
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const Placed &text = share.texts[i];
            const int64_t first = kept ? i : text.first, end = kept ? i + 1 : text.end;
            const bool sums = texts.output != TOKENS;
            float *to = out + (sums ? text.text : texts.starts[text.text]) * hidden;
            if (sums) std::fill(to, to + hidden, 0.0f);
            for (int64_t row = first; row < end; row++, to += sums ? 0 : hidden)
                layer_norm(rows + row * hidden, norm, hidden, encoder.eps, [&](int64_t i, vfloat value) {
                    store(to + i, sums ? load(to + i) + value : value);
                });
            if (sums)
                for (int64_t k = 0; k < hidden; k++) to[k] /= float(end - first);
        }
        team.wait();
    }

  public:
    static constexpr int64_t MOST_HIDDEN = 8192;

    EncoderPass(const Encoder &encoder, const Texts &texts, const Share &share, const EncoderRoom<T> &room, Team &team)
        : encoder(encoder), texts(texts), share(share), room(room), team(team) {}

    void run(float *out) {
        embed();
        int64_t rows = share.tokens();
        T *residual = room.residual;
        const T *mixed = room.mixed;
        bool kept = false;
        for (int64_t index = 0; index < encoder.num_layers; index++) {
            const EncoderLayer &layer = encoder.layers[index];
            const Tiles tiles(rows, team);
            const Rows x = prepared(residual, tiles, layer.attention_norm, layer.qkv);
            multiply(x, tiles, layer.qkv, Sink<T>{Into::ROWS, room.qkv, nullptr, 3 * hidden});
            attend(layer);
            const bool last = index == encoder.num_layers - 1;
            if (last && (texts.output == FIRST || texts.output == LAST)) {
                keep();
                kept = true, residual = room.kept, mixed = room.qkv, rows = int64_t(share.texts.size());
            }
            feed_forward(layer, mixed, residual, rows);
            if (!last && !encoder.pre_norm) norm_rows(residual, layer.mlp_norm, rows);
        }
        finish(residual, kept, out);
    }
};

template <typename T> void encode(const Encoder &encoder, const Texts &texts, float *out) {
    static thread_local Arena arena;
    const int64_t products = encoder.hidden_size * encoder.layers->up.outs * texts.starts[texts.count];
    const int threads = products >= PARALLEL_PRODUCTS ? omp_get_max_threads() : 1;
    Shares shares(texts, threads);
    const bool apart = threads == 1 || shares.keep_busy(threads);
    if (!apart) shares.join(texts);
    int64_t most = 0, longest = 0;
    for (const Share &share : shares.all) most = std::max(most, share.tokens());
    for (int64_t i = 0; i < texts.count; i++) longest = std::max<int64_t>(longest, texts.starts[i + 1] - texts.starts[i]);
    const int rooms = apart ? threads : 1, each = apart ? 1 : threads;
    arena.reset(rooms * EncoderRoom<T>::size(encoder, most, longest, each));
    std::vector<EncoderRoom<T>> room;
    for (int i = 0; i < rooms; i++) room.emplace_back(arena, encoder, most, longest, each);
    with_team(threads > 1, [&](Team &team) {
        if (!apart) return EncoderPass<T>(encoder, texts, shares.all[0], room[0], team).run(out);
        for (size_t i = team.take(); i < shares.all.size(); i = team.take()) {
            Barrier barrier;
            Counter counter;
            Team alone{0, 1, &barrier, &counter};
            EncoderPass<T>(encoder, texts, shares.all[i], room[team.thread], alone).run(out);
        }
    });
}

} // namespace

// An encoder's whole pass over a batch of texts.
//
// Texts do not depend on each other, so a thread can take some of them, a micro-batch of a hundred or two tokens,
// through all layers on its own: activations stay in its cache, no thread waits, and a layer's weights are read once
// for each micro-batch. Where the texts are too few or too unlike for that, all threads go through the layers together.
#pragma once
#include <algorithm>

#include "self_attention.h"
#include "staging.h"

namespace {

// Tokens of a micro-batch: enough to use each panel of a weight many times, few enough to stay in a core's cache.
constexpr int64_t MICRO_BATCH_TOKENS = 192, MIN_MICRO_BATCH_TOKENS = 48;

// A text of a micro-batch: its number in the batch, and its rows in the micro-batch.
struct TextSpan {
    int64_t text, first, end;
    int64_t tokens() const { return end - first; }
};

// Texts that are computed together, and how long that takes, in tokens without their attention. (Containers are of
// types of this namespace alone, or the instruction sets would share their functions.)
struct MicroBatch {
    std::vector<TextSpan> texts;
    int64_t cost = 0;
    int64_t tokens() const { return texts.back().end; }
};

// A batch cut into micro-batches: the longest texts first and the smallest last, so that threads end together.
class MicroBatches {
    // Attention takes a text of this many tokens about twice the time that the rest does.
    static constexpr int64_t ATTENTION_DOUBLES = 1500;
    static int64_t cost(int64_t tokens) { return tokens + tokens * tokens / ATTENTION_DOUBLES; }

    void add(const TextSpan &text, bool begins) {
        if (begins) all.emplace_back();
        MicroBatch &micro_batch = all.back();
        const int64_t first = begins ? 0 : micro_batch.tokens();
        micro_batch.texts.push_back({text.text, first, first + text.tokens()});
        micro_batch.cost += cost(text.tokens());
    }

    // All texts, with their rows of the batch.
    static std::vector<TextSpan> spans(const Texts &texts) {
        std::vector<TextSpan> found;
        for (int64_t i = 0; i < texts.count; i++) found.push_back({i, texts.starts[i], texts.starts[i + 1]});
        return found;
    }

  public:
    std::vector<MicroBatch> all;

    NOINLINE MicroBatches(const Texts &texts, int threads) {
        std::vector<TextSpan> order = spans(texts);
        std::sort(order.begin(), order.end(), [](const TextSpan &a, const TextSpan &b) {
            return a.tokens() > b.tokens() || (a.tokens() == b.tokens() && a.text < b.text);
        });
        int64_t left = texts.starts[texts.count], space = 0;
        for (const TextSpan &text : order) {
            const bool begins = space < text.tokens();
            if (begins) {
                const int64_t fair = left / (4 * threads);
                space = std::clamp(fair, MIN_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS);
            }
            add(text, begins);
            space -= text.tokens();
            left -= text.tokens();
        }
    }

    // Whether threads that take one micro-batch after the other are busy for most of the time.
    NOINLINE bool balanced(int threads) const {
        std::vector<MicroBatch> busy(threads);
        const auto less = [](const MicroBatch &a, const MicroBatch &b) { return a.cost < b.cost; };
        int64_t costs = 0;
        for (const MicroBatch &micro_batch : all) {
            std::min_element(busy.begin(), busy.end(), less)->cost += micro_batch.cost;
            costs += micro_batch.cost;
        }
        return 5 * costs >= 4 * threads * std::max_element(busy.begin(), busy.end(), less)->cost;
    }

    // All in one, in the order of the batch.
    NOINLINE void join(const Texts &texts) {
        all.clear();
        for (const TextSpan &text : spans(texts)) add(text, text.text == 0);
    }
};

// Buffers of a team for one micro-batch after the other.
template <typename T> struct EncoderWorkspace {
    T *residual, *pooled, *qkv, *attention_out, *intermediate;
    Rows packed_rows;
    Staging<T> staging;
    std::vector<AttentionWorkspace<T>> attention;    // of each thread

    static int64_t widest(const Encoder &encoder) {
        return std::max(encoder.layers->down.in_features, encoder.hidden_size);
    }

    static int64_t size(const Encoder &encoder, int64_t tokens, int64_t longest, int threads) {
        const int64_t rows = tokens * (6 * encoder.hidden_size + encoder.layers->down.in_features);
        return rows * sizeof(T) + packed_bytes(encoder.layers->down, tokens) + Staging<T>::size(tokens, widest(encoder), threads) +
               threads * AttentionWorkspace<T>::size(longest, encoder.hidden_size / encoder.num_heads) + 16 * 64;
    }

    EncoderWorkspace(Arena &arena, const Encoder &encoder, int64_t tokens, int64_t longest, int threads)
        : attention(threads) {
        const int64_t hidden = encoder.hidden_size;
        residual = arena.take<T>(tokens * hidden);
        pooled = arena.take<T>(tokens * hidden);
        qkv = arena.take<T>(tokens * 3 * hidden);
        attention_out = arena.take<T>(tokens * hidden);
        intermediate = arena.take<T>(tokens * encoder.layers->down.in_features);
        packed_rows = Rows{arena.take<char>(packed_bytes(encoder.layers->down, tokens)),
                           packed_row_bytes(encoder.layers->down)};
        staging.take(arena, tokens, widest(encoder), threads, true);
        for (auto &workspace : attention) workspace.take(arena, longest, hidden / encoder.num_heads);
    }
};

// One thread's view of a pass over one micro-batch.
template <typename T> class EncoderPass {
    const Encoder &encoder;
    const Texts &texts;
    const MicroBatch &micro_batch;
    const EncoderWorkspace<T> &workspace;
    Team &team;
    const int64_t hidden = encoder.hidden_size;

    void norm_row(const T *x, const LayerNorm &norm, T *to) const {
        layer_norm(x, norm, encoder.rms, hidden, encoder.eps,
                   [&](int64_t i, vfloat value) { store_narrow(to + i, value); });
    }

    void norm_rows(T *x, const LayerNorm &norm, int64_t rows) {
        const Range mine = team.share(rows);
        for (int64_t row = mine.begin; row < mine.end; row++) norm_row(x + row * hidden, norm, x + row * hidden);
        team.wait();
    }

    // Rows as the weight wants them: normalized before, in a pre-norm encoder.
    NOINLINE Rows prepared(const T *x, const Tiles &tiles, const LayerNorm &norm, const Weight &weight) {
        const bool normed = encoder.pre_norm && norm.weight;
        return workspace.staging.prepare(tiles, weight, team, [&](int64_t row, T *space) {
            const T *from = x + row * weight.in_features;
            if (!normed) return from;
            norm_row(from, norm, space);
            return static_cast<const T *>(space);
        });
    }

    template <typename AnyEpilogue>
    NOINLINE void multiply(const Rows &x, const Tiles &tiles, const Weight &weight, const AnyEpilogue &epilogue) {
        product(x, tiles, weight, epilogue, team);
        team.wait();
    }

    void embed_row(const TextSpan &text, int64_t at, T *to) const {
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
        const auto put = [&](int64_t i, vfloat value) { store_narrow(to + i, value); };
        if (encoder.embedding_norm.weight)
            layer_norm(sum, encoder.embedding_norm, encoder.rms, hidden, encoder.eps, put);
        else
            for (int64_t i = 0; i < hidden; i += LANES) put(i, load(sum + i));
    }

    void embed() {
        const Range mine = team.share(micro_batch.tokens());
        for (const TextSpan &text : micro_batch.texts)
            for (int64_t row = text.first; row < text.end; row++)
                if (row >= mine.begin && row < mine.end)
                    embed_row(text, row - text.first, workspace.residual + row * hidden);
        team.wait();
    }

    void attend(const EncoderLayer &layer) {
        SelfAttention<T> attention(encoder, layer, workspace.attention[team.thread]);
        int64_t next = team.take(), task = 0;
        for (const TextSpan &text : micro_batch.texts) {
            const int64_t first = text.first, tokens = text.tokens();
            // A thread of its own has no need to cut texts that see all of themselves.
            const int64_t query_block = team.threads == 1 && layer.window < 0 ? tokens : QUERY_BLOCK;
            for (int64_t from = 0; from < tokens; from += query_block)
                for (int head = 0; head < encoder.num_heads; head++, task++) {
                    if (task != next) continue;
                    attention.run(workspace.qkv + first * 3 * hidden, int(tokens), head, int(from),
                                  int(std::min(from + query_block, tokens)), workspace.attention_out + first * hidden);
                    next = team.take();
                }
        }
        team.wait();
    }

    // Pools the first or last row of each text: what follows the last attention needs no other.
    void pool() {
        const Range mine = team.share(micro_batch.texts.size());
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t row = texts.output == FIRST ? micro_batch.texts[i].first : micro_batch.texts[i].end - 1;
            std::memcpy(workspace.pooled + i * hidden, workspace.residual + row * hidden, sizeof(T) * hidden);
            std::memcpy(workspace.qkv + i * hidden, workspace.attention_out + row * hidden, sizeof(T) * hidden);
        }
        team.wait();
    }

    // What follows attention, but for the last layer's norm.
    void feed_forward(const EncoderLayer &layer, const T *attention_out, T *residual, int64_t rows) {
        const Tiles tiles(rows, team);
        const Epilogue<T> onto{EpilogueMode::ADD, residual, nullptr, hidden};
        multiply(prepared(attention_out, tiles, {}, layer.out), tiles, layer.out, onto);
        if (!encoder.pre_norm) norm_rows(residual, layer.attention_norm, rows);
        const Rows x = prepared(residual, tiles, layer.mlp_norm, layer.up);
        T *intermediate = quantizes_rows(layer.down) ? workspace.intermediate : nullptr;
        const int64_t stride = layer.down.in_features;
        multiply(x, tiles, layer.up,
                 ActivationEpilogue<T>{encoder.activation, intermediate, workspace.packed_rows, stride});
        const Rows y = intermediate ? prepared(intermediate, tiles, {}, layer.down) : workspace.packed_rows;
        multiply(y, tiles, layer.down, onto);
    }

    // Writes what is wanted of the rows, normalized: one row for each text if one was pooled.
    void finish(const T *rows, bool pooled, float *out) {
        const LayerNorm &last = encoder.layers[encoder.num_layers - 1].mlp_norm;
        const LayerNorm &norm = encoder.pre_norm ? encoder.final_norm : last;
        const Range mine = team.share(micro_batch.texts.size());
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const TextSpan &text = micro_batch.texts[i];
            const int64_t first = pooled ? i : text.first, end = pooled ? i + 1 : text.end;
            const bool sums = texts.output != TOKENS;
            float *to = out + (sums ? text.text : texts.starts[text.text]) * hidden;
            if (sums) std::fill(to, to + hidden, 0.0f);
            for (int64_t row = first; row < end; row++, to += sums ? 0 : hidden)
                layer_norm(rows + row * hidden, norm, encoder.rms, hidden, encoder.eps, [&](int64_t i, vfloat value) {
                    store(to + i, sums ? load(to + i) + value : value);
                });
            if (sums)
                for (int64_t k = 0; k < hidden; k++) to[k] /= float(end - first);
        }
        team.wait();
    }

  public:
    static constexpr int64_t MOST_HIDDEN = 8192;

    EncoderPass(const Encoder &encoder, const Texts &texts, const MicroBatch &micro_batch,
                const EncoderWorkspace<T> &workspace, Team &team)
        : encoder(encoder), texts(texts), micro_batch(micro_batch), workspace(workspace), team(team) {}

    void run(float *out) {
        embed();
        int64_t rows = micro_batch.tokens();
        T *residual = workspace.residual;
        const T *attention_out = workspace.attention_out;
        bool pooled = false;
        for (int64_t index = 0; index < encoder.num_layers; index++) {
            const EncoderLayer &layer = encoder.layers[index];
            const Tiles tiles(rows, team);
            const Rows x = prepared(residual, tiles, layer.attention_norm, layer.qkv);
            multiply(x, tiles, layer.qkv, Epilogue<T>{EpilogueMode::STORE, workspace.qkv, nullptr, 3 * hidden});
            attend(layer);
            const bool last = index == encoder.num_layers - 1;
            if (last && (texts.output == FIRST || texts.output == LAST)) {
                pool();
                pooled = true, residual = workspace.pooled, attention_out = workspace.qkv;
                rows = int64_t(micro_batch.texts.size());
            }
            feed_forward(layer, attention_out, residual, rows);
            if (!last && !encoder.pre_norm) norm_rows(residual, layer.mlp_norm, rows);
        }
        finish(residual, pooled, out);
    }
};

template <typename T> void encode(const Encoder &encoder, const Texts &texts, float *out) {
    static thread_local Arena arena;
    const int64_t products = encoder.hidden_size * encoder.layers->up.out_features * texts.starts[texts.count];
    const int threads = products >= PARALLEL_PRODUCTS ? omp_get_max_threads() : 1;
    MicroBatches micro_batches(texts, threads);
    const bool independent = threads == 1 || micro_batches.balanced(threads);
    if (!independent) micro_batches.join(texts);
    int64_t most = 0, longest = 0;
    for (const MicroBatch &micro_batch : micro_batches.all) most = std::max(most, micro_batch.tokens());
    for (int64_t i = 0; i < texts.count; i++)
        longest = std::max<int64_t>(longest, texts.starts[i + 1] - texts.starts[i]);
    const int num_workspaces = independent ? threads : 1, each = independent ? 1 : threads;
    arena.reset(num_workspaces * EncoderWorkspace<T>::size(encoder, most, longest, each));
    std::vector<EncoderWorkspace<T>> workspaces;
    for (int i = 0; i < num_workspaces; i++) workspaces.emplace_back(arena, encoder, most, longest, each);
    with_team(threads > 1, [&](Team &team) {
        if (!independent) return EncoderPass<T>(encoder, texts, micro_batches.all[0], workspaces[0], team).run(out);
        for (size_t i = team.take(); i < micro_batches.all.size(); i = team.take()) {
            Barrier barrier;
            Counter counter;
            Team alone{0, 1, &barrier, &counter, team.refused};
            EncoderPass<T>(encoder, texts, micro_batches.all[i], workspaces[team.thread], alone).run(out);
        }
    });
}

} // namespace

// A decoder's whole forward pass in one parallel region. What a thread needs next it waits for only where another
// thread makes it, and nothing is allocated once the longest pass was seen.
#pragma once
#include <algorithm>
#include <map>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "delta_net.h"
#include "latent.h"
#include "mamba_mixer.h"
#include "staging.h"

namespace {

// Whether something with a state stands in the place of a layer's attention.
inline bool has_states(const DecoderLayer &layer) { return layer.convolution || layer.delta || layer.mamba; }

// The plan of each layer's attention; layers with the same window share one.
class Plans {
    std::map<int32_t, Plan> of_window;

  public:
    std::vector<const Plan *> of_layers;

    void make(const Decoder &decoder, const Batch &batch) {
        of_layers.clear();
        for (int64_t i = 0; i < decoder.num_layers; i++) {
            if (has_states(decoder.layers[i])) {
                of_layers.push_back(nullptr);
                continue;
            }
            Heads heads = decoder.heads;
            heads.window = decoder.layers[i].window;
            Plan &plan = of_window[heads.window];
            bool made = false;
            for (const Plan *other : of_layers) made |= other == &plan;
            if (!made) plan.make(batch, heads);
            of_layers.push_back(&plan);
        }
    }
};

// How much the MLPs of all layers need at most: rows, of tokens or of all the experts that they go to, and numbers.
struct MlpSizes {
    int64_t widest = 0, gated = 0, places = 0, experts = 0;

    MlpSizes(const Decoder &decoder, int64_t tokens) {
        for (int64_t i = 0; i < decoder.num_layers; i++) {
            const DecoderLayer &layer = decoder.layers[i];
            if (!layer.experts) {
                add(tokens, layer.down);
                continue;
            }
            const Experts &mixed = *layer.experts;
            places = std::max(places, Routes::most_places(mixed, tokens));
            experts = std::max<int64_t>(experts, mixed.count);
            add(places, *mixed.down);
            if (mixed.shared_down.packed) add(tokens, mixed.shared_down);
        }
    }

  private:
    void add(int64_t rows, const Weight &down) {
        widest = std::max(widest, down.in_features);
        gated = std::max(gated, rows * down.in_features);
    }
};

// Buffers that the threads of a pass share.
template <typename T> struct Workspace {
    T *residual, *gathered_residual, *qkv, *query, *attention_out, *gated, *part;
    // Of layers with experts: what they are given, what they give, and of each row how much the shared one counts.
    T *normalized, *returned;
    float *shared_shares;
    float *scores;      // of each expert, of some rows of each thread and once more
    float *mixer_floats, *task_memory;  // what stands in the place of attention needs: all threads, and each
    int64_t task_size = 0;              // how much each
    const MlpSizes sizes;
    Staging<T> staging;
    LatentWorkspace<T> latent;
    bool has_latents;

    Workspace(Arena &arena, const Decoder &decoder, const Pass &pass, int64_t threads)
        : sizes(decoder, pass.num_tokens) {
        const Heads &heads = decoder.heads;
        const int64_t tokens = pass.num_tokens, hidden_size = decoder.hidden_size;
        const int64_t query_size = heads.num_heads * heads.head_dim;
        int64_t qkv_size = query_size + 2 * heads.num_kv_heads * heads.head_dim, mixed_size = query_size;
        int64_t mixer_size = 0;
        const typename LatentWorkspace<T>::Sizes latents(decoder, tokens);
        int64_t widest = std::max(sizes.widest, hidden_size);
        for (int64_t i = 0; i < decoder.num_layers; i++) {
            const DecoderLayer &layer = decoder.layers[i];
            widest = std::max(widest, widest_of(layer));
            if (!layer.latent) qkv_size = std::max(qkv_size, layer.qkv.out_features);
            mixed_size = std::max(mixed_size, mixed_size_of(layer));
            mixer_size = std::max(mixer_size, mixer_floats_of(layer, tokens));
            task_size = std::max(task_size, task_floats_of(layer));
        }
        const int64_t routed = sizes.places ? tokens : 0;
        const int64_t staged = std::max(tokens, sizes.places);
        const int64_t activations = tokens * (3 * hidden_size + qkv_size + 2 * mixed_size) + sizes.gated +
                                    (routed + sizes.places) * hidden_size + latents.numbers();
        const int64_t scored = threads * (ROUTED_ROWS + 1) * sizes.experts;
        const int64_t floats = routed + scored + mixer_size + threads * task_size;
        // Behind all rows as many as a tile has may be read: see prepare_all.
        const int64_t behind = TILE_ROWS * widest;
        arena.reset(sizeof(T) * (activations + behind) + sizeof(float) * floats + Staging<T>::size(staged, widest, threads) +
                    (latents.places ? Staging<T>::size(latents.places, latents.widest, threads) : 0) + 24 * 64);
        residual = arena.take<T>(tokens * hidden_size);
        gathered_residual = arena.take<T>(tokens * hidden_size);
        qkv = arena.take<T>(tokens * qkv_size);
        query = arena.take<T>(tokens * mixed_size);
        attention_out = arena.take<T>(tokens * mixed_size);
        gated = arena.take<T>(sizes.gated);
        part = arena.take<T>(tokens * hidden_size);     // what is to be normalized before it is added
        normalized = arena.take<T>(routed * hidden_size);
        returned = arena.take<T>(sizes.places * hidden_size);
        shared_shares = arena.take<float>(routed);
        scores = arena.take<float>(scored);
        mixer_floats = arena.take<float>(mixer_size);
        task_memory = arena.take<float>(threads * task_size);
        staging.take(arena, staged, widest, threads);
        latent.take(arena, latents, threads);
        has_latents = latents.places > 0;
    }

  private:
    // The most numbers of a token, beside the layer's first product, in what stands in the place of attention.
    static int64_t mixed_size_of(const DecoderLayer &layer) {
        if (layer.convolution) return layer.convolution->channels;
        return layer.delta ? layer.delta->convolution.channels : layer.mamba ? layer.mamba->convolution.channels : 0;
    }

    static int64_t mixer_floats_of(const DecoderLayer &layer, int64_t tokens) {
        if (layer.delta) return DeltaLayer<T>::shared_floats(*layer.delta, tokens);
        return layer.mamba ? MambaLayer<T>::shared_floats(*layer.mamba, tokens) : 0;
    }

    static int64_t task_floats_of(const DecoderLayer &layer) {
        return layer.delta ? delta_floats(layer.delta->rule) : layer.mamba ? mamba_floats(layer.mamba->scan) : 0;
    }

    // The most inputs of a product that the layer's attention is made of.
    static int64_t widest_of(const DecoderLayer &layer) {
        const int64_t query = layer.latent && layer.latent->query.packed ? layer.latent->query.in_features : 0;
        return std::max(layer.out.in_features, query);
    }
};

// How the rows of a pass lie under each head where attention is latent: all of them, and those whose logits are wanted.
struct LatentRows {
    HeadRows of_tokens, of_logits;

    void make(const Decoder &decoder, const Pass &pass) {
        of_tokens.make(decoder.heads.num_heads, pass.num_tokens);
        of_logits.make(decoder.heads.num_heads, pass.num_logits);
    }
};

// One thread's view of a pass.
template <typename T> class Forward {
    const Decoder &decoder;
    const Pass &pass;
    const Workspace<T> &workspace;
    const std::vector<const Plan *> &plans;  // of each layer
    Routes &routes;
    const LatentRows &latent_rows;
    Team &team;
    bool has_side_work = pass.side_work && team.thread == 0;
    const int64_t hidden_size = decoder.hidden_size;
    const int64_t query_size = decoder.heads.num_heads * decoder.heads.head_dim;

    // Rows of x, normalized if there is a norm, as the weight wants them. With `sources`, those that they name.
    NOINLINE Rows prepared(const T *x, const Tiles &tiles, const Norm &norm, const Weight &weight,
                           const int64_t *sources = nullptr) {
        // Of the workspace, which ends with room for them.
        if (!norm.weight && !sources) return workspace.staging.prepare_all(tiles, weight, team, x, true);
        return workspace.staging.prepare(tiles, weight, team, [&](int64_t row, T *space) {
            const T *from = x + (sources ? sources[row] : row) * weight.in_features;
            if (!norm.weight) return from;
            norm_row(from, norm, space, weight.in_features, decoder.eps);
            return static_cast<const T *>(space);
        });
    }

    // What the caller has to do besides, before a large product: its parts go to whoever is free.
    void do_side_work() {
        if (has_side_work) has_side_work = pass.side_work();
    }

    NOINLINE void multiply(const Rows &x, const Tiles &tiles, const Weight &weight, EpilogueMode mode, T *out,
                           int64_t stride) {
        product(x, tiles, weight, Epilogue<T>{mode, out, nullptr, stride}, team);
        team.wait();
    }

    // Adds the product of x to the residual, normalized before if there is a norm.
    NOINLINE void add(const T *x, const Tiles &tiles, const Weight &weight, const Norm &norm, T *residual) {
        const Rows rows = prepared(x, tiles, {}, weight);
        if (!norm.weight) return multiply(rows, tiles, weight, EpilogueMode::ADD, residual, hidden_size);
        multiply(rows, tiles, weight, EpilogueMode::STORE, workspace.part, hidden_size);
        const Range range = team.share(tiles.rows);
        for (int64_t row = range.begin; row < range.end; row++) {
            T *part = workspace.part + row * hidden_size;
            norm_row(part, norm, part, hidden_size, decoder.eps);
            add_row(part, residual + row * hidden_size, hidden_size);
        }
        team.wait();
    }

    void embed() {
        const Range range = team.share(pass.num_tokens);
        for (int64_t t = range.begin; t < range.end; t++) {
            T *to = workspace.residual + t * hidden_size;
            if (decoder.embedding)
                std::memcpy(to, static_cast<const T *>(decoder.embedding) + pass.token_ids[t] * hidden_size,
                            sizeof(T) * hidden_size);
            else
                unpack(decoder.head, pass.token_ids[t], to);
            if (decoder.embedding_scale != 1.0f)
                for (int64_t i = 0; i < hidden_size; i++) to[i] = narrow<T>(widen(to[i]) * decoder.embedding_scale);
            if (decoder.positions)
                add_row(static_cast<const T *>(decoder.positions) + pass.positions[t] * hidden_size, to, hidden_size);
        }
        team.wait();
    }

    // Gathers the rows whose logits are wanted: behind the last layer in which tokens meet, nothing needs the others.
    void gather_logit_rows(const DecoderLayer &layer) {
        const int64_t size = has_states(layer) ? layer.out.in_features : query_size;
        const Range range = team.share(pass.num_logits);
        for (int64_t i = range.begin; i < range.end; i++) {
            const int64_t from = pass.logit_rows[i];
            std::memcpy(workspace.query + i * size, workspace.attention_out + from * size, sizeof(T) * size);
            std::memcpy(workspace.gathered_residual + i * hidden_size, workspace.residual + from * hidden_size,
                        sizeof(T) * hidden_size);
        }
        team.wait();
    }

    // What a layer does with tokens beside each other; `plan` is that of its attention.
    void mix_tokens(const DecoderLayer &layer, const Plan *plan) {
        const Tiles tiles(pass.num_tokens, team);
        if (layer.latent) {
            project_latent(layer, tiles);
        } else {
            const Rows x = prepared(workspace.residual, tiles, layer.attention_pre_norm, layer.qkv);
            multiply(x, tiles, layer.qkv, EpilogueMode::STORE, workspace.qkv, layer.qkv.out_features);
        }
        if (layer.convolution) return convolve_layer(*layer.convolution);
        if (layer.delta) return run_mixer<DeltaLayer<T>>(*layer.delta, layer.qkv.out_features);
        if (layer.mamba) return run_mixer<MambaLayer<T>>(*layer.mamba, layer.qkv.out_features);
        if (decoder.heads.cache_dtype == INT8)
            attend_cache<int8_t>(layer, *plan);
        else
            attend_cache<T>(layer, *plan);
        if (!layer.gated) return;
        const int64_t stride = layer.qkv.out_features;
        gate_rows(workspace.attention_out, workspace.qkv + stride - query_size, query_size, stride,
                  team.share(pass.num_tokens));
        team.wait();
    }

    template <typename Layer, typename Mixer> void run_mixer(const Mixer &mixer, int64_t stride) {
        Layer layer(mixer, *pass.states, workspace.qkv, stride, pass.num_tokens, workspace.query,
                    workspace.mixer_floats, workspace.attention_out);
        layer.take_up(team);
        team.wait();
        layer.run(team, workspace.task_memory + team.thread * workspace.task_size);
        team.wait();
        layer.finish(team, decoder.eps);
        team.wait();
    }

    // Each thread takes some channels of all sequences, so that one long prompt is shared, too.
    void convolve_layer(const Convolution &conv) {
        const StateSpans &spans = *pass.states;
        const Range range = team.share(Channels::blocks(conv) * spans.count);
        for (int64_t i = range.begin; i < range.end; i++)
            short_convolution(spans, conv, i % spans.count, i / spans.count, static_cast<const T *>(workspace.qkv),
                              workspace.attention_out);
        team.wait();
    }

    // Queries of all heads, and the one of keys and of values, side by side as those of other layers are.
    void project_latent(const DecoderLayer &layer, const Tiles &tiles) {
        const Latent &latent = *layer.latent;
        const LatentWorkspace<T> &space = workspace.latent;
        const int64_t stride = latent.first.out_features;
        const Rows x = prepared(workspace.residual, tiles, layer.attention_pre_norm, latent.first);
        multiply(x, tiles, latent.first, EpilogueMode::STORE, space.made, stride);
        if (!latent.query.packed) return take_to_latent(latent, space.made, stride);
        const Rows normed = workspace.staging.prepare(tiles, latent.query, team, [&](int64_t row, T *to) {
            norm_row(space.made + row * stride, latent.query_norm, to, latent.query.in_features, latent.eps);
            return static_cast<const T *>(to);
        });
        multiply(normed, tiles, latent.query, EpilogueMode::STORE, space.queries, latent.query.out_features);
        take_to_latent(latent, space.queries, latent.query.out_features);
    }

    // The same of heads' queries, of rows that lie `stride` apart.
    void take_to_latent(const Latent &latent, const T *queries, int64_t stride) {
        const HeadRows &rows = latent_rows.of_tokens;
        const LatentWorkspace<T> &space = workspace.latent;
        const Tiles by_heads(rows.tiles);
        const int64_t per_head = latent.plain + latent.rotated, dim = latent.rank + latent.rotated;
        const Rows plain = space.staging.prepare(by_heads, *latent.key_up, team, [&](int64_t place, T *) {
            return queries + rows.row_of(place) * stride + rows.head_of(place) * per_head;
        });
        multiply(plain, by_heads, *latent.key_up, EpilogueMode::STORE, space.taken, latent.rank);
        const int64_t heads = decoder.heads.num_heads, made = latent.first.out_features;
        const Range range = team.share(pass.num_tokens);
        for (int64_t row = range.begin; row < range.end; row++) {
            T *to = workspace.qkv + row * (heads + 2) * dim;
            for (int64_t head = 0; head < heads; head++, to += dim)
                spread(latent, queries + row * stride + head * per_head + latent.plain,
                       space.taken + rows.place(head, row) * latent.rank, to);
            const T *rotated = space.made + (row + 1) * made - latent.rotated;
            T kept[MAX_HEAD_DIM];
            norm_row(rotated - latent.rank, latent.norm, kept, latent.rank, latent.eps);
            spread(latent, rotated, static_cast<const T *>(kept), to);
            spread(latent, static_cast<const T *>(nullptr), static_cast<const T *>(kept), to + dim);
        }
        team.wait();
    }

    // Heads' values of what attention gives, row after row.
    const T *values_of(const Latent &latent, const T *attention_out, int64_t count) {
        const HeadRows &rows = count == pass.num_tokens ? latent_rows.of_tokens : latent_rows.of_logits;
        const LatentWorkspace<T> &space = workspace.latent;
        const Tiles by_heads(rows.tiles);
        const int64_t dim = latent.rank + latent.rotated, heads = decoder.heads.num_heads;
        const Rows latents = space.staging.prepare(by_heads, *latent.value_up, team, [&](int64_t place, T *to) {
            gather(latent, attention_out + rows.row_of(place) * query_size + rows.head_of(place) * dim, to);
            return static_cast<const T *>(to);
        });
        multiply(latents, by_heads, *latent.value_up, EpilogueMode::STORE, space.taken, latent.value);
        const Range range = team.share(count);
        for (int64_t row = range.begin; row < range.end; row++)
            for (int64_t head = 0; head < heads; head++)
                std::memcpy(space.mixed + (row * heads + head) * latent.value,
                            space.taken + rows.place(head, row) * latent.value, sizeof(T) * latent.value);
        team.wait();
        return space.mixed;
    }

    // C is the type of the cache.
    template <typename C> void attend_cache(const DecoderLayer &layer, const Plan &plan) {
        Heads heads = decoder.heads;
        heads.window = layer.window;
        const int64_t stride = layer.latent ? 0 : layer.qkv.out_features;
        rope_and_write(workspace.qkv, stride, workspace.query, layer.rotation, pass.positions, pass.slots,
                       static_cast<C *>(layer.k_cache), static_cast<C *>(layer.v_cache), layer.head_norms,
                       pass.num_tokens, heads, team);
        team.wait();
        if (&layer == decoder.layers + decoder.num_layers - 1 && !pass.num_logits) return;
        attend(static_cast<const T *>(workspace.query), workspace.attention_out, static_cast<const C *>(layer.k_cache),
               static_cast<const C *>(layer.v_cache), pass.batch, heads, layer.sinks, plan, team);
        team.wait();
    }

    void feed_forward(const DecoderLayer &layer, const T *attention_out, T *residual, int64_t rows) {
        const Tiles tiles(rows, team);
        if (layer.latent) attention_out = values_of(*layer.latent, attention_out, rows);
        if (layer.parallel) widen_rows(layer, tiles, residual);
        add(attention_out, tiles, layer.out, layer.attention_post_norm, residual);
        if (layer.experts) return mix(layer, tiles, residual);
        if (!layer.parallel) widen_rows(layer, tiles, residual);
        add(workspace.gated, tiles, layer.down, layer.mlp_post_norm, residual);
    }

    // The first product of an MLP, of the residual's rows.
    void widen_rows(const DecoderLayer &layer, const Tiles &tiles, const T *residual) {
        const EpilogueMode mode = layer.gate_up.gated ? EpilogueMode::GATE : EpilogueMode::ACTIVATE;
        const Rows x = prepared(residual, tiles, layer.mlp_pre_norm, layer.gate_up);
        do_side_work();
        multiply(x, tiles, layer.gate_up, mode, workspace.gated, layer.down.in_features);
    }

    // Normalizes ROWS rows for the experts, and finds out to which they go.
    template <int ROWS> void route_some(const DecoderLayer &layer, const T *residual, int64_t first) {
        const Experts &experts = *layer.experts;
        T *to = workspace.normalized + first * hidden_size;
        for (int r = 0; r < ROWS; r++) {
            const T *from = residual + (first + r) * hidden_size;
            if (layer.mlp_pre_norm.weight)
                norm_row(from, layer.mlp_pre_norm, to + r * hidden_size, hidden_size, decoder.eps);
            else
                std::memcpy(to + r * hidden_size, from, sizeof(T) * hidden_size);
        }
        float *logits = workspace.scores + team.thread * (ROUTED_ROWS + 1) * workspace.sizes.experts;
        float *choice = logits + ROUTED_ROWS * workspace.sizes.experts;
        make_logits<ROWS>(experts, to, hidden_size, logits);
        for (int64_t r = 0, row = first; r < ROWS; r++, row++)
            workspace.shared_shares[row] = route(experts, to + r * hidden_size, hidden_size, logits + r * experts.count,
                                                 choice, routes.experts_of(row), routes.shares_of(row));
    }

    // The same of all rows, and puts them in the order of their experts.
    void route_rows(const DecoderLayer &layer, const T *residual, int64_t rows) {
        const Range range = team.share(rows);
        int64_t row = range.begin;
        for (; row + ROUTED_ROWS <= range.end; row += ROUTED_ROWS) route_some<ROUTED_ROWS>(layer, residual, row);
        for (; row < range.end; row++) route_some<1>(layer, residual, row);
        team.wait();
        if (team.thread == 0) routes.group(rows, layer.experts->count);
        team.wait();
    }

    // What a gated MLP makes of prepared rows, one for each group of tiles if they are a list's.
    void run_mlp(const Rows &x, const Tiles &tiles, const Weight &gate_up, const Weight &down, T *out) {
        multiply(x, tiles, gate_up, EpilogueMode::GATE, workspace.gated, down.in_features);
        const Rows gated = prepared(workspace.gated, tiles, {}, down);
        multiply(gated, tiles, down, EpilogueMode::STORE, out, hidden_size);
    }

    void mix(const DecoderLayer &layer, const Tiles &tiles, T *residual) {
        const Experts &experts = *layer.experts;
        route_rows(layer, residual, tiles.rows);
        const Tiles routed(routes.tiles);
        const Rows x = prepared(workspace.normalized, routed, {}, *experts.gate_up, routes.sources.data());
        do_side_work();
        run_mlp(x, routed, *experts.gate_up, *experts.down, workspace.returned);
        const bool shared = experts.shared_down.packed;
        if (shared) {
            const Rows all = prepared(workspace.normalized, tiles, {}, experts.shared_gate_up);
            run_mlp(all, tiles, experts.shared_gate_up, experts.shared_down, workspace.part);
        }
        const Range range = team.share(tiles.rows);
        for (int64_t row = range.begin; row < range.end; row++) {
            T *part = workspace.part + row * hidden_size;
            combine(workspace.returned, routes.places_of(row), routes.shares_of(row), experts.chosen,
                    shared ? part : nullptr, workspace.shared_shares[row], hidden_size, part);
            if (layer.mlp_post_norm.weight) norm_row(part, layer.mlp_post_norm, part, hidden_size, decoder.eps);
            add_row(part, residual + row * hidden_size, hidden_size);
        }
        team.wait();
    }

  public:
    Forward(const Decoder &decoder, const Pass &pass, const Workspace<T> &workspace,
            const std::vector<const Plan *> &plans, Routes &routes, const LatentRows &latent_rows, Team &team)
        : decoder(decoder), pass(pass), workspace(workspace), plans(plans), routes(routes), latent_rows(latent_rows),
          team(team) {}

    // Writes the normalized hidden states of the wanted rows.
    void run(T *out) {
        embed();
        const T *attention_out = workspace.attention_out;
        T *residual = workspace.residual;
        int64_t rows = pass.num_tokens;
        for (int64_t index = 0; index < decoder.num_layers; index++) {
            const DecoderLayer &layer = decoder.layers[index];
            mix_tokens(layer, plans[index]);
            if (index == decoder.num_layers - 1 && pass.num_logits < rows) {
                gather_logit_rows(layer);
                attention_out = workspace.query, residual = workspace.gathered_residual, rows = pass.num_logits;
            }
            if (rows) feed_forward(layer, attention_out, residual, rows);
        }
        const Range range = team.share(rows);
        for (int64_t row = range.begin; row < range.end; row++)
            norm_row(residual + row * hidden_size, decoder.norm, out + row * hidden_size, hidden_size, decoder.eps);
    }

    // Of the first layer only what its MLP does with rows, after `added` was added to them.
    void add_mlp(const T *added, T *residual) {
        const DecoderLayer &layer = *decoder.layers;
        const Tiles tiles(pass.num_tokens, team);
        const Range range = team.share(pass.num_tokens);
        for (int64_t row = range.begin; row < range.end; row++)
            add_row(added + row * hidden_size, residual + row * hidden_size, hidden_size);
        team.wait();
        widen_rows(layer, tiles, residual);
        add(workspace.gated, tiles, layer.down, layer.mlp_post_norm, residual);
    }
};

} // namespace

// A decoder's whole forward pass in one parallel region. What a thread needs next it waits for only where another
// thread makes it, and nothing is allocated once the longest pass was seen.
#pragma once
#include <algorithm>
#include <map>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "staging.h"

namespace {

// The plan of each layer's attention; layers with the same window share one.
class Plans {
    std::map<int32_t, Plan> of_window;

  public:
    std::vector<const Plan *> of_layers;

    void make(const Decoder &decoder, const Batch &batch) {
        of_layers.clear();
        for (int64_t i = 0; i < decoder.num_layers; i++) {
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

// What the threads of a pass share.
template <typename T> struct Scratch {
    T *residual, *kept_residual, *qkv, *query, *mixed, *gated;
    Staging<T> staging;

    Scratch(Arena &arena, const Decoder &decoder, const Pass &pass, int64_t threads) {
        const Heads &heads = decoder.heads;
        const int64_t tokens = pass.num_tokens, hidden_size = decoder.hidden_size;
        const int64_t query_size = heads.num_heads * heads.head_dim;
        const int64_t qkv_size = query_size + 2 * heads.num_kv_heads * heads.head_dim;
        const int64_t middle = decoder.layers->down.ins;
        const int64_t widest = std::max({middle, hidden_size, query_size});
        const int64_t activations = tokens * (2 * hidden_size + qkv_size + 2 * query_size + middle);
        arena.reset(sizeof(T) * activations + Staging<T>::size(tokens, widest, threads) + 16 * 64);
        residual = arena.take<T>(tokens * hidden_size);
        kept_residual = arena.take<T>(tokens * hidden_size);
        qkv = arena.take<T>(tokens * qkv_size);
        query = arena.take<T>(tokens * query_size);
        mixed = arena.take<T>(tokens * query_size);
        gated = arena.take<T>(tokens * middle);
        staging.take(arena, tokens, widest, threads);
    }
};

// One thread's view of a pass; C is the type of the cache.
template <typename T, typename C> class Forward {
    const Decoder &decoder;
    const Pass &pass;
    const Scratch<T> &scratch;
    const std::vector<const Plan *> &plans;  // of each layer
    Team &team;
    const int64_t hidden_size = decoder.hidden_size;
    const int64_t query_size = decoder.heads.num_heads * decoder.heads.head_dim;

    // The normalized residual, as the weight wants it.
    Rows normalized(const T *residual, const Tiles &tiles, const void *norm, const Weight &weight) {
        return scratch.staging.prepare(tiles, weight, team, [&](int64_t row, T *space) {
            norm_row(residual + row * hidden_size, static_cast<const T *>(norm), space, hidden_size, decoder.eps);
            return space;
        });
    }

    // Rows that lie in memory, as the weight wants them.
    Rows as_wanted(const T *x, const Tiles &tiles, const Weight &weight) {
        return scratch.staging.prepare(tiles, weight, team, [&](int64_t row, T *) { return x + row * weight.ins; });
    }

    void multiply(const Rows &x, const Tiles &tiles, const Weight &weight, Into into, T *out, int64_t stride) {
        product(x, tiles, weight, Sink<T>{into, out, nullptr, stride}, team);
        team.wait();
    }

    void embed() {
        const Range range = team.share(pass.num_tokens);
        for (int64_t t = range.begin; t < range.end; t++) {
            T *to = scratch.residual + t * hidden_size;
            if (decoder.embedding)
                std::memcpy(to, static_cast<const T *>(decoder.embedding) + pass.token_ids[t] * hidden_size,
                            sizeof(T) * hidden_size);
            else
                unpack(decoder.head, pass.token_ids[t], to);
        }
        team.wait();
    }

    // Keeps the wanted rows alone: after the last layer's attention tokens no longer meet.
    void keep_wanted() {
        const Range range = team.share(pass.num_logits);
        for (int64_t i = range.begin; i < range.end; i++) {
            const int64_t from = pass.logit_rows[i];
            std::memcpy(scratch.query + i * query_size, scratch.mixed + from * query_size, sizeof(T) * query_size);
            std::memcpy(scratch.kept_residual + i * hidden_size, scratch.residual + from * hidden_size,
                        sizeof(T) * hidden_size);
        }
        team.wait();
    }

    void attend_layer(const DecoderLayer &layer, const Plan &plan) {
        Heads heads = decoder.heads;
        heads.window = layer.window;
        const int64_t rows = pass.num_tokens;
        const Tiles tiles(rows, team);
        const Rows x = normalized(scratch.residual, tiles, layer.input_norm, layer.qkv);
        multiply(x, tiles, layer.qkv, Into::ROWS, scratch.qkv, layer.qkv.outs);
        rope_and_write(scratch.qkv, scratch.query, decoder.cos_sin, pass.positions, pass.slots,
                       static_cast<C *>(layer.k_cache), static_cast<C *>(layer.v_cache),
                       static_cast<const T *>(layer.q_norm), static_cast<const T *>(layer.k_norm), decoder.eps, rows,
                       heads, team);
        team.wait();
        if (&layer == decoder.layers + decoder.num_layers - 1 && !pass.num_logits) return;
        attend(static_cast<const T *>(scratch.query), scratch.mixed, static_cast<const C *>(layer.k_cache),
               static_cast<const C *>(layer.v_cache), pass.batch, heads, plan, team);
        team.wait();
    }

    void feed_forward(const DecoderLayer &layer, const T *mixed, T *residual, int64_t rows) {
        const Tiles tiles(rows, team);
        multiply(as_wanted(mixed, tiles, layer.out), tiles, layer.out, Into::RESIDUAL, residual, hidden_size);
        const Rows x = normalized(residual, tiles, layer.post_norm, layer.gate_up);
        multiply(x, tiles, layer.gate_up, Into::GATED, scratch.gated, layer.down.ins);
        multiply(as_wanted(scratch.gated, tiles, layer.down), tiles, layer.down, Into::RESIDUAL, residual, hidden_size);
    }

  public:
    Forward(const Decoder &decoder, const Pass &pass, const Scratch<T> &scratch, const std::vector<const Plan *> &plans,
            Team &team)
        : decoder(decoder), pass(pass), scratch(scratch), plans(plans), team(team) {}

    // Writes the normalized hidden states of the wanted rows.
    void run(T *out) {
        embed();
        const T *mixed = scratch.mixed;
        T *residual = scratch.residual;
        int64_t rows = pass.num_tokens;
        for (int64_t index = 0; index < decoder.num_layers; index++) {
            const DecoderLayer &layer = decoder.layers[index];
            attend_layer(layer, *plans[index]);
            if (index == decoder.num_layers - 1 && pass.num_logits < rows) {
                keep_wanted();
                mixed = scratch.query, residual = scratch.kept_residual, rows = pass.num_logits;
            }
            if (rows) feed_forward(layer, mixed, residual, rows);
        }
        const Range range = team.share(rows);
        for (int64_t row = range.begin; row < range.end; row++)
            norm_row(residual + row * hidden_size, static_cast<const T *>(decoder.norm), out + row * hidden_size,
                     hidden_size, decoder.eps);
    }
};

} // namespace

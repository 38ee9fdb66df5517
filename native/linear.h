// Single products and passes, as callers outside of a team ask for them.
#pragma once
#include "forward.h"

namespace {

// Multiplies x [rows, in_features] with the weight and gives the sums to the epilogue. What HIGHEST keeps is of every
// thread by itself, one after the other.
template <typename T> NOINLINE void multiply(const T *x, int64_t rows, const Weight &weight, Epilogue<T> epilogue) {
    static thread_local Arena arena;
    const int threads = omp_get_max_threads();
    arena.reset(Staging<T>::size(rows, weight.in_features, threads));
    Staging<T> staging;
    staging.take(arena, rows, weight.in_features, threads);
    with_team(rows * weight.out_features * weight.in_features >= PARALLEL_PRODUCTS, [&](Team &team) {
        const Tiles tiles(rows, team);
        const Rows made = staging.prepare_all(tiles, weight, team, x, false);
        Epilogue<T> mine = epilogue;
        const int64_t before = team.thread * rows * mine.highest.most;
        if (mine.mode == EpilogueMode::HIGHEST) mine.highest.value += before, mine.highest.index += before;
        product(made, tiles, weight, mine, team);
    });
}

template <typename T> void linear(const T *x, int64_t rows, const Weight &weight, T *out, bool floats) {
    using Mode = EpilogueMode;
    const Mode mode = floats ? Mode::STORE_FLOAT32 : weight.gated            ? Mode::GATE
                      : weight.activation >= 0 ? Mode::ACTIVATE
                                               : Mode::STORE;
    const int64_t width = weight.gated ? weight.out_features / 2 : weight.out_features;
    const Epilogue<T> epilogue{mode, floats ? nullptr : out, floats ? reinterpret_cast<float *>(out) : nullptr, width};
    multiply(x, rows, weight, epilogue);
}

// The `most` highest sums of each row and whose they are, the highest first; the first is no number if any of them is
// none. With `allowed`, a row may have a bit for each output: only those that are set count then, and one sum is found.
template <typename T>
void best(const T *x, int64_t rows, const Weight &weight, const uint32_t *const *allowed, int64_t most,
          int64_t *index, float *value) {
    static thread_local Arena arena;
    const int64_t threads = omp_get_max_threads(), kept = rows * most;
    arena.reset(threads * kept * (sizeof(float) + sizeof(int64_t)) + 2 * 64);
    const Highest found{arena.take<float>(threads * kept), arena.take<int64_t>(threads * kept), most, allowed};
    found.clear(threads * rows);
    multiply(x, rows, weight, Epilogue<T>{EpilogueMode::HIGHEST, nullptr, nullptr, 0, found});
    const Highest of_all{value, index, most, allowed};
    of_all.clear(rows);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * most; i < threads * kept && value[row * most] == value[row * most]; i += kept)
            for (int64_t place = i; place < i + most; place++)
                of_all.insert(row, found.value[place], found.index[place]);
}

template <typename T> void embed(const int64_t *ids, int64_t rows, const Weight &head, T *out) {
    for (int64_t row = 0; row < rows; row++) unpack(head, ids[row], out + row * head.in_features);
}

// Whether so many tokens are worth waking the other threads for.
inline bool pays(const Decoder &decoder, int64_t tokens) {
    const DecoderLayer &first = *decoder.layers;
    const Weight &gate_up = first.experts ? *first.experts->gate_up : first.gate_up;
    const int64_t rows = tokens * (first.experts ? first.experts->chosen : 1);
    return rows * gate_up.out_features * gate_up.in_features >= PARALLEL_PRODUCTS;
}

template <typename T> void decode(const Decoder &decoder, const Pass &pass, T *hidden) {
    static thread_local Arena arena;
    static thread_local Plans plans;
    static thread_local Routes routes;
    static thread_local LatentRows latent_rows;
    const Workspace<T> workspace(arena, decoder, pass, omp_get_max_threads());
    plans.make(decoder, pass.batch);
    if (workspace.has_latents) latent_rows.make(decoder, pass);
    for (int64_t i = 0; i < decoder.num_layers; i++)
        if (decoder.layers[i].experts) routes.reserve(*decoder.layers[i].experts, pass.num_tokens);
    // Inside the team these names would stand for each thread's own.
    const std::vector<const Plan *> &of_layers = plans.of_layers;
    Routes &of_all = routes;
    const LatentRows &by_heads = latent_rows;
    with_team(pays(decoder, pass.num_tokens), [&](Team &team) {
        Forward<T>(decoder, pass, workspace, of_layers, of_all, by_heads, team).run(hidden);
    });
}

// Adds `added` [rows, hidden size] to the residual, and then what the MLP of the decoder's only layer makes of that.
template <typename T> void add_mlp(const Decoder &decoder, const T *added, T *residual, int64_t rows) {
    static thread_local Arena arena;
    Pass pass{};
    pass.num_tokens = rows;
    const Workspace<T> workspace(arena, decoder, pass, omp_get_max_threads());
    const std::vector<const Plan *> no_plans;
    const LatentRows no_latents{};
    Routes no_routes;
    with_team(pays(decoder, rows), [&](Team &team) {
        Forward<T>(decoder, pass, workspace, no_plans, no_routes, no_latents, team).add_mlp(added, residual);
    });
}

} // namespace

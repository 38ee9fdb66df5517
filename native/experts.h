// Mixtures of experts: which of them each row goes to, and rows in the order of their experts, so that the weights of an
// expert are read once for all of its rows.
#pragma once
#include "gemm.h"

namespace {

// Where the rows of one layer go. A row that goes to several experts lies in as many places, and those of an expert
// begin with a whole block. Its memory is kept from pass to pass.
class Routes {
    std::vector<int32_t> experts;   // of each row's choices
    std::vector<float> shares;      // the same, and how much of what comes back counts
    std::vector<int64_t> places;    // the same, and where they lie
    std::vector<int64_t> counts;    // rows of each expert
    int64_t chosen = 0;

  public:
    TileList tiles;
    std::vector<int64_t> sources;   // of each place the row

    // How many places there may be.
    static int64_t most_places(const Experts &experts, int64_t rows) {
        const int64_t all = rows * experts.chosen;
        return all + std::min<int64_t>(experts.count, all) * (ROW_BLOCK - 1);
    }

    // Of all that `group` takes, as nothing may be refused in the middle of a pass.
    void reserve(const Experts &layer, int64_t rows) {
        const size_t all = rows * layer.chosen, groups = std::min<size_t>(layer.count, all);
        grow(experts, all), grow(shares, all), grow(places, all);
        grow(sources, most_places(layer, rows)), grow(counts, layer.count);
        tiles.reserve(groups, all / TILE_ROWS + groups);
        chosen = layer.chosen;
    }

    // What a row chose, for whoever writes it or reads it again.
    int32_t *experts_of(int64_t row) { return experts.data() + row * chosen; }
    float *shares_of(int64_t row) { return shares.data() + row * chosen; }
    const float *shares_of(int64_t row) const { return shares.data() + row * chosen; }
    const int64_t *places_of(int64_t row) const { return places.data() + row * chosen; }

    // Puts rows, whose experts were written, in the order of these.
    void group(int64_t rows, int64_t num_experts) {
        std::fill_n(counts.begin(), num_experts, 0);
        for (int64_t i = 0; i < rows * chosen; i++) counts[experts[i]]++;
        tiles.clear();
        int64_t place = 0;
        for (int64_t expert = 0; expert < num_experts; expert++) {
            const int64_t count = counts[expert];
            counts[expert] = place;     // from here on where its next row goes
            if (!count) continue;
            tiles.add_group(expert, place, count);
            place += rounded_up(count, ROW_BLOCK);
        }
        tiles.finish();
        for (int64_t i = 0; i < rows * chosen; i++) {
            places[i] = counts[experts[i]]++;
            sources[places[i]] = i / chosen;
        }
    }

  private:
    template <typename Number> static void grow(std::vector<Number> &numbers, size_t count) {
        if (numbers.size() < count) numbers.resize(count);
    }
};

// Sums of products of ROWS rows and COUNT rows of weights, each [width] and one after the other. Each is made in an order
// that depends on nothing but the width; several at once hide that it is a chain, and read the weights less often.
template <int ROWS, int COUNT, typename T>
inline void dots(const T *x, const float *weights, int64_t width, float *to, int64_t to_stride) {
    vfloat sums[ROWS][COUNT][2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            vfloat factors[COUNT];
#pragma GCC unroll 4
            for (int n = 0; n < COUNT; n++) factors[n] = load(weights + n * width + i + k * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const vfloat values = load_wide(x + r * width + i + k * LANES);
#pragma GCC unroll 4
                for (int n = 0; n < COUNT; n++) sums[r][n][k] += values * factors[n];
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < COUNT; n++) {
            float sum = reduce_add(sums[r][n][0] + sums[r][n][1]);
            for (int64_t j = i; j < width; j++) sum += widen(x[r * width + j]) * weights[n * width + j];
            to[r * to_stride + n] = sum;
        }
}

// Rows whose experts' scores are found at once.
constexpr int ROUTED_ROWS = 4;

// What the router makes of ROWS rows: logits [ROWS, experts].
template <int ROWS, typename T> NOINLINE void make_logits(const Experts &layer, const T *x, int64_t width, float *to) {
    // More would not fit the registers.
    constexpr int COUNT = LANES == 16 || ROWS == 1 ? 2 : 1;
    int32_t i = 0;
    for (; i + COUNT <= layer.count; i += COUNT)
        dots<ROWS, COUNT>(x, layer.router + i * width, width, to + i, layer.count);
    for (; i < layer.count; i++) dots<ROWS, 1>(x, layer.router + i * width, width, to + i, layer.count);
}

// The logistic function.
inline float logistic(float x) { return 1.0f / (1.0f + exp_(-x)); }

// Scores of the experts in place of their logits.
inline void make_scores(const Experts &layer, float *scores) {
    if (layer.sigmoid) {
        for (int32_t i = 0; i < layer.count; i++) scores[i] = logistic(scores[i]);
        return;
    }
    const float highest = *std::max_element(scores, scores + layer.count);
    float sum = 0;
    for (int32_t i = 0; i < layer.count; i++) sum += scores[i] = exp_(scores[i] - highest);
    for (int32_t i = 0; i < layer.count; i++) scores[i] /= sum;
}

constexpr float TAKEN = -__builtin_inff();

// The sum of the `some` highest of `count` numbers.
inline float sum_of_best(const float *numbers, int32_t count, int32_t some) {
    constexpr int32_t MOST = 2;
    float best[MOST] = {TAKEN, TAKEN};
    for (int32_t i = 0; i < count; i++) {
        if (numbers[i] > best[0])
            best[1] = best[0], best[0] = numbers[i];
        else if (numbers[i] > best[1])
            best[1] = numbers[i];
    }
    return some == 1 ? best[0] : best[0] + best[1];
}

// Takes all experts out of the choice whose groups are not among the best, of equal ones the first.
inline void keep_groups(const Experts &layer, float *choice) {
    const int32_t size = layer.count / layer.groups;
    float scores[MAX_EXPERT_GROUPS];
    bool kept[MAX_EXPERT_GROUPS] = {};
    for (int32_t group = 0; group < layer.groups; group++)
        scores[group] = sum_of_best(choice + group * size, size, layer.group_best);
    for (int32_t n = 0; n < layer.groups_chosen; n++) {
        int32_t best = -1;
        for (int32_t group = 0; group < layer.groups; group++)
            if (!kept[group] && (best < 0 || scores[group] > scores[best])) best = group;
        kept[best] = true;
    }
    for (int32_t group = 0; group < layer.groups; group++)
        if (!kept[group]) std::fill_n(choice + group * size, size, TAKEN);
}

// Chooses the experts with the highest scores, of equal ones the first. `choice` has room for one number of each; what
// is no number is chosen last, but always as many as there must be.
inline void choose(const Experts &layer, const float *scores, float *choice, int32_t *experts, float *shares) {
    for (int32_t i = 0; i < layer.count; i++) choice[i] = scores[i] + (layer.choice_bias ? layer.choice_bias[i] : 0.0f);
    if (layer.groups_chosen < layer.groups) keep_groups(layer, choice);
    float sum = 0;
    for (int32_t n = 0; n < layer.chosen; n++) {
        int32_t best = -1;
        for (int32_t i = 0; i < layer.count; i++)
            if (choice[i] > (best < 0 ? TAKEN : choice[best])) best = i;
        // Without a number among them, whatever comes.
        if (best < 0) best = n;
        choice[best] = TAKEN;
        experts[n] = best;
        sum += shares[n] = scores[best];
    }
    const float factor = layer.renormalized ? layer.scale / std::max(sum, layer.least_sum) : layer.scale;
    for (int32_t n = 0; n < layer.chosen; n++) shares[n] *= factor;
}

// Finds where a row goes by its logits, which it changes; `choice` has room for one number of each expert. Returns what
// the shared expert counts.
template <typename T> NOINLINE float route(const Experts &layer, const T *x, int64_t width, float *logits, float *choice,
                                           int32_t *experts, float *shares) {
    if (layer.router_bias)
        for (int32_t i = 0; i < layer.count; i++) logits[i] += layer.router_bias[i];
    make_scores(layer, logits);
    choose(layer, logits, choice, experts, shares);
    if (!layer.shared_gated) return 1.0f;
    float gate;
    dots<1, 1>(x, layer.router + layer.count * width, width, &gate, 1);
    return logistic(gate);
}

// to = the sum of what came back for a row, each times its share, and of the shared expert's, if there is any.
template <typename T>
NOINLINE void combine(const T *parts, const int64_t *places, const float *shares, int32_t chosen, const T *shared,
                      float shared_share, int64_t width, T *to) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vfloat sum = shared ? load_wide(shared + i) * shared_share : vfloat{};
        for (int32_t n = 0; n < chosen; n++) sum += load_wide(parts + places[n] * width + i) * shares[n];
        store_narrow(to + i, sum);
    }
    for (; i < width; i++) {
        float sum = shared ? widen(shared[i]) * shared_share : 0.0f;
        for (int32_t n = 0; n < chosen; n++) sum += widen(parts[places[n] * width + i]) * shares[n];
        to[i] = narrow<T>(sum);
    }
}

} // namespace

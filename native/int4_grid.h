// The choice of grids for weights of 4 bits: what the numbers 0 to 15 of a group stand for.
//
// Weights come in units, of which the output's scale says how much one is: the largest has 127 of them. Under a grid a
// number stands for factor * number - offset units, which always fits a byte. Many weights lie on a grid already, since
// they were of 4 bits before (GPTQ, AWQ, Q4_0, Q4_K): then the distance of its points in units is the group's step.
// Steps are seldom whole numbers of units. So the scale is chosen by which most nearly are, and the numbers by the step.
#pragma once
#include <algorithm>
#include <vector>

#include "quantize.h"

namespace {

constexpr int64_t INT4_GROUP = 32;
constexpr int INT4_HIGHEST = 15, INT4_MOST_FACTOR = 16, INT4_MOST_OFFSET = 128;
// Grids are tried side by side, a lane for each.
constexpr int INT4_TRIED = 15, INT4_LANES = 16, INT4_VECTORS = INT4_LANES / LANES;
struct alignas(64) Int4Lanes {
    float of[INT4_LANES] = {};
};

struct Int4Grid {
    int factor = 1, offset = 0;

    // With the offset nearest to this one by which all numbers from 0 to `highest` fit a byte.
    static Int4Grid near(int factor, float offset, int highest = INT4_HIGHEST) {
        const int least = std::max(0, highest * factor - 127);
        return {factor, std::clamp(int(nearest_integer(offset)), least, INT4_MOST_OFFSET)};
    }
};

// 32 weights of an output, in units, and where they begin and end.
struct Int4Group {
    float units[INT4_GROUP];
    float lowest, highest;

    // The first `count` of them, and zeros. What is no number counts as zero too.
    template <typename T> Int4Group(const T *weights, int64_t count, float inverse) {
        T filled[INT4_GROUP] = {};
        if (count < INT4_GROUP) weights = std::copy(weights, weights + count, filled) - count;
        vfloat low, high;
        for (int64_t k = 0; k < INT4_GROUP; k += LANES) {
            const vfloat unit = load_wide(weights + k) * inverse, known = unit == unit ? unit : vfloat{};
            const vfloat each = vmin(vmax(known, vfloat{} - 127.0f), vfloat{} + 127.0f);
            low = k ? vmin(low, each) : each, high = k ? vmax(high, each) : each;
            store(units + k, each);
        }
        lowest = -reduce_max(-low), highest = reduce_max(high);
    }

    // Numbers on a grid of this step from the lowest weight on.
    void find_numbers(float step, float (&numbers)[INT4_GROUP]) const {
        const float inverse = 1.0f / step;
        for (int64_t k = 0; k < INT4_GROUP; k += LANES)
            store(numbers + k, clamped(nearest_integer((load(units + k) - lowest) * inverse)));
    }

    // The numbers nearest to the weights.
    void find_numbers(const Int4Grid &grid, float (&numbers)[INT4_GROUP]) const {
        const float inverse = 1.0f / float(grid.factor), offset = float(grid.offset);
        for (int64_t k = 0; k < INT4_GROUP; k += LANES)
            store(numbers + k, clamped(nearest_integer((load(units + k) + offset) * inverse)));
    }

    static vfloat clamped(vfloat numbers) { return vmin(vmax(numbers, vfloat{}), vfloat{} + float(INT4_HIGHEST)); }
};

inline float int4_mean(const float (&numbers)[INT4_GROUP]) {
    vfloat sum{};
    for (int64_t k = 0; k < INT4_GROUP; k += LANES) sum += load(numbers + k);
    return reduce_add(sum) / float(INT4_GROUP);
}

// The grid that weights lie on, as far as can be told: the largest step by which all are at most half a unit off.
struct Int4Steps {
    float step = 0.0f, spread = 0.0f;   // in units, and the variance of the numbers; zero if there is none
    static constexpr float LEAST = 3.0f, OFF = 0.5f;    // ordinary grids do as well for finer ones

    static Int4Steps of(const Int4Group &group) {
        const float span = group.highest - group.lowest;
        if (span < LEAST) return {};
        // In a lane's grid there are so many steps between the lowest and the highest weight.
        Int4Lanes steps, inverses;
        for (int lane = 0; lane < INT4_LANES; lane++)
            steps.of[lane] = span / float(lane + 1), inverses.of[lane] = float(lane + 1) / span;
        uint32_t fitting = (1u << INT4_TRIED) - 1;
        // Weights that lie on no grid seldom get further than the first few.
        constexpr int64_t AT_ONCE = 8;
        for (int64_t k = 0; k < INT4_GROUP && fitting; k += AT_ONCE)
            fitting &= fitting_lanes(group, k, k + AT_ONCE, steps, inverses);
        if (!fitting) return {};
        const float step = steps.of[__builtin_ctz(fitting)];
        return step < LEAST ? Int4Steps{} : Int4Steps{step, spread_of(group, step)};
    }

  private:
    // A bit for each lane's grid that all weights from `begin` to `end` are near.
    static uint32_t fitting_lanes(const Int4Group &group, int64_t begin, int64_t end, const Int4Lanes &steps,
                                  const Int4Lanes &inverses) {
        uint32_t found = 0;
        vfloat off[INT4_VECTORS] = {};
        for (int64_t k = begin; k < end; k++)
#pragma GCC unroll 4
            for (int v = 0; v < INT4_VECTORS; v++) {
                const vfloat place = load(inverses.of + v * LANES) * (group.units[k] - group.lowest);
                const vfloat apart = place - nearest_integer(place);
                off[v] = vmax(off[v], vmax(apart, -apart));
            }
#pragma GCC unroll 4
        for (int v = 0; v < INT4_VECTORS; v++)
            found |= lane_bits((vint)(off[v] * load(steps.of + v * LANES) <= vfloat{} + OFF)) << (v * LANES);
        return found;
    }

    static float spread_of(const Int4Group &group, float step) {
        float numbers[INT4_GROUP], squares[INT4_GROUP];
        group.find_numbers(step, numbers);
        for (int64_t k = 0; k < INT4_GROUP; k++) squares[k] = numbers[k] * numbers[k];
        const float mean = int4_mean(numbers);
        return int4_mean(squares) - mean * mean;
    }
};

// How much larger than the smallest possible a unit should be, so that the steps are nearly whole numbers of units.
inline float unit_for(const std::vector<Int4Steps> &groups) {
    constexpr int TRIED = 16;
    constexpr float MOST = 1.3f;
    int64_t known = 0;
    for (const Int4Steps &group : groups) known += group.step > 0.0f;
    if (2 * known <= int64_t(groups.size())) return 1.0f;
    float best = 1.0f, least = __builtin_inff();
    for (int i = 0; i <= TRIED; i++) {
        const float unit = 1.0f + (MOST - 1.0f) * float(i) / float(TRIED), inverse = 1.0f / unit;
        float error = 0.0f;
        for (const Int4Steps &group : groups) {
            const float step = group.step * inverse, factor = std::min(nearest_integer(step), float(INT4_MOST_FACTOR));
            const float apart = (step - factor) * unit;
            // What offsets are rounded to counts too.
            error += group.step > 0.0f ? apart * apart * group.spread + unit * unit / 12.0f : 0.0f;
        }
        if (error < least) least = error, best = unit;
    }
    return best;
}

// The grid with the least squares among those that are tried, and the numbers under it.
class Int4Choice {
    const Int4Group &group;
    float error = __builtin_inff();

  public:
    Int4Grid grid;
    float numbers[INT4_GROUP];

    // Tries factors and offsets around those that reach from the lowest to the highest weight; and the step, if there
    // is one.
    Int4Choice(const Int4Group &group, float step) : group(group) {
        try_around();
        if (step <= 0.0f) return;
        float own[INT4_GROUP];
        group.find_numbers(step, own);
        vfloat highest{};
        for (int64_t k = 0; k < INT4_GROUP; k += LANES) highest = vmax(highest, load(own + k));
        const int top = int(reduce_max(highest)), below = std::clamp(int(step), 1, INT4_MOST_FACTOR);
        for (int factor = below; factor <= std::min(below + 1, INT4_MOST_FACTOR); factor++) try_numbers(own, top, factor);
    }

  private:
    // Each lane's factor and offset, and the squares of how far weights are from the nearest points of that grid.
    struct Tried {
        Int4Lanes factors, offsets, squares;
    };

    void try_around() {
        const Tried tried = around();
        vfloat least = load(tried.squares.of);
        for (int v = 1; v < INT4_VECTORS; v++) least = vmin(least, load(tried.squares.of + v * LANES));
        error = -reduce_max(-least);
        uint32_t best = 0;
        for (int v = 0; v < INT4_VECTORS; v++)
            best |= lane_bits((vint)(load(tried.squares.of + v * LANES) <= vfloat{} + error)) << (v * LANES);
        const int lane = __builtin_ctz(best | 1u << (INT4_LANES - 1));
        grid = {int(tried.factors.of[lane]), int(tried.offsets.of[lane])};
        group.find_numbers(grid, numbers);
    }

    // Factors next to the one by which 16 numbers reach so far, and for each some offsets around the middle. The last lane
    // is another's once more.
    Tried around() const {
        static constexpr Int4Lanes MORE = {{-1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}};
        static constexpr Int4Lanes SHIFTS = {{-2, -1, 0, 1, 2, -2, -1, 0, 1, 2, -2, -1, 0, 1, 2, 2}};
        static_assert(INT4_TRIED == 15 && INT4_LANES == 16, "one grid a lane");
        const float low = std::min(group.lowest, 0.0f), high = std::max(group.highest, 0.0f);
        const vfloat middle = nearest_integer((vfloat{} + (high - low)) / float(INT4_HIGHEST));
        Tried tried;
        vfloat factors[INT4_VECTORS], inverses[INT4_VECTORS], offsets[INT4_VECTORS], sums[INT4_VECTORS] = {};
#pragma GCC unroll 4
        for (int v = 0; v < INT4_VECTORS; v++) {
            const vfloat wanted = middle + load(MORE.of + v * LANES);
            factors[v] = vmin(vmax(wanted, vfloat{} + 1.0f), vfloat{} + float(INT4_MOST_FACTOR));
            const vfloat reach = factors[v] * float(INT4_HIGHEST), least = vmax(reach - 127.0f, vfloat{});
            const vfloat centre = (reach - low - high) * 0.5f + load(SHIFTS.of + v * LANES) * factors[v] * 0.2f;
            offsets[v] = vmin(vmax(nearest_integer(centre), least), vfloat{} + float(INT4_MOST_OFFSET));
            inverses[v] = 1.0f / factors[v];
        }
        for (float unit : group.units)
#pragma GCC unroll 4
            for (int v = 0; v < INT4_VECTORS; v++) {
                const vfloat place = offsets[v] + unit;
                const vfloat apart = factors[v] * Int4Group::clamped(nearest_integer(place * inverses[v])) - place;
                sums[v] += apart * apart;
            }
#pragma GCC unroll 4
        for (int v = 0; v < INT4_VECTORS; v++) {
            store(tried.factors.of + v * LANES, factors[v]), store(tried.offsets.of + v * LANES, offsets[v]);
            store(tried.squares.of + v * LANES, sums[v]);
        }
        return tried;
    }

    // By the numbers that weights have on the grid they come from, the highest of which is `top`.
    void try_numbers(const float (&own)[INT4_GROUP], int top, int factor) {
        const auto difference = [&](int64_t k) { return load(own + k) * float(factor) - load(group.units + k); };
        vfloat sum{}, squared{};
        for (int64_t k = 0; k < INT4_GROUP; k += LANES) sum += difference(k);
        const Int4Grid tried = Int4Grid::near(factor, reduce_add(sum) / float(INT4_GROUP), top);
        if (top * factor - tried.offset > 127) return;
        for (int64_t k = 0; k < INT4_GROUP; k += LANES) {
            const vfloat apart = difference(k) - float(tried.offset);
            squared += apart * apart;
        }
        const float squares = reduce_add(squared);
        if (squares >= error) return;
        grid = tried, error = squares;
        std::copy(own, own + INT4_GROUP, numbers);
    }
};

} // namespace

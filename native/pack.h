// Weights packed once, and read back.
#pragma once
#include "gemm.h"

namespace {

// The output of a weight that lies at place `i` of a panel, or -1 if the panel is wider than the weight.
inline int64_t output_at(const Weight &weight, int64_t panel, int64_t i) {
    if (!weight.gated) return panel * PANEL + i < weight.out_features ? panel * PANEL + i : -1;
    const int64_t half = weight.out_features / 2, unit = panel * (PANEL / 2) + i % (PANEL / 2);
    return unit < half ? unit + i / (PANEL / 2) * half : -1;
}

// Packs into zeroed memory.
template <typename T> void pack(const T *weight, const T *bias, const Weight &packed) {
    with_format(packed, [&](auto format) {
        with_team(packed.out_features * packed.in_features >= PARALLEL_PRODUCTS, [&](Team &team) {
            const Range mine = team.share(packed.panels());
            for (int64_t panel = mine.begin; panel < mine.end; panel++)
                for (int64_t i = 0; i < PANEL; i++) {
                    const int64_t output = output_at(packed, panel, i);
                    if (output < 0) continue;
                    if (bias) const_cast<float *>(packed.bias)[panel * PANEL + i] = widen(bias[output]);
                    format.pack(weight + output * packed.in_features, packed, panel, i);
                }
        });
    });
}

// One output's weights, read back. The weight is not gated.
template <typename T> void unpack(const Weight &weight, int64_t output, T *out) {
    with_format(weight, [&](auto format) { format.unpack(weight, output / PANEL, output % PANEL, out); });
}

} // namespace

// The formats in which weights are packed. Each is a struct that `Formats` lists, has an entry in the table of
// chairlift/ops/formats.py and, where its products are made, a micro-kernel in microkernel.h. It tells
//   ID, NAME              what it is called here and in that table
//   BITS                  of one weight
//   INPUTS                inputs that lie in 4 bytes of a row, which is what one step of a product takes of it
//   BLOCK_INPUTS, BLOCK_BYTES     a panel is a whole number of blocks: inputs and bytes of one
//   SCALED                whether each output has a scale, and so has each row, which is then rounded to bytes
//   COMPENSATED           whether sums start from `compensation`, for the zero point of 128 that rows have
//   Multiplied            the format that its panels are expanded to where many rows are multiplied, or itself; not where
//                         its own micro-kernel takes any number of rows
//   pack, unpack          one output's weights, to and from place `i` of a panel
#pragma once
#include "int4.h"
#include "interleave.h"

namespace {

// A panel holds steps of STEP_BYTES each: every output's weights for the inputs of 4 bytes of a row, side by side.
template <int Bits, int Inputs> struct Panels {
    static constexpr int BITS = Bits, INPUTS = Inputs;
    static constexpr int64_t STEP_BYTES = PANEL * Inputs * Bits / 8, BLOCK_INPUTS = Inputs, BLOCK_BYTES = STEP_BYTES;

    static int64_t steps(int64_t inputs) { return (inputs + Inputs - 1) / Inputs; }
    static int64_t steps(const Weight &weight) { return steps(weight.in_features); }
    static int64_t panel_bytes(const Weight &weight) { return steps(weight) * STEP_BYTES; }

    // Numbers of whole bytes: where that of input `k` lies behind that of input 0.
    static int64_t offset(int64_t k) { return k / Inputs * Inputs * PANEL + k % Inputs; }

    template <typename Number> static Number *at(const Weight &weight, int64_t panel, int64_t i) {
        auto *bytes = static_cast<char *>(const_cast<void *>(weight.packed)) + panel * panel_bytes(weight);
        return reinterpret_cast<Number *>(bytes) + Inputs * i;
    }
};

// Weights as they are, which are numbers of this type, and rows of 4 / INPUTS bytes a number.
template <typename Number, int Inputs> struct PlainFormat : Panels<8 * sizeof(Number), Inputs> {
    using Own = Panels<8 * sizeof(Number), Inputs>;
    static constexpr bool SCALED = false, COMPENSATED = false;

    template <typename T> static void pack(const T *row, const Weight &weight, int64_t panel, int64_t i) {
        Number *to = Own::template at<Number>(weight, panel, i);
        for (int64_t k = 0; k < weight.in_features; k++) to[Own::offset(k)] = narrow<Number>(widen(row[k]));
    }

    template <typename T> static void unpack(const Weight &weight, int64_t panel, int64_t i, T *out) {
        const Number *from = Own::template at<Number>(weight, panel, i);
        for (int64_t k = 0; k < weight.in_features; k++) out[k] = narrow<T>(widen(from[Own::offset(k)]));
    }
};

struct Bf16Format : PlainFormat<bf16, 2> {
    using Multiplied = Bf16Format;
    static constexpr FormatId ID = FormatId::BFLOAT16;
    static constexpr const char *NAME = "bfloat16";
};

struct Float32Format : PlainFormat<float, 1> {
    using Multiplied = Float32Format;
    static constexpr FormatId ID = FormatId::FLOAT32;
    static constexpr const char *NAME = "float32";
};

// Weights that 16 bits hold, under rows of float32.
struct Float16Format : PlainFormat<f16, 1> {
    using Half = f16;
    using Multiplied = Float16Format;
    static constexpr FormatId ID = FormatId::FLOAT16;
    static constexpr const char *NAME = "float16";
};

struct WideBf16Format : PlainFormat<bf16, 1> {
    using Half = bf16;
    using Multiplied = WideBf16Format;
    static constexpr FormatId ID = FormatId::WIDE_BFLOAT16;
    static constexpr const char *NAME = "wide_bfloat16";
};

// Weights as integers from -127 to 127, rows as unsigned bytes.
struct Int8Format : Panels<8, 4> {
    using Multiplied = Int8Format;
    static constexpr FormatId ID = FormatId::INT8;
    static constexpr const char *NAME = "int8";
    static constexpr bool SCALED = true, COMPENSATED = true;

    template <typename T> static void pack(const T *row, const Weight &weight, int64_t panel, int64_t i) {
        auto *to = at<int8_t>(weight, panel, i);
        const float highest = max_abs(row, weight.in_features), inverse = highest > 0 ? 127.0f / highest : 0.0f;
        int32_t sum = 0;
        for (int64_t k = 0; k < weight.in_features; k++) {
            const auto value = int8_t(nearest_integer(widen(row[k]) * inverse));
            to[offset(k)] = value;
            sum += value;
        }
        const_cast<float *>(weight.scales)[panel * PANEL + i] = highest / 127.0f;
        const_cast<int32_t *>(weight.compensation)[panel * PANEL + i] = -128 * sum;
    }

    template <typename T> static void unpack(const Weight &weight, int64_t panel, int64_t i, T *out) {
        const auto *from = at<int8_t>(weight, panel, i);
        const float scale = weight.scales[panel * PANEL + i];
        for (int64_t k = 0; k < weight.in_features; k++) out[k] = narrow<T>(float(from[offset(k)]) * scale);
    }
};

// Weights of 4 bits, as int4.h has them, rows as unsigned bytes.
struct Int4Format {
    using Multiplied = Int8Format;
    static constexpr FormatId ID = FormatId::INT4;
    static constexpr const char *NAME = "int4";
    static constexpr int BITS = 4, INPUTS = 4;
    static constexpr bool SCALED = true, COMPENSATED = true;
    static constexpr int64_t BLOCK_INPUTS = INT4_BLOCK_STEPS * INPUTS, BLOCK_BYTES = INT4_BLOCK_BYTES;
    static constexpr int64_t STEP_BYTES = BLOCK_BYTES / INT4_BLOCK_STEPS;   // on average, grids with the rest

    static int64_t steps(const Weight &weight) { return (weight.in_features + INPUTS - 1) / INPUTS; }
    static int64_t panel_bytes(const Weight &weight) {
        return (weight.in_features + BLOCK_INPUTS - 1) / BLOCK_INPUTS * BLOCK_BYTES;
    }
    static void expand(const char *panel, int64_t steps, char *out) { expand_int4(panel, steps, out); }

    template <typename T> static void pack(const T *row, const Weight &weight, int64_t panel, int64_t i) {
        const float highest = max_abs(row, weight.in_features), inverse = highest > 0 ? 127.0f / highest : 0.0f;
        static thread_local std::vector<Int4Steps> steps;
        steps.clear();
        const auto group_at = [&](int64_t first, float inverse) {
            return Int4Group(row + first, std::min(INT4_GROUP, weight.in_features - first), inverse);
        };
        for (int64_t first = 0; first < weight.in_features; first += INT4_GROUP)
            steps.push_back(Int4Steps::of(group_at(first, inverse)));
        const float unit = unit_for(steps);
        uint8_t *to = at(weight, panel);
        int32_t sum = 0;
        for (int64_t first = 0; first < weight.in_features; first += INT4_GROUP) {
            const Int4Group group = group_at(first, inverse / unit);
            Int4Choice found(group, steps[first / INT4_GROUP].step / unit);
            to[int4_grid_at(first, i)] = uint8_t(found.grid.factor);
            to[int4_grid_at(first, i) + PANEL] = uint8_t(found.grid.offset);
            sum += put(found, std::min(INT4_GROUP, weight.in_features - first), to + int4_number_at(first, i), i);
        }
        const_cast<float *>(weight.scales)[panel * PANEL + i] = highest / 127.0f * unit;
        const_cast<int32_t *>(weight.compensation)[panel * PANEL + i] = -128 * sum;
    }

    template <typename T> static void unpack(const Weight &weight, int64_t panel, int64_t i, T *out) {
        const uint8_t *from = at(weight, panel);
        const float scale = weight.scales[panel * PANEL + i];
        for (int64_t k = 0; k < weight.in_features; k++) {
            const uint8_t *grid = from + int4_grid_at(k, i);
            const int number = from[int4_number_at(k, i)] >> (i < 16 ? 0 : 4) & 15;
            out[k] = narrow<T>(float(grid[0] * number - grid[PANEL]) * scale);
        }
    }

  private:
    // Puts a group's first `count` numbers into their half of bytes, and returns the sum of what they stand for.
    static int32_t put(Int4Choice &found, int64_t count, uint8_t *to, int64_t i) {
        for (int64_t k = count; k < INT4_GROUP; k++) found.numbers[k] = 0.0f;
        alignas(64) uint8_t numbers[INT4_GROUP];
        const int place = i < 16 ? 0 : 4;
#pragma omp simd
        for (int64_t k = 0; k < INT4_GROUP; k++) numbers[k] = uint8_t(int32_t(found.numbers[k]) << place);
        for (int64_t k = 0; k < INT4_GROUP; k += 4, to += INT4_STEP_BYTES) {
            uint32_t four, more;
            std::memcpy(&four, to, sizeof four), std::memcpy(&more, numbers + k, sizeof more);
            four |= more;
            std::memcpy(to, &four, sizeof four);
        }
        const auto sum = int32_t(int4_mean(found.numbers) * float(INT4_GROUP));
        return found.grid.factor * sum - found.grid.offset * int32_t(count);
    }
    static uint8_t *at(const Weight &weight, int64_t panel) {
        return static_cast<uint8_t *>(const_cast<void *>(weight.packed)) + panel * panel_bytes(weight);
    }
};

template <typename... Each> struct FormatList {
    static constexpr int COUNT = sizeof...(Each);
    // A row of this many elements is a whole number of steps of any format.
    static constexpr int MOST_INPUTS = 4;
    static_assert(((MOST_INPUTS % Each::INPUTS == 0) && ...), "a step's inputs divide MOST_INPUTS");

    // Calls f with the format called `id`.
    template <typename F> static void choose(int32_t id, F f) {
        (void)((id == int32_t(Each::ID) && (f(Each{}), true)) || ...);
    }
};
using Formats = FormatList<Bf16Format, Int8Format, Int4Format, Float32Format, Float16Format, WideBf16Format>;

// Whether rows of T are multiplied in a format: as they are where they have its size, and else rounded.
template <typename Format, typename T>
constexpr bool TAKES = Format::SCALED || sizeof(T) * Format::INPUTS == sizeof(int32_t);

// A panel's weights, and what to prefetch meanwhile: `prefetch_stride` bytes from `prefetch_from` on for each step.
struct Panel {
    const char *weights;
    const int32_t *compensation;  // what sums start from; of compensated weights only
    int64_t steps;
    const char *prefetch_from;
    int64_t prefetch_stride;
};

template <typename F> void with_format(const Weight &weight, F f) { Formats::choose(weight.format, f); }

// Bytes of rows packed for products with the weight: of one, and of `count`.
inline int64_t packed_row_bytes(const Weight &weight) {
    int64_t bytes = 0;
    with_format(weight, [&](auto format) { bytes = 4 * rounded_up(format.steps(weight), ROW_STEPS); });
    return bytes;
}
inline int64_t packed_bytes(const Weight &weight, int64_t count) {
    return packed_row_bytes(weight) * rounded_up(count, ROW_BLOCK);
}

// Whether rows are quantized for products with the weight.
inline bool quantizes_rows(const Weight &weight) {
    bool rounds = false;
    with_format(weight, [&](auto format) { rounds = format.SCALED; });
    return rounds;
}

} // namespace

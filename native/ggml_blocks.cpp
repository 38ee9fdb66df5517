// Numbers that ggml packs in blocks, as float32: the types that most GGUF files are made of. The layouts are those of
// the GGUF specification; the package gguf has the same and others in numpy, some ten times as slow. Each product here
// is exact but for the last one, so results are equal to the bit whether additions are fused or not.
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Of 16 bits, wherever it lies.
float half_at(const uint8_t *bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, sizeof half);
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, digits = half & 0x3ff;
    if (!exponent) {
        const float small = float(digits) * 5.9604644775390625e-8f;     // 2^-24
        return sign ? -small : small;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | digits << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Each type has so many numbers in a block of so many bytes, and its number in ggml.
// 32 numbers under one scale, of which the upper half of a byte is the one 16 further on. Of five bits the fifths come
// first, in one word. Behind the scale there may be a minimum; else numbers lie around zero.
template <int Kind, int Bits, bool HasMinimum> struct Simple {
    static constexpr int KIND = Kind, NUMBERS = 32, HEAD = HasMinimum ? 4 : 2, FIFTHS = Bits == 5 ? 4 : 0;
    static constexpr int BYTES = HEAD + FIFTHS + 16;

    static void unpack(const uint8_t *block, float *out) {
        const float scale = half_at(block), minimum = HasMinimum ? half_at(block + 2) : 0.0f;
        uint32_t fifths = 0;
        if (FIFTHS) std::memcpy(&fifths, block + HEAD, sizeof fifths);
        const uint8_t *fours = block + HEAD + FIFTHS;
        for (int i = 0; i < NUMBERS; i++) {
            const int number = (fours[i % 16] >> (i / 16 * 4) & 15) | int(fifths >> i & 1) << 4;
            out[i] = HasMinimum ? scale * float(number) + minimum : scale * float(number - (1 << (Bits - 1)));
        }
    }
};
using Q4_0 = Simple<2, 4, false>;
using Q4_1 = Simple<3, 4, true>;
using Q5_0 = Simple<6, 5, false>;
using Q5_1 = Simple<7, 5, true>;

struct Q8_0 {
    static constexpr int KIND = 8, NUMBERS = 32, BYTES = 34;

    static void unpack(const uint8_t *block, float *out) {
        const float scale = half_at(block);
        for (int i = 0; i < NUMBERS; i++) out[i] = scale * float(int8_t(block[2 + i]));
    }
};

// What Q4_K and Q5_K begin with: two halves, and for each of eight groups of 32 a scale and a minimum, of 6 bits each.
struct SuperBlock {
    static constexpr int GROUPS = 8, GROUP = 32, BYTES = 16;
    float scales[GROUPS], minima[GROUPS];

    explicit SuperBlock(const uint8_t *block) {
        const float scale = half_at(block), minimum = half_at(block + 2);
        const uint8_t *packed = block + 4;
        for (int i = 0; i < GROUPS; i++) {
            // The upper bits of the last four lie above those of the first.
            const int low = i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4);
            const int high = i < 4 ? packed[i + 4] & 63 : (packed[i + 4] >> 4) | (packed[i] >> 6 << 4);
            scales[i] = scale * float(low), minima[i] = minimum * float(high);
        }
    }
};

struct Q4_K {
    static constexpr int KIND = 12, NUMBERS = 256, BYTES = 144;

    static void unpack(const uint8_t *block, float *out) {
        const SuperBlock super(block);
        const uint8_t *numbers = block + SuperBlock::BYTES;
        for (int group = 0; group < SuperBlock::GROUPS; group++)
            for (int i = 0; i < SuperBlock::GROUP; i++) {
                const int number = numbers[group / 2 * SuperBlock::GROUP + i] >> (group % 2 * 4) & 15;
                out[group * SuperBlock::GROUP + i] = super.scales[group] * float(number) - super.minima[group];
            }
    }
};

struct Q5_K {
    static constexpr int KIND = 13, NUMBERS = 256, BYTES = 176;

    static void unpack(const uint8_t *block, float *out) {
        const SuperBlock super(block);
        const uint8_t *fifths = block + SuperBlock::BYTES, *numbers = fifths + SuperBlock::GROUP;
        for (int group = 0; group < SuperBlock::GROUPS; group++)
            for (int i = 0; i < SuperBlock::GROUP; i++) {
                const int low = numbers[group / 2 * SuperBlock::GROUP + i] >> (group % 2 * 4) & 15;
                const int number = low | (fifths[i] >> group & 1) << 4;
                out[group * SuperBlock::GROUP + i] = super.scales[group] * float(number) - super.minima[group];
            }
    }
};

// Two halves of 128 numbers: 64 bytes with four bits of each, 32 with two of each; then scales of 16 numbers each.
struct Q6_K {
    static constexpr int KIND = 14, NUMBERS = 256, BYTES = 210;

    static void unpack(const uint8_t *block, float *out) {
        const uint8_t *lower = block, *upper = block + 128, *scales = block + 192;
        const float scale = half_at(block + 208);
        for (int group = 0; group < 8; group++) {
            const int half = group / 4, quarter = group % 4;
            for (int i = 0; i < 32; i++) {
                const int low = lower[64 * half + 32 * (quarter % 2) + i] >> (quarter / 2 * 4) & 15;
                const int high = upper[32 * half + i] >> (2 * quarter) & 3;
                const float each = scale * float(int8_t(scales[2 * group + i / 16]));
                out[32 * group + i] = each * float((low | high << 4) - 32);
            }
        }
    }
};

// 32 floats of four bits under a power of two (OCP Microscaling Formats 1.0), of which the upper half of a byte is the one
// 16 further on.
struct MXFP4 {
    static constexpr int KIND = 39, NUMBERS = 32, BYTES = 17;

    static void unpack(const uint8_t *block, float *out) {
        // Twice the numbers, under half of the power, whose exponent can be below that of any normal float.
        static constexpr float DOUBLED[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        const uint32_t bits = block[0] < 2 ? 0x00200000u << block[0] : uint32_t(block[0] - 1) << 23;
        float scale;
        std::memcpy(&scale, &bits, sizeof scale);
        for (int i = 0; i < NUMBERS; i++) out[i] = scale * DOUBLED[block[1 + i % 16] >> (i / 16 * 4) & 15];
    }
};

template <typename Type> bool unpack_if(int32_t kind, const uint8_t *blocks, int64_t count, float *out) {
    if (kind != Type::KIND) return false;
#pragma omp parallel for schedule(static) if (count * Type::NUMBERS >= 1 << 16)
    for (int64_t i = 0; i < count; i++) Type::unpack(blocks + i * Type::BYTES, out + i * Type::NUMBERS);
    return true;
}

template <typename... Types> bool unpack_any(int32_t kind, const uint8_t *blocks, int64_t count, float *out) {
    return (unpack_if<Types>(kind, blocks, count, out) || ...);
}

} // namespace

// Unpacks so many blocks of a type, by its number in ggml; returns whether it is one of those that this knows.
EXPORT int32_t chairlift_unpack_blocks(int32_t kind, const uint8_t *blocks, int64_t count, float *out) {
    return unpack_any<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4>(kind, blocks, count, out);
}

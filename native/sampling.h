// Draws tokens from each row of logits: temperature, min_p, top_k, top_p, then the CDF inverted in vocabulary order.
//
// Filters need no sorting: they are one threshold on the weights exp((logit - best) / temperature), in [0, 1].
// Positive floats are in the order of their bits, so a histogram over the upper bits finds the bucket of the threshold,
// and only that bucket is sorted.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace {

class Sampler {
    static constexpr int SHIFT = 19, BUCKETS = (0x3f800000 >> SHIFT) + 1;
    static constexpr int64_t CHUNK = 128;
    std::vector<float> weights, bucket;
    std::vector<double> sums, chunks;
    std::vector<int32_t> counts;

    static int bucket_of(float weight) { return int(bit_cast<uint32_t>(weight) >> SHIFT); }

    void compute_weights(const float *logits, int64_t vocab, float temperature) {
        weights.resize(vocab);
        float best = logits[0];
#pragma omp simd reduction(max : best)
        for (int64_t i = 0; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
        float *to = weights.data();
        const float inverse = 1.0f / temperature;
#pragma omp simd
        for (int64_t i = 0; i < vocab; i++) {
            // At a temperature near zero the inverse is infinite, and so is any distance but none.
            const float below = logits[i] - best;
            to[i] = exp_(below < 0.0f ? below * inverse : 0.0f);
        }
    }

    void fill_histogram(float threshold) {
        sums.assign(BUCKETS, 0.0);
        counts.assign(BUCKETS, 0);
        for (const float weight : weights) {
            if (!(weight >= threshold)) continue;
            sums[bucket_of(weight)] += weight;
            counts[bucket_of(weight)]++;
        }
    }

    // The weights of a bucket that are not below `threshold`, highest first.
    const std::vector<float> &sorted(int index, float threshold) {
        bucket.clear();
        for (const float weight : weights)
            if (weight >= threshold && bucket_of(weight) == index) bucket.push_back(weight);
        std::sort(bucket.begin(), bucket.end(), [](float a, float b) { return a > b; });
        return bucket;
    }

    // The weight of the k-th likeliest of those not below `threshold`; `threshold` if there are fewer.
    float kth_largest(int64_t k, float threshold) {
        for (int index = BUCKETS - 1; index >= 0; index--) {
            if (k <= counts[index]) return sorted(index, threshold)[k - 1];
            k -= counts[index];
        }
        return threshold;
    }

    // The weight of the last of the fewest likeliest not below `threshold` that make up `share` of all those.
    float nucleus_threshold(double share, float threshold) {
        double wanted = 0;
        for (const double sum : sums) wanted += sum;
        wanted *= share;
        for (int index = BUCKETS - 1; index >= 0; index--) {
            if (wanted <= sums[index] && counts[index]) {
                for (const float weight : sorted(index, threshold))
                    if ((wanted -= weight) <= 0) return weight;
                return bucket.back();
            }
            wanted -= sums[index];
        }
        return threshold;
    }

    // The running sums of the weights not below `threshold`, to the end of each chunk.
    void sum_chunks(float threshold) {
        const int64_t vocab = weights.size();
        chunks.clear();
        double total = 0;
        for (int64_t first = 0; first < vocab; first += CHUNK) {
            const int64_t end = first + CHUNK < vocab ? first + CHUNK : vocab;
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = first; i < end; i++) sum += weights[i] >= threshold ? double(weights[i]) : 0.0;
            chunks.push_back(total += sum);
        }
    }

    // The first token at which the running sum of the weights not below `threshold` exceeds `uniform` of their total.
    int64_t invert_cdf(double uniform, float threshold) const {
        const int64_t vocab = weights.size();
        const double target = uniform * chunks.back();
        int64_t chunk = std::upper_bound(chunks.begin(), chunks.end(), target) - chunks.begin();
        double upto = chunk ? chunks[chunk - 1] : 0.0;
        int64_t last = -1;
        // Rounding may leave the last chunk, or the last of a chunk, a little short of the target.
        for (chunk = chunk < int64_t(chunks.size()) ? chunk : chunk - 1; last < 0 && chunk >= 0; chunk--)
            for (int64_t i = chunk * CHUNK; i < vocab && i < (chunk + 1) * CHUNK; i++) {
                if (!(weights[i] >= threshold)) continue;
                last = i;
                if ((upto += weights[i]) > target) return i;
            }
        return last;
    }

  public:
    void draw(const float *logits, int64_t vocab, const Draws &draws, int64_t row, int64_t *ids) {
        compute_weights(logits, vocab, draws.temperature[row]);
        // A weight of nothing is never drawn.
        float threshold = std::max(draws.min_p[row], 1e-45f);
        if (draws.top_k[row] > 0 && draws.top_k[row] < vocab) {
            fill_histogram(threshold);
            threshold = kth_largest(draws.top_k[row], threshold);
        }
        if (draws.top_p[row] < 1) {
            fill_histogram(threshold);
            threshold = nucleus_threshold(draws.top_p[row], threshold);
        }
        sum_chunks(threshold);
        for (int64_t i = 0; i < draws.count; i++) ids[i] = invert_cdf(draws.uniform[row * draws.count + i], threshold);
    }
};

// ids [rows, draws.count] drawn from logits [rows, vocab], each of which has a finite highest logit.
void draw(const float *logits, int64_t rows, int64_t vocab, const Draws &draws, int64_t *ids) {
    with_team(rows > 1, [&](Team &team) {
        static thread_local Sampler sampler;
        for (int64_t row = team.take(); row < rows; row = team.take())
            sampler.draw(logits + row * vocab, vocab, draws, row, ids + row * draws.count);
    });
}

// The highest of each row of logits [rows, vocab], and the first place that has it; NaN for a row that has one.
void highest(const float *logits, int64_t rows, int64_t vocab, int64_t *ids, float *values) {
    constexpr int64_t CHUNK = 256;
    with_team(rows > 1, [&](Team &team) {
        for (int64_t row = team.take(); row < rows; row = team.take()) {
            const float *from = logits + row * vocab;
            float best = -__builtin_inff();
            int32_t strange = 0;
#pragma omp simd reduction(max : best) reduction(| : strange)
            for (int64_t i = 0; i < vocab; i++) {
                best = from[i] > best ? from[i] : best;
                strange |= from[i] != from[i];
            }
            int64_t place = 0;
            for (int32_t found = 0; !strange && place < vocab; place += CHUNK) {
                const int64_t end = std::min(place + CHUNK, vocab);
#pragma omp simd reduction(| : found)
                for (int64_t i = place; i < end; i++) found |= from[i] == best;
                if (found) break;
            }
            while (!strange && from[place] != best) place++;
            ids[row] = place;
            values[row] = strange ? __builtin_nanf("") : best;
        }
    });
}

// Makes all logits [rows, vocab] negative infinity whose bit is not set in what `allowed` has for their row, if anything.
void exclude(float *logits, int64_t rows, int64_t vocab, const uint32_t *const *allowed) {
    constexpr int BITS = 32;
    with_team(rows > 1, [&](Team &team) {
        for (int64_t row = team.take(); row < rows; row = team.take())
            for (int64_t word = 0; allowed[row] && word * BITS < vocab; word++) {
                const uint32_t bits = allowed[row][word];
                if (bits == ~0u) continue;
                float *some = logits + row * vocab + word * BITS;
                const int count = int(std::min<int64_t>(BITS, vocab - word * BITS));
                for (int i = 0; i < count; i++) some[i] = bits >> i & 1 ? some[i] : -__builtin_inff();
            }
    });
}

} // namespace

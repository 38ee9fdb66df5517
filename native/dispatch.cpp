// Chooses the kernels that this processor can run, and exports them as plain C functions.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "layout.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Choice {
    const char *name;
    const Kernels *kernels;
    bool runs_here;
};

const Choice *chosen = nullptr;

#if defined(HAVE_AMX)
// Asks Linux for the registers of AMX, which it gives to a process that asks. Whether there are any, cpuid has told.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

#if defined(__x86_64__)
// Not every compiler that has the instructions knows their name.
bool converts_float16() {
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

// All sets of kernels, the fastest first.
std::vector<Choice> find_choices() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_float16();
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return {
#if defined(HAVE_AMX)
        {"amx", &amx::kernels,
         has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") && may_use_tiles()},
#endif
#if defined(HAVE_AVX512BF16)
        {"avx512bf16", &avx512bf16::kernels,
         has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")},
#endif
#if defined(HAVE_AVX512VNNI)
        {"avx512vnni", &avx512vnni::kernels, has_avx512 && __builtin_cpu_supports("avx512vnni")},
#endif
#if defined(HAVE_AVX512)
        {"avx512", &avx512::kernels, has_avx512},
#endif
#if defined(HAVE_AVXVNNI)
        {"avxvnni", &avxvnni::kernels, has_avx2 && __builtin_cpu_supports("avxvnni")},
#endif
#if defined(HAVE_AVX2)
        {"avx2", &avx2::kernels, has_avx2},
#endif
        {"baseline", &baseline::kernels, true},
    };
}

const std::vector<Choice> &all_choices() {
    static const std::vector<Choice> choices = find_choices();
    return choices;
}

// The set of kernels that is wanted, or the fastest that runs here; null if there is none.
const Choice *best_choice(const char *wanted) {
    for (const Choice &choice : all_choices())
        if (choice.runs_here && (!wanted || !std::strcmp(wanted, choice.name))) return &choice;
    return nullptr;
}

// What multiplies weights of a format: the chosen kernels or, if they do not, the next that run here and do.
const Kernels &kernels_for(int32_t format) {
    for (const Choice *choice = chosen; choice <= &all_choices().back(); choice++)
        if (choice->runs_here && choice->kernels->formats[format].path) return *choice->kernels;
    return *chosen->kernels;
}

const Kernels &kernels_of(const Weight &weight) { return kernels_for(weight.format); }

// The least seconds of a bfloat16 product of `ROWS` rows, of a few turns.
double seconds_of_product(const Kernels &kernels) {
    constexpr int64_t ROWS = 48, OUTS = 256, INS = 512;
    static const std::vector<uint16_t> x(ROWS * INS, 0x3f80), given(OUTS * INS, 0x3f80);
    std::vector<uint16_t> packed(OUTS * INS), out(ROWS * OUTS);
    const Weight weight{packed.data(), nullptr, nullptr, nullptr, OUTS, INS, int32_t(FormatId::BFLOAT16), 0, -1};
    kernels.pack(given.data(), nullptr, weight, BFLOAT16);
    double least = 1e9;
    for (int turn = 0; turn < 5; turn++) {
        const auto began = std::chrono::steady_clock::now();
        kernels.linear(x.data(), ROWS, weight, out.data(), false, BFLOAT16);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
        if (turn && taken.count() < least) least = taken.count();
    }
    return least;
}

// What becomes of a call.
template <typename Call> Status status_of(Call call) {
    try {
        call();
    } catch (const std::bad_alloc &) {
        return {true};
    }
    return {false};
}

} // namespace

// Which of two sets of kernels multiplies bfloat16 faster here: the second only if it is so by a sixth, so that the
// choice is the same at every start. Null if one of them is none or cannot run.
EXPORT const char *chairlift_faster(const char *first, const char *second) {
    const Choice *one = best_choice(first), *other = best_choice(second);
    if (!one || !other) return nullptr;
    double seconds[2] = {1e9, 1e9};
    for (int round = 0; round < 3; round++) {
        seconds[0] = std::min(seconds[0], seconds_of_product(*one->kernels));
        seconds[1] = std::min(seconds[1], seconds_of_product(*other->kernels));
    }
    return seconds[1] * 7 < seconds[0] * 6 ? other->name : one->name;
}

// Selects the kernels called `isa`, or the fastest that run here if null, and returns their name; null if there are
// none.
EXPORT const char *chairlift_select(const char *isa) {
    const Choice *choice = best_choice(isa);
    if (choice) chosen = choice;
    return choice ? choice->name : nullptr;
}

// The fields of all structures; the return value is how many.
EXPORT int32_t chairlift_layout(const Field **fields) {
    *fields = LAYOUT;
    return sizeof LAYOUT / sizeof *LAYOUT;
}

EXPORT Status chairlift_rms_norm(const void *x, void *residual, const void *weight, int32_t weight_dtype, void *out,
                                 int64_t rows, int64_t dim, float eps, int32_t dtype) {
    return status_of([&] {
        chosen->kernels->rms_norm(x, residual, Norm{weight, weight_dtype}, out, rows, dim, eps, dtype);
    });
}

EXPORT Status chairlift_gate(const void *gate_up, void *out, int64_t rows, int64_t dim, int32_t activation,
                             int32_t dtype) {
    return status_of([&] { chosen->kernels->gate(gate_up, out, rows, dim, activation, dtype); });
}

EXPORT Status chairlift_rope_and_write(const void *qkv, void *q_out, const RotaryTable *rotation,
                                       const int64_t *positions, const int64_t *slots, void *k_cache, void *v_cache,
                                       const HeadNorms *norms, int64_t tokens, const Heads *heads, int32_t dtype) {
    return status_of([&] {
        chosen->kernels->rope_and_write(qkv, q_out, *rotation, positions, slots, k_cache, v_cache, *norms, tokens,
                                        *heads, dtype);
    });
}

EXPORT Status chairlift_attention(const void *q, void *out, const void *k_cache, const void *v_cache,
                                  const int32_t *query_start, const int32_t *context_len, const int32_t *block_tables,
                                  int64_t table_stride, int32_t num_seqs, const Heads *heads, const float *sinks,
                                  int32_t dtype) {
    const Batch batch{query_start, context_len, block_tables, table_stride, num_seqs};
    return status_of([&] { chosen->kernels->attention(q, out, k_cache, v_cache, batch, *heads, sinks, dtype); });
}

// What is known of a format by the kernels that multiply it; null if there is none of this id.
EXPORT const FormatInfo *chairlift_format(int32_t format) {
    return format >= 0 && format < chosen->kernels->num_formats ? kernels_for(format).formats + format : nullptr;
}

EXPORT Status chairlift_pack(const void *weight, const void *bias, const Weight *packed, int32_t dtype) {
    return status_of([&] { kernels_of(*packed).pack(weight, bias, *packed, dtype); });
}

EXPORT Status chairlift_linear(const void *x, int64_t rows, const Weight *weight, void *out, int32_t floats,
                               int32_t dtype) {
    return status_of([&] { kernels_of(*weight).linear(x, rows, *weight, out, floats, dtype); });
}

EXPORT Status chairlift_best(const void *x, int64_t rows, const Weight *weight, const uint32_t *const *allowed,
                             int64_t most, int64_t *index, float *value, int32_t dtype) {
    return status_of([&] { kernels_of(*weight).best(x, rows, *weight, allowed, most, index, value, dtype); });
}

EXPORT Status chairlift_embed(const int64_t *ids, int64_t rows, const Weight *head, void *out, int32_t dtype) {
    return status_of([&] { kernels_of(*head).embed(ids, rows, *head, out, dtype); });
}

EXPORT Status chairlift_decode(const Decoder *decoder, const Pass *pass, void *hidden) {
    return status_of([&] { kernels_of(decoder->layers->out).decode(*decoder, *pass, hidden); });
}

EXPORT Status chairlift_add_mlp(const Decoder *decoder, const void *added, void *residual, int64_t rows) {
    return status_of([&] { kernels_of(decoder->layers->down).add_mlp(*decoder, added, residual, rows); });
}

EXPORT Status chairlift_encode(const Encoder *encoder, const Texts *texts, float *out) {
    return status_of([&] { kernels_of(encoder->layers->out).encode(*encoder, *texts, out); });
}

EXPORT Status chairlift_draw(const float *logits, int64_t rows, int64_t vocab, const Draws *draws, int64_t *ids) {
    return status_of([&] { chosen->kernels->draw(logits, rows, vocab, *draws, ids); });
}

EXPORT Status chairlift_highest(const float *logits, int64_t rows, int64_t vocab, int64_t *ids, float *values) {
    return status_of([&] { chosen->kernels->highest(logits, rows, vocab, ids, values); });
}

EXPORT Status chairlift_causal_conv(const StateSpans *spans, const Convolution *conv, int32_t dtype) {
    return status_of([&] { chosen->kernels->causal_conv(*spans, *conv, dtype); });
}

EXPORT Status chairlift_gated_delta(const StateSpans *spans, const DeltaRule *rule, int32_t dtype) {
    return status_of([&] { chosen->kernels->gated_delta(*spans, *rule, dtype); });
}

EXPORT Status chairlift_mamba2(const StateSpans *spans, const Mamba2 *mamba, int32_t dtype) {
    return status_of([&] { chosen->kernels->mamba2(*spans, *mamba, dtype); });
}

EXPORT Status chairlift_exclude_tokens(float *logits, int64_t rows, int64_t vocab, const uint32_t *const *allowed) {
    return status_of([&] { chosen->kernels->exclude(logits, rows, vocab, allowed); });
}

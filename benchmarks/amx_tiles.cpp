// How long AMX's products take with one tile of rows at once and with two, from the first cache and from the second:
//   g++ -O2 -march=sapphirerapids amx_tiles.cpp -o amx_tiles && ./amx_tiles [ROUNDS]
// Prints a line for each: nanoseconds a product of two tiles, the least, the median and the most of all rounds. The ways
// take turns, some milliseconds each, so that what slows the machine down for a while is seen in all of them.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr long BLOCKS = 100000, BLOCK_BYTES = 2048, MOST_BLOCKS = 32;
alignas(4096) char rows[BLOCK_BYTES * MOST_BLOCKS], weights[BLOCK_BYTES * MOST_BLOCKS];

struct alignas(64) Config {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Rows and weights of one block: 2 products of one tile of rows, or 4 of two, which takes all eight tiles.
template <bool TWO> void multiply(const char *x, const char *w) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w, 128);
    _tile_loadd(7, w + 64, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
        _tile_loadd(5, x + 1024, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Nanoseconds a product, over so many blocks again and again: what these take lies in the first cache, or does not.
template <bool TWO> double timed(long blocks) {
    const auto began = std::chrono::steady_clock::now();
    for (long i = 0; i < BLOCKS; i++) {
        const long at = i % blocks * BLOCK_BYTES;
        multiply<TWO>(rows + at, weights + at);
    }
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - began;
    return taken.count() / BLOCKS / (TWO ? 4 : 2);
}

void report(const char *name, std::vector<double> &seen) {
    std::sort(seen.begin(), seen.end());
    std::printf("%-36s %5.1f %5.1f %5.1f\n", name, seen.front(), seen[seen.size() / 2], seen.back());
}

} // namespace

int main(int count, char **arguments) {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    const long rounds = count > 1 ? std::atol(arguments[1]) : 500;
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) || rounds < 1) {
        std::fprintf(stderr, "needs a processor with AMX, and at least one round\n");
        return 1;
    }
    // Memory that nobody wrote to is one page, which lies in the first cache.
    std::memset(rows, 0, sizeof rows);
    std::memset(weights, 0, sizeof weights);
    Config config;
    _tile_loadconfig(&config);
    std::vector<double> seen[4];
    for (long round = 0; round < rounds; round++) {
        seen[0].push_back(timed<false>(4));
        seen[1].push_back(timed<true>(4));
        seen[2].push_back(timed<false>(MOST_BLOCKS));
        seen[3].push_back(timed<true>(MOST_BLOCKS));
    }
    std::printf("ns a product                         least median most\n");
    report("one tile of rows, first cache", seen[0]);
    report("two tiles of rows, first cache", seen[1]);
    report("one tile of rows, second cache", seen[2]);
    report("two tiles of rows, second cache", seen[3]);
}

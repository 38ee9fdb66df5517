// Memory of the KV cache that is there before it is used, by a thread that rests most of the time.
//
// It has no low priority, and is none of the interpreter's threads: it holds the lock of the process's memory while it
// is supplied a page, which others need to grow their heaps. A thread that runs only where others leave time would lose
// its core to the model's threads meanwhile, for as long as a step takes, and everyone else would wait that long.
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__linux__)
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace {

constexpr uint64_t SMALL_PAGE = 4096;
// Unless more spans than this are missing, the thread rests after each page, so many times as long as that took: a host
// that has to find a page first stops the core, and a step beside which many came one after the other took three times
// as long.
constexpr int64_t HURRY = 3, REST = 4;

struct Array {
    uint64_t address;
    int64_t block_bytes;
};

struct Supply {
    std::vector<Array> arrays;
    int64_t num_blocks, span;
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<int64_t> wanted{0}, ready{0};
    std::atomic<bool> ended{false};
};

std::chrono::nanoseconds thread_time() {
    timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

// Supplies one more span. Returns false if the system can't.
bool supply_span(Supply &supply) {
    const int64_t first = supply.ready, stop = std::min(first + supply.span, supply.num_blocks);
    for (const Array &array : supply.arrays) {
        if (supply.ended) return true;
        const auto started = thread_time();
        const uint64_t begin = (array.address + first * array.block_bytes) / SMALL_PAGE * SMALL_PAGE;
        const uint64_t end = array.address + stop * array.block_bytes;
        if (madvise(reinterpret_cast<void *>(begin), end - begin, MADV_POPULATE_WRITE)) return false;
        if (first + supply.span * HURRY >= supply.wanted) std::this_thread::sleep_for(REST * (thread_time() - started));
    }
    supply.ready = stop;
    return true;
}

void keep_ready(std::shared_ptr<Supply> supply) {
    while (supply->ready < supply->num_blocks) {
        {
            std::unique_lock<std::mutex> lock(supply->mutex);
            supply->changed.wait(lock, [&] { return supply->ended || supply->ready < supply->wanted; });
        }
        if (supply->ended) return;
        if (!supply_span(*supply)) supply->ready = supply->num_blocks;
    }
}

} // namespace

// Begins to supply `count` arrays, of which each has `num_blocks` blocks of so many bytes from its address on, `span`
// blocks at a time, as far as they are wanted. Returns what the others take; null if no thread can be started.
EXPORT void *chairlift_begin_supply(const uint64_t *addresses, const int64_t *block_bytes, int64_t count,
                                    int64_t num_blocks, int64_t span) {
    auto supply = std::make_shared<Supply>();
    for (int64_t i = 0; i < count; i++) supply->arrays.push_back({addresses[i], block_bytes[i]});
    supply->num_blocks = num_blocks;
    supply->span = span;
    try {
        std::thread(keep_ready, supply).detach();
    } catch (const std::system_error &) {
        return nullptr;
    }
    return new std::shared_ptr<Supply>(std::move(supply));
}

// Wants the first `blocks` blocks, if they are more than before. Returns how many are there.
EXPORT int64_t chairlift_supply(void *handle, int64_t blocks) {
    Supply &supply = **static_cast<std::shared_ptr<Supply> *>(handle);
    if (blocks > supply.wanted) {
        const std::lock_guard<std::mutex> lock(supply.mutex);
        supply.wanted = std::min(blocks, supply.num_blocks);
        supply.changed.notify_one();
    }
    return supply.ready;
}

// Ends the thread, after the page that it may be at, and frees what the handle stands for.
EXPORT void chairlift_end_supply(void *handle) {
    auto *supply = static_cast<std::shared_ptr<Supply> *>(handle);
    {
        const std::lock_guard<std::mutex> lock((*supply)->mutex);
        (*supply)->ended = true;
        (*supply)->changed.notify_one();
    }
    delete supply;
}

#else

EXPORT void *chairlift_begin_supply(const uint64_t *, const int64_t *, int64_t, int64_t, int64_t) { return nullptr; }
EXPORT int64_t chairlift_supply(void *, int64_t) { return 0; }
EXPORT void chairlift_end_supply(void *) {}

#endif

// Memory of the KV cache that is there before it is used, by a thread that runs only where others leave time, and by a
// second one, as urgent as any, where they leave too little.
//
// The first loses its core to the model's threads for as long as a step takes, so it must hold nothing meanwhile that
// others wait for: it is none of the interpreter's threads, and it writes to the memory instead of asking the system
// to supply it: a fault holds the lock of its own mapping, MADV_POPULATE_WRITE that of all the process's memory, for
// which everyone waits who grows a heap.
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__linux__)
#include <sched.h>
#include <sys/utsname.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace {

constexpr uint64_t SMALL_PAGE = 4096;
// A thread rests after each page, so many times as long as that took, unless even what is in use is not there: a host
// that has to find a page first stops the core, whatever the thread's priority, and a step beside which many came one
// after the other took three times as long.
constexpr int64_t REST = 2;
constexpr std::chrono::milliseconds LOOK_AGAIN{50};

struct Array {
    uint64_t address;
    int64_t block_bytes;
};

struct Supply {
    std::vector<Array> arrays;
    int64_t num_blocks, span, lead;
    // Until when models of this process are at work, by the monotonic clock.
    const volatile int64_t *busy_until;
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<int64_t> wanted{0}, ready{0};
    std::atomic<bool> ended{false};
    std::thread idle, urgent;
};

std::chrono::nanoseconds thread_time() {
    timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

bool is_quiet(const Supply &supply) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec >= *supply.busy_until;
}

// Once blocks beyond the first span were wanted somebody uses the model, and will come to all of them.
bool has_time(const Supply &supply) { return supply.wanted > supply.span && is_quiet(supply); }

// Writes to each page, and changes nothing: the model may be writing there as well. A page that nobody has used is zero.
void touch(const Supply &supply, uint64_t begin, uint64_t end) {
    for (uint64_t page = begin; page < end && !supply.ended; page += SMALL_PAGE) {
        uint8_t zero = 0;
        __atomic_compare_exchange_n(reinterpret_cast<uint8_t *>(page), &zero, 0, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
    }
}

void supply_span(Supply &supply) {
    const int64_t first = supply.ready, stop = std::min(first + supply.span, supply.num_blocks);
    for (const Array &array : supply.arrays) {
        // What nobody wants yet waits for a quiet moment.
        while (!supply.ended && first >= supply.wanted && !is_quiet(supply)) std::this_thread::sleep_for(LOOK_AGAIN);
        if (supply.ended) return;
        const auto started = thread_time();
        touch(supply, array.address + first * array.block_bytes, array.address + stop * array.block_bytes);
        if (first + supply.span + supply.lead >= supply.wanted && !is_quiet(supply))
            std::this_thread::sleep_for(REST * (thread_time() - started));
    }
    const std::lock_guard<std::mutex> lock(supply.mutex);
    supply.ready = std::max<int64_t>(supply.ready, stop);
}

// Whether a fault holds the lock of its own mapping alone, which is so from Linux 6.4 on.
bool faults_alone() {
    utsname system;
    int major = 0, minor = 0;
    if (uname(&system) || std::sscanf(system.release, "%d.%d", &major, &minor) != 2) return false;
    return major > 6 || (major == 6 && minor >= 4);
}

// Keeps all that is wanted ready, or all but what the other thread has the time for. While no model is at work the idle
// one goes on to the end, so that later steps find all of the memory there.
void keep_ready(Supply &supply, bool is_urgent) {
    const sched_param lowest{};
    const int64_t lead = is_urgent ? supply.lead : 0;
    if (!is_urgent && faults_alone()) sched_setscheduler(0, SCHED_IDLE, &lowest);
    while (supply.ready < supply.num_blocks) {
        {
            std::unique_lock<std::mutex> lock(supply.mutex);
            const auto is_due = [&] {
                return supply.ended || supply.ready < supply.wanted - lead || (!is_urgent && has_time(supply));
            };
            if (is_urgent)
                supply.changed.wait(lock, is_due);
            else
                while (!is_due()) supply.changed.wait_for(lock, LOOK_AGAIN);
        }
        if (supply.ended) return;
        supply_span(supply);
    }
}

void end(Supply &supply) {
    {
        const std::lock_guard<std::mutex> lock(supply.mutex);
        supply.ended = true;
        supply.changed.notify_all();
    }
    for (std::thread *thread : {&supply.idle, &supply.urgent})
        if (thread->joinable()) thread->join();
}

} // namespace

// Begins to supply `count` arrays, of which each has `num_blocks` blocks of so many bytes from its address on, `span`
// blocks at a time, as far as they are wanted; what is wanted but the last `lead` blocks is urgent. All else comes once
// some were wanted, while it is later than `busy_until`. Returns what the others take; null if memory or a thread is
// refused.
EXPORT void *chairlift_begin_supply(const uint64_t *addresses, const int64_t *block_bytes, int64_t count,
                                    int64_t num_blocks, int64_t span, int64_t lead,
                                    const volatile int64_t *busy_until) {
    std::unique_ptr<Supply> supply(new (std::nothrow) Supply);
    if (!supply) return nullptr;
    supply->num_blocks = num_blocks;
    supply->span = span;
    supply->lead = lead;
    supply->busy_until = busy_until;
    try {
        for (int64_t i = 0; i < count; i++) supply->arrays.push_back({addresses[i], block_bytes[i]});
        supply->idle = std::thread(keep_ready, std::ref(*supply), false);
        supply->urgent = std::thread(keep_ready, std::ref(*supply), true);
    } catch (const std::exception &) {
        end(*supply);
        return nullptr;
    }
    return supply.release();
}

// Wants the first `blocks` blocks, if they are more than before. Returns how many are there.
EXPORT int64_t chairlift_supply(void *handle, int64_t blocks) {
    Supply &supply = *static_cast<Supply *>(handle);
    if (blocks > supply.wanted) {
        const std::lock_guard<std::mutex> lock(supply.mutex);
        supply.wanted = std::min(blocks, supply.num_blocks);
        supply.changed.notify_all();
    }
    return supply.ready;
}

// Waits until the threads have left the memory, and frees what the handle stands for.
EXPORT void chairlift_end_supply(void *handle) {
    const std::unique_ptr<Supply> supply(static_cast<Supply *>(handle));
    end(*supply);
}

#else

EXPORT void *chairlift_begin_supply(const uint64_t *, const int64_t *, int64_t, int64_t, int64_t, int64_t,
                                    const volatile int64_t *) {
    return nullptr;
}
EXPORT int64_t chairlift_supply(void *, int64_t) { return 0; }
EXPORT void chairlift_end_supply(void *) {}

#endif

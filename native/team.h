// The threads that run one pass together: all of them call the same functions, and each takes its share of every phase.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <vector>

#include "kernels.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace {

struct Range {
    int64_t begin, end;
};

// Where everyone waits for everyone. Who waits longer than a phase's imbalance sleeps: it may well occupy the very core
// that the last one needs, when something else runs on the machine.
class Barrier {
    static constexpr int SPINS = 10000;  // some 200 microseconds
    std::atomic<uint32_t> generation{0};
    std::atomic<int> arrived{0}, sleepers{0};

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void sleep_while(uint32_t now) {
        sleepers++;
#if defined(__linux__)
        syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
#else
        sched_yield();
#endif
        sleepers--;
    }

    void wake() {
#if defined(__linux__)
        if (sleepers) syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
    }

  public:
    NOINLINE void wait(int threads) {
        const uint32_t now = generation;
        if (++arrived == threads) {
            arrived = 0;
            generation++;
            wake();
            return;
        }
        for (int spin = 0; spin < SPINS; spin++) {
            if (generation.load(std::memory_order_acquire) != now) return;
            relax();
        }
        while (generation == now) sleep_while(now);
    }
};

// How many tasks of a phase are taken, for each of three phases in turn, so that the next one's are at zero.
struct alignas(64) Counter {
    std::atomic<int64_t> all[3] = {}, own[3] = {};
};

// One thread's view of its team. What lies between two waits is a phase.
struct Team {
    int thread, threads;
    Barrier *barrier;
    Counter *counters;  // of each thread; `all` of the first thread only
    std::atomic<bool> *refused;     // whether any of them was refused memory, so that what they make is worth nothing
    int phase = 0;

    // Goes on once everyone has come here.
    void wait() {
        if (threads > 1) barrier->wait(threads);
        phase++;
        // Who still used these left two phases ago.
        counters[thread].all[(phase + 1) % 3].store(0, std::memory_order_relaxed);
        counters[thread].own[(phase + 1) % 3].store(0, std::memory_order_relaxed);
    }

    // The next task of this phase that nobody has taken.
    int64_t take() { return counters[0].all[phase % 3].fetch_add(1, std::memory_order_relaxed); }

    // The same out of `tasks`, neighbours going to the same thread as long as it keeps up; -1 if none is left.
    NOINLINE int64_t take_near(int64_t tasks) {
        for (int i = 0; i < threads; i++) {
            const int owner = (thread + i) % threads;
            const int64_t begin = tasks * owner / threads, end = tasks * (owner + 1) / threads;
            std::atomic<int64_t> &taken = counters[owner].own[phase % 3];
            if (taken.load(std::memory_order_relaxed) >= end - begin) continue;
            const int64_t task = begin + taken.fetch_add(1, std::memory_order_relaxed);
            if (task < end) return task;
        }
        return -1;
    }

    // Runs work that has no wait in it. Whoever is refused memory leaves the rest of it out, and comes to the next wait
    // like all others.
    template <typename Work> void attempt(Work work) {
        try {
            work();
        } catch (const std::bad_alloc &) {
            *refused = true;
        }
    }

    // This thread's even share of `count` things that all take as long.
    Range share(int64_t count) const { return {count * thread / threads, count * (thread + 1) / threads}; }
};

// Runs `work(team)` on every thread, or on this one alone. Throws std::bad_alloc if any was refused memory; those that
// allocate between two waits attempt it.
template <typename Work> void with_team(bool parallel, Work work) {
    static thread_local std::vector<Counter> memory;
    const int most = parallel ? omp_get_max_threads() : 1;
    if (int(memory.size()) < most) memory = std::vector<Counter>(most);
    Counter *counters = memory.data();
    for (int i = 0; i < most; i++)
        for (int phase = 0; phase < 3; phase++) counters[i].all[phase] = counters[i].own[phase] = 0;
    Barrier barrier;
    std::atomic<bool> refused{false};
#pragma omp parallel num_threads(most) if (most > 1)
    {
        Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier, counters, &refused};
        team.attempt([&] { work(team); });
    }
    if (refused) throw std::bad_alloc();
}

} // namespace

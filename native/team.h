// The threads that run one pass together: all of them call the same functions, and each takes its share of every phase.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstdint>

namespace {

struct Range {
    int64_t begin, end;
};

// One thread's view of its team. Between two waits, which make a phase, the team has one counter that starts at zero.
struct Team {
    int thread, threads;
    std::atomic<int64_t> *counters;  // three, of which the next phase's is at zero
    int phase = 0;

    // Goes on once everyone has come here.
    void wait() {
#pragma omp barrier
        phase++;
        // Who still used this one left two phases ago.
        if (thread == 0) counters[(phase + 1) % 3].store(0, std::memory_order_relaxed);
    }

    // The next `count` tasks of this phase that nobody has taken; the first of them is returned.
    int64_t take(int64_t count = 1) { return counters[phase % 3].fetch_add(count, std::memory_order_relaxed); }

    // This thread's even share of `count` things that all take as long.
    Range share(int64_t count) const { return {count * thread / threads, count * (thread + 1) / threads}; }
};

// Runs `work(team)` on every thread, or on this one alone.
template <typename Work> void with_team(bool parallel, Work work) {
    std::atomic<int64_t> counters[3] = {};
#pragma omp parallel if (parallel)
    {
        Team team{omp_get_thread_num(), omp_get_num_threads(), counters};
        work(team);
    }
}

} // namespace

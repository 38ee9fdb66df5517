// Threads that pause again and again as long as a model is at work.
//
// Linux lets a thread of the lowest priority run on until the next tick of its core, 4 ms at 250 Hz, and the model's
// thread on that core waits. So a timer interrupts it much sooner, and the handler of its signal, which runs in that
// thread, sleeps. A thread may hold a lock meanwhile: not the interpreter's, which is asked for, so this is only for
// threads whose other locks nobody waits for.
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__linux__)
#include <signal.h>
#include <time.h>

#include <atomic>
#include <cerrno>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace {

constexpr long RUNS = 500'000, PAUSES = 5'000'000;      // nanoseconds
constexpr long AGAIN = 50'000;                          // until the interpreter's lock may have been let go of
constexpr int MOST = 64;

// Never freed, as a signal may still be on its way when its thread ends.
struct Slot {
    std::atomic<bool> taken{false};
    std::atomic<bool> made{false};
    timer_t timer;
};

Slot slots[MOST];
std::atomic<int64_t> pauses{0};
int (*holds_interpreter)() = nullptr;
const volatile int64_t *busy_until = nullptr;           // by the monotonic clock, in nanoseconds

bool model_is_busy() {
    timespec now;
    return !clock_gettime(CLOCK_MONOTONIC, &now) && now.tv_sec * 1'000'000'000ll + now.tv_nsec < *busy_until;
}

void arm(const Slot &slot, long nanoseconds) {
    const itimerspec once{{0, 0}, {0, nanoseconds}};
    timer_settime(slot.timer, 0, &once, nullptr);
}

void on_signal(int, siginfo_t *info, void *) {
    const int before = errno;
    auto *slot = static_cast<Slot *>(info->si_value.sival_ptr);
    // Anybody may send a signal.
    if (info->si_code == SI_TIMER && slot >= slots && slot < slots + MOST && slot->made) {
        const bool waits = holds_interpreter();
        if (!waits && model_is_busy()) {
            const timespec pause{0, PAUSES};
            nanosleep(&pause, nullptr);
            pauses++;
        }
        arm(*slot, waits ? AGAIN : RUNS);
    }
    errno = before;
}

// Whether the handler is there, or could be put there: somebody else may use the signal.
bool handles(int number) {
    struct sigaction there;
    if (sigaction(number, nullptr, &there)) return false;
    if (there.sa_flags & SA_SIGINFO) return there.sa_sigaction == on_signal;
    if (there.sa_handler != SIG_DFL) return false;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    return sigaction(number, &action, nullptr) == 0;
}

} // namespace

// Has a thread of this process pause until the time `*until`, which may change, unless it `holds` the interpreter's
// lock. Returns a number for `chairlift_end_pauses`; -1 if it can't be done. One caller at a time.
EXPORT int32_t chairlift_begin_pauses(int32_t thread, int (*holds)(), const int64_t *until) {
    const int number = SIGRTMAX - 2;
    holds_interpreter = holds;
    busy_until = until;
    if (!handles(number)) return -1;
    for (Slot &slot : slots) {
        if (slot.taken.exchange(true)) continue;
        sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = number;
        event.sigev_notify_thread_id = thread;
        event.sigev_value.sival_ptr = &slot;
        if (timer_create(CLOCK_MONOTONIC, &event, &slot.timer)) {
            slot.taken = false;
            return -1;
        }
        slot.made = true;
        arm(slot, RUNS);
        return int32_t(&slot - slots);
    }
    return -1;
}

// Frees what the number stands for, once its thread has ended.
EXPORT void chairlift_end_pauses(int32_t number) {
    Slot &slot = slots[number];
    slot.made = false;
    timer_delete(slot.timer);
    slot.taken = false;
}

// How many pauses there were so far.
EXPORT int64_t chairlift_count_pauses() { return pauses; }

#else

EXPORT int32_t chairlift_begin_pauses(int32_t, int (*)(), const int64_t *) { return -1; }
EXPORT void chairlift_end_pauses(int32_t) {}
EXPORT int64_t chairlift_count_pauses() { return 0; }

#endif

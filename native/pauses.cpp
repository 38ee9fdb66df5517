// Threads that pause again and again as long as a model is at work.
//
// Linux lets a thread of the lowest priority run on until the next tick of its core, 4 ms at 250 Hz, and the model's
// thread on that core waits, and with it all others of a pass. So a timer interrupts it much sooner, and the handler of
// its signal, which runs in that thread, sleeps. So that nobody waits for a lock that it holds, it pauses only between
// the begin and the end of what it calls its work, in code of the library that does this work, and without the
// interpreter's lock, which is asked for. Elsewhere, as in the allocator, it may hold one that all threads need.
//
// It begins to pause by itself, once its work has taken long: somebody else who looked would have to wait for a core and
// for the interpreter's lock first.
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__linux__)
#include <linux/futex.h>
#include <link.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace {

constexpr int64_t SECOND = 1'000'000'000;               // in nanoseconds, as all that follows
// Between two pauses, and each for as many as there are that pause, so that all together have no more time than one.
constexpr int64_t RUNS = 500'000, PAUSES = 5'000'000;
constexpr int64_t AGAIN = 50'000;                       // until it may be where it can pause
constexpr int64_t MOST_UNSEEN = 4'000'000;              // between two looks at one that has no core, which take of it too
constexpr int MOST = 64;

// Never freed, as a signal may still be on its way when its thread ends.
struct Slot {
    std::atomic<bool> taken{false};
    std::atomic<bool> made{false};
    std::atomic<bool> works{false}, pauses{false};
    std::atomic<bool> at_once{false};                   // it pauses however little its work has taken
    int64_t patience = 0, began = 0;                    // of a core: what its work may take, and when that began
    int64_t looked = 0, waited = 0;                     // of a core, when it was last looked at; and how long until then
    timer_t timer;
};

Slot slots[MOST];
std::atomic<int32_t> num_pausing{0};
std::atomic<int64_t> count{0};
std::atomic<uint32_t> times_ended{0};                   // all pauses at once
int (*holds_interpreter)() = nullptr;
const volatile int64_t *busy_until = nullptr;           // by the monotonic clock
uintptr_t code_begin = 0, code_end = 0;                 // of the library that works

int64_t now_by(clockid_t clock) {
    timespec now;
    return clock_gettime(clock, &now) ? 0 : now.tv_sec * SECOND + now.tv_nsec;
}

timespec spec(int64_t nanoseconds) { return {time_t(nanoseconds / SECOND), long(nanoseconds % SECOND)}; }

// Has the timer go off once; not at all with 0.
void arm(const Slot &slot, int64_t nanoseconds) {
    const itimerspec once{{0, 0}, spec(nanoseconds)};
    timer_settime(slot.timer, 0, &once, nullptr);
}

void set_pauses(Slot &slot, bool wanted) {
    if (slot.pauses.exchange(wanted) != wanted) num_pausing += wanted ? 1 : -1;
}

// Where the code lies that holds this address.
int find_code(dl_phdr_info *object, size_t, void *address) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const auto &part = object->dlpi_phdr[i];
        const uintptr_t begin = object->dlpi_addr + part.p_vaddr, end = begin + part.p_memsz;
        const auto wanted = reinterpret_cast<uintptr_t>(address);
        if (part.p_type == PT_LOAD && begin <= wanted && wanted < end) return code_begin = begin, code_end = end, 1;
    }
    return 0;
}

// Whether a signal has interrupted the code of that library.
bool is_in_library(const void *context) {
    const auto &state = static_cast<const ucontext_t *>(context)->uc_mcontext;
#if defined(__x86_64__)
    const auto at = uintptr_t(state.gregs[REG_RIP]);
#elif defined(__aarch64__)
    const auto at = uintptr_t(state.pc);
#else
    const uintptr_t at = (void)state, 0;
#endif
    return code_begin <= at && at < code_end;
}

// Has the timer go off once its work may have taken long: later and later as long as it waits for something or somebody.
void look_again(Slot &slot, int64_t now, int64_t left) {
    const bool has_core = now - slot.looked > slot.waited / 4;
    slot.waited = has_core ? left : 2 * slot.waited < MOST_UNSEEN ? 2 * slot.waited : MOST_UNSEEN;
    if (slot.waited < AGAIN) slot.waited = AGAIN;
    slot.looked = now;
    arm(slot, slot.waited);
}

// Pauses if it is time for that, and sets the timer for the next time. In the slot's own thread.
void look(Slot &slot, const void *context) {
    if (!slot.pauses) {
        const int64_t now = now_by(CLOCK_THREAD_CPUTIME_ID), left = slot.began + slot.patience - now;
        if (left > 0 && !slot.at_once) return look_again(slot, now, left);
        set_pauses(slot, true);
    }
    if (!is_in_library(context) || holds_interpreter()) return arm(slot, AGAIN);
    const uint32_t before = times_ended;
    if (now_by(CLOCK_MONOTONIC) < *busy_until) {
        const timespec pause = spec(PAUSES * (num_pausing > 1 ? num_pausing.load() : 1));
        syscall(SYS_futex, &times_ended, FUTEX_WAIT_PRIVATE, before, &pause, nullptr, 0);
        count++;
    }
    arm(slot, RUNS);
}

void on_signal(int, siginfo_t *info, void *context) {
    const int before = errno;
    auto *slot = static_cast<Slot *>(info->si_value.sival_ptr);
    // Anybody may send a signal.
    const bool is_ours = info->si_code == SI_TIMER && slot >= slots && slot < slots + MOST && slot->made;
    if (is_ours && slot->works) look(*slot, context);
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

// Makes it possible for a thread of this process to pause until the time `*until`, which may change, in the code of the
// library that has `function`, unless it `holds` the interpreter's lock. Returns a number for what follows; -1 if it
// can't be done. One caller at a time.
EXPORT int32_t chairlift_add_pauses(int32_t thread, int (*holds)(), const int64_t *until, void *function) {
    const int number = SIGRTMAX - 2;
    holds_interpreter = holds;
    busy_until = until;
    if (!code_end && !dl_iterate_phdr(find_code, function)) return -1;
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
        slot.works = slot.at_once = false;
        slot.made = true;
        return int32_t(&slot - slots);
    }
    return -1;
}

// Frees what the number stands for, once its thread has ended.
EXPORT void chairlift_remove_pauses(int32_t number) {
    Slot &slot = slots[number];
    slot.made = false;
    set_pauses(slot, false);
    timer_delete(slot.timer);
    slot.taken = false;
}

// Has the thread pause whenever it works from now on, and not only once that has taken long.
EXPORT void chairlift_begin_pauses(int32_t number) {
    Slot &slot = slots[number];
    slot.at_once = true;
    if (slot.works && !slot.pauses) arm(slot, RUNS);
}

// The thread that calls this begins some work, and pauses once that took so many nanoseconds of a core.
EXPORT void chairlift_begin_work(int32_t number, int64_t patience) {
    Slot &slot = slots[number];
    slot.began = slot.looked = now_by(CLOCK_THREAD_CPUTIME_ID), slot.patience = patience;
    slot.waited = slot.at_once ? RUNS : patience > AGAIN ? patience : AGAIN;    // 0 would be never
    slot.works = true;
    arm(slot, slot.waited);
}

// It has ended that work.
EXPORT void chairlift_end_work(int32_t number) {
    Slot &slot = slots[number];
    slot.works = false;
    arm(slot, 0);
    set_pauses(slot, false);
}

// Ends the pauses of all threads; the time until which they pause must have passed, or they soon do so again.
EXPORT void chairlift_end_pauses() {
    times_ended++;
    syscall(SYS_futex, &times_ended, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// How many pauses there were so far.
EXPORT int64_t chairlift_count_pauses() { return count; }

#else

EXPORT int32_t chairlift_add_pauses(int32_t, int (*)(), const int64_t *, void *) { return -1; }
EXPORT void chairlift_remove_pauses(int32_t) {}
EXPORT void chairlift_begin_pauses(int32_t) {}
EXPORT void chairlift_begin_work(int32_t, int64_t) {}
EXPORT void chairlift_end_work(int32_t) {}
EXPORT void chairlift_end_pauses() {}
EXPORT int64_t chairlift_count_pauses() { return 0; }

#endif

"""Threads beside the model's that advance sequences in their grammars, and hold up nobody."""

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from chairlift.runners.grammars.grammar import CompiledGrammar, Follower
from chairlift.runners.grammars.stopwatch import LOOK_EVERY, MUCH, Stopwatch
from chairlift.runners.low_priority import Patience, hold_back
from chairlift.runners.thread_starter import STARTER

# Weight of the last one in what they usually take.
_WEIGHT = 0.05
# How many times as long it may take where setting it aside would be one too many, so that it would have to fail.
_PATIENCE = 10
# Seconds after which a follower that is not done fails, if its grammar takes long: since a thread began with it, and
# with the time that it waited for its turn; and how many such grammars may be followed at once.
_TOO_LONG, _TOO_LONG_IN_ALL = 5.0, 30.0
_MOST_SLOW = 4
# Seconds after which it is forgotten that a grammar took long, and how often it doubles how quick it must be.
_FORGIVEN, _DOUBLES = 60.0, 10


@dataclass(slots=True)
class _Aside:
    """What waits for a grammar that took long, how often that was of late, and who has one of its followers now.

    It is back among the others after `still_quick` times that it did not take long, one at first and then twice as many
    each time.
    """

    waiting: deque[Follower] = field(default_factory=deque)
    thread: "_FollowerThread | None" = None
    times: int = 0
    still_quick: int = 1
    took_long_at: float = 0.0

    def take_long(self, now: float) -> None:
        """It took long again."""
        if now - self.took_long_at > _FORGIVEN:
            self.times = 0
        self.took_long_at = now
        self.still_quick = 2 ** min(self.times, _DOUBLES)
        self.times += 1


class LookAhead:
    """Advances followers, one after the other, in a thread.

    A grammar that takes long is set aside: what follows it is left to threads that get what time others leave, one of
    its followers at a time, as they share a lexer and its lock; another thread goes on with the rest. `post`, `wait`,
    `tend` and `close` belong to one thread, and start none themselves.
    """

    def __init__(self) -> None:
        # None ends the thread that takes it.
        self._queue: SimpleQueue[Follower | None] = SimpleQueue()
        # Seconds of a core that one takes of late, of those that do not take long.
        self.usual_seconds = 0.0
        # Whether the queue is empty and nothing in hand; whether something was posted since somebody looked.
        self._idle = threading.Event()
        self._posted = threading.Event()
        # Whether one that takes long is advanced since somebody began to wait for it.
        self._slow_advanced = threading.Event()
        self._watch: threading.Thread | None = None
        self._closed = False
        # Of what follows. Those whose turn it is next have followers that wait, and no thread.
        self._lock = threading.RLock()
        self._thread: _FollowerThread | None = None
        self._asides: weakref.WeakKeyDictionary[CompiledGrammar, _Aside] = weakref.WeakKeyDictionary()
        self._turns: deque[_Aside] = deque()
        self._slow_threads: set[_FollowerThread] = set()

    def post(self, followers: Sequence[Follower]) -> None:
        """Have these advanced."""
        now = time.monotonic()
        for follower in followers:
            follower.busy, follower.posted_at, follower.begun_at = True, now, math.inf
        with self._lock:
            quick = [each for each in followers if not self._leave_aside(each)]
            if not quick:
                return
            self._idle.clear()
            for follower in quick:
                self._queue.put(follower)
            if self._thread is None:
                self._start()
        if self._watch is None:
            self._watch = threading.Thread(target=self._keep_watch, name="grammar watch", daemon=True)
            STARTER.start(self._watch, self._go_unwatched)
        self._posted.set()

    def _go_unwatched(self, error: RuntimeError) -> None:
        """Try again with what is posted next: until then a slow one has all others wait."""
        self._watch = None

    def _start(self) -> None:
        """Have a thread go on with the queue. The lock is held."""
        self._thread = _FollowerThread(self)
        STARTER.start(self._thread, self._thread.fail)

    def _leave_aside(self, follower: Follower) -> bool:
        """Leave a follower to those that are slow, if its grammar is aside; return whether it is. The lock is held."""
        if not follower.grammar.is_aside:
            return False
        aside = self._asides[follower.grammar]
        aside.waiting.append(follower)
        if aside.thread is None and len(aside.waiting) == 1:
            self._turns.append(aside)
        if self._turns and len(self._slow_threads) < _MOST_SLOW:
            thread = _FollowerThread(self, is_slow=True)
            self._slow_threads.add(thread)
            STARTER.start(thread, thread.fail)
        return True

    def take(self, thread: "_FollowerThread") -> Follower | None:
        """What a thread is to advance next; it waits for that, unless it is slow. None ends it."""
        while not thread.is_slow:
            follower = self._queue.get()
            with self._lock:
                if follower is None or not self._is_no_longer_quick(follower):
                    thread.begin(follower)
                    return follower
                self._rest(thread)
        with self._lock:
            follower = self._take_slow(thread)
            thread.begin(follower)
            return follower

    def _is_no_longer_quick(self, follower: Follower) -> bool:
        """Whether nobody waits for this one any more, or its grammar was set aside since it was posted."""
        if follower.error is not None:
            follower.busy = False
            return True
        return self._leave_aside(follower)

    def _take_slow(self, thread: "_FollowerThread") -> Follower | None:
        """A follower of the grammar whose turn it is. The lock is held."""
        while self._turns and len(self._slow_threads) <= _MOST_SLOW:
            aside = self._turns.popleft()
            while aside.waiting:
                follower = aside.waiting.popleft()
                if follower.error is None:
                    aside.thread = thread
                    return follower
                follower.busy = False
        self._slow_threads.discard(thread)
        return None

    def give_back(self, thread: "_FollowerThread", follower: Follower) -> None:
        """Take note that a thread has advanced a follower."""
        with self._lock:
            thread.follower = None
            if not thread.is_slow:
                self.usual_seconds += _WEIGHT * (min(follower.seconds, MUCH) - self.usual_seconds)
                self._rest(thread)
                return
            self._slow_advanced.set()
            aside = self._asides[follower.grammar]
            aside.thread = None
            if thread.watch.shows_much():
                aside.take_long(time.monotonic())
            else:
                aside.still_quick -= 1
            if aside.still_quick <= 0:
                follower.grammar.is_aside = False
                self._come_back(aside)
            elif aside.waiting:
                self._turns.append(aside)

    def _come_back(self, aside: _Aside) -> None:
        """Those that wait go on with the others. The lock is held."""
        if not aside.waiting:
            return
        self._idle.clear()
        while aside.waiting:
            self._queue.put(aside.waiting.popleft())
        if self._thread is None and not self._closed:
            self._start()
        self._posted.set()

    def _rest(self, thread: "_FollowerThread") -> None:
        """Say so if nothing is left of what others wait for. The lock is held."""
        if thread is self._thread and self._queue.empty():
            self._idle.set()

    def lose(self, thread: "_FollowerThread", error: RuntimeError) -> None:
        """A thread could not be started: so do those fail that wait for it."""
        with self._lock:
            lost = [each for aside in self._turns for each in aside.waiting] if thread.is_slow else []
            if thread.is_slow:
                self._slow_threads.discard(thread)
                for aside in self._turns:
                    aside.waiting.clear()
                self._turns.clear()
            else:
                while not self._queue.empty():
                    follower = self._queue.get()
                    lost += [] if follower is None else [follower]
                self._thread = None
                self._idle.set()
            for follower in lost:
                follower.give_up(f"nothing can follow its grammar now: {error}")
                follower.busy = False

    def _keep_watch(self) -> None:
        while self._posted.wait() and not self._closed:
            self._posted.clear()
            while not self._idle.wait(LOOK_EVERY):
                self._set_aside()

    def _set_aside(self) -> None:
        """Have another thread go on with the queue, if this one has had a follower for long."""
        with self._lock:
            thread = self._thread
            follower = None if thread is None else thread.follower
            if thread is None or follower is None:
                return
            has_room = len(self._slow_threads) < _MOST_SLOW
            if not thread.watch.shows_long(1 if has_room else _PATIENCE):
                return
            thread.is_slow = True
            hold_back(thread)
            self._slow_threads.add(thread)
            aside = self._asides.setdefault(follower.grammar, _Aside())
            follower.grammar.is_aside, aside.thread, aside.still_quick = True, thread, 1
            if not has_room:
                follower.give_up("its grammar takes long, and so do others that are being followed; send it again")
            # Nobody else is busy, unless they wait behind it.
            if self._queue.empty():
                self._idle.set()
            # There when it is wanted: it takes a while until a thread begins.
            self._start()

    def wait(self, seconds: float) -> None:
        """Wait until all are advanced that do not take long, but no longer than that."""
        self._idle.wait(seconds)

    def wait_for_slow(self, waited_for: Sequence[Follower], seconds: float) -> None:
        """Wait until one of these is advanced, all of which take long, but no longer than that."""
        self._slow_advanced.clear()
        end = time.monotonic() + seconds
        while all(follower.busy for follower in waited_for) and (left := end - time.monotonic()) > 0:
            self._slow_advanced.wait(left)
            self._slow_advanced.clear()

    def tend(self, waited_for: Sequence[Follower]) -> None:
        """Fail those of the given ones that take too long."""
        now = time.monotonic()
        for follower in waited_for:
            if not follower.busy or not follower.grammar.is_aside:
                continue
            if now - follower.begun_at > _TOO_LONG:
                follower.give_up(f"its grammar needs more than {_TOO_LONG:g} s to say which tokens may be next")
            elif now - follower.posted_at > _TOO_LONG_IN_ALL:
                follower.give_up(
                    f"its grammar takes long, and so do others before it: after {_TOO_LONG_IN_ALL:g} s it is not known "
                    "which tokens may be next; send it again"
                )

    def close(self) -> None:
        """End the threads once they are idle."""
        self._closed = True
        self._posted.set()
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None


class _FollowerThread(threading.Thread):
    """Advances one follower after the other, at which it is as `watch` shows."""

    def __init__(self, ahead: LookAhead, is_slow: bool = False) -> None:
        """If it `is_slow`, those whose grammars are aside, in what time others leave."""
        super().__init__(name="grammar", daemon=True)
        self.follower: Follower | None = None
        self.watch = Stopwatch()
        self.is_slow = is_slow
        self._ahead = ahead

    def run(self) -> None:
        if self.is_slow:
            hold_back(self)
        patience = Patience(MUCH)
        while (follower := self._ahead.take(self)) is not None:
            with patience:
                follower.advance()
            self._ahead.give_back(self, follower)

    def begin(self, follower: Follower | None) -> None:
        """It is at this one from now on. In this thread."""
        self.watch.start()
        if follower is not None:
            follower.begun_at = time.monotonic()
        self.follower = follower

    def fail(self, error: RuntimeError) -> None:
        """It could not be started."""
        self._ahead.lose(self, error)

"""Threads beside the model's: they compile grammars, and advance sequences in theirs, and hold up nobody."""

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from chairlift.runners.decoder.grammar import CompiledGrammar, Follower, GrammarError, GrammarTokenizer, first_line
from chairlift.runners.low_priority import Patience, hold_back
from chairlift.runners.thread_starter import STARTER, start_with_stack

# Seconds of a core after which a follower, or a compilation, is no longer one that others wait for, and between two
# looks at how many it took, so that the first finds it.
_MUCH, _LOOK_EVERY = 0.0015, 0.002
# Seconds by the wall after which it isn't either, whatever keeps it: many more, since one that has no core, as the
# model has them all, is not slow; and where there is no telling.
_LONG, _LONG_WITHOUT_CLOCK = 0.05, 0.005
# Weight of the last one in what they usually take.
_WEIGHT = 0.05
# How many times as much it may be where it would be one too many, and so have to fail.
_PATIENCE = 10
# Characters of a grammar beyond which compiling takes that long, as far as one can tell beforehand.
_LARGE = 16_384
# Seconds after which a follower that still is not done fails, and how many such may go on at once.
_TOO_LONG = 5.0
_MOST_SLOW = 4
# Compiled grammars that are kept though no request that is here has them.
_MOST_KEPT = 32
# Bytes of the stack of threads that compile, of which only what is used is taken: some kilobytes for each level.
_DEEP_STACK = 2**28


# None ends the thread that takes it.
_Followers = SimpleQueue[Follower | None]
_CompilerDone = Callable[[CompiledGrammar | GrammarError], None]


class _Stopwatch:
    """How long a thread has been at a piece of work, and how much of a core it took. Others may look at it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._clock: int | None = None
        self._cpu_began = 0.0

    def start(self) -> None:
        """The thread that calls this begins now."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._cpu_began = time.clock_gettime(self._clock)
        self.began = time.monotonic()

    def shows_long(self, patience: float = 1) -> bool:
        """Whether others should no longer wait for it."""
        long = _LONG_WITHOUT_CLOCK if self._clock is None else _LONG
        return time.monotonic() - self.began > patience * long or self.shows_much(patience)

    def shows_much(self, patience: float = 1) -> bool:
        """Whether it took more of a core than others should wait for."""
        if self._clock is None:
            return False
        try:
            return time.clock_gettime(self._clock) - self._cpu_began > patience * _MUCH
        except OSError:  # the thread has ended
            return False


@dataclass(slots=True)
class _Aside:
    """A follower that took long, so often, and the thread that has it now: none once it goes with the others again.

    It does so after `still_quick` times that it did not take long, one for the first time and then twice as many.
    """

    thread: "_FollowerThread | None"
    times: int = 1
    still_quick: int = 1


class LookAhead:
    """Advances followers, one after the other, in a thread.

    One that takes long is left alone with that thread, which then gets what time others leave; another thread goes on
    with the rest. It may have been for want of a core, so it comes back to them once it no longer does. `post`, `wait`,
    `tend`, `forget` and `close` belong to one thread, and start none themselves.
    """

    def __init__(self) -> None:
        self._queue: _Followers = SimpleQueue()
        # Seconds of a core that one takes of late, of those that do not take long.
        self.usual_seconds = 0.0
        # Whether the queue is empty and nothing in hand; whether something was posted since somebody looked.
        self._idle = threading.Event()
        self._posted = threading.Event()
        self._watch: threading.Thread | None = None
        self._closed = False
        # Of what follows. Threads of followers that nobody waits for any more are `_forgotten` until they end.
        self._lock = threading.RLock()
        self._thread: _FollowerThread | None = None
        self._aside: dict[Follower, _Aside] = {}
        self._forgotten: list[_FollowerThread] = []

    def post(self, followers: Sequence[Follower]) -> None:
        """Have these advanced."""
        for follower in followers:
            follower.busy = True
        with self._lock:
            quick = followers
            if self._aside:
                quick = [each for each in followers if not self._advance_aside(each)]
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
        self._thread = _FollowerThread(self._queue, self)
        STARTER.start(self._thread, self._thread.fail)

    def _advance_aside(self, follower: Follower) -> bool:
        """Have a thread of its own advance a follower, if it takes long; return whether it does. The lock is held."""
        aside = self._aside.get(follower)
        if aside is None or aside.thread is None:
            return False
        own: _Followers = SimpleQueue()
        own.put(follower)
        aside.thread = thread = _FollowerThread(own, self, follower)
        STARTER.start(thread, thread.fail)
        return True

    def was_advanced(self, thread: "_FollowerThread") -> None:
        """Take note that a thread has done with its follower, or with all that it had."""
        with self._lock:
            aside = None if thread.follower is None else self._aside.get(thread.follower)
            if aside is not None and aside.thread is thread and not thread.watch.shows_much():
                aside.still_quick -= 1
                if not aside.still_quick:
                    aside.thread = None
            thread.follower = None
            if thread is self._thread and self._queue.empty():
                self._idle.set()

    def lose(self, thread: "_FollowerThread", queue: _Followers, error: RuntimeError) -> None:
        """A thread could not be started: so do those fail that wait for it."""
        with self._lock:
            while not queue.empty():
                follower = queue.get()
                if follower is not None:
                    follower.give_up(f"nothing can follow its grammar now: {error}")
                    follower.busy = False
            self.was_advanced(thread)
            if thread is self._thread:
                self._thread = None

    def note(self, seconds: float) -> None:
        """Take in how much of a core one took."""
        self.usual_seconds += _WEIGHT * (min(seconds, _MUCH) - self.usual_seconds)

    def _keep_watch(self) -> None:
        while self._posted.wait() and not self._closed:
            self._posted.clear()
            while not self._idle.wait(_LOOK_EVERY):
                self._leave_alone()

    def _leave_alone(self) -> None:
        """Have another thread go on with the queue, if this one has had a follower for long."""
        with self._lock:
            thread = self._thread
            follower = None if thread is None else thread.follower
            if thread is None or follower is None:
                return
            self._forgotten = [each for each in self._forgotten if each.follower is not None]
            num_slow = sum(aside.thread is not None for aside in self._aside.values())
            has_room = num_slow + len(self._forgotten) < _MOST_SLOW
            if not thread.watch.shows_long(1 if has_room else _PATIENCE):
                return
            thread.once = True
            hold_back(thread)
            if has_room:
                times = self._aside[follower].times + 1 if follower in self._aside else 1
                self._aside[follower] = _Aside(thread, times, still_quick=2 ** (times - 1))
            else:
                self._forgotten.append(thread)
                follower.give_up("its grammar takes long, and so do others that are being followed; send it again")
            # Nobody else is busy, unless they wait behind it.
            if self._queue.empty():
                self._idle.set()
            # There when it is wanted: it takes a while until a thread begins.
            self._start()

    def wait(self, seconds: float) -> None:
        """Wait until all are advanced that do not take long, but no longer than that."""
        self._idle.wait(seconds)

    def tend(self, waited_for: Sequence[Follower]) -> None:
        """Fail those of the given ones that take too long."""
        now = time.monotonic()
        for follower in waited_for:
            aside = self._aside.get(follower)
            thread = None if aside is None else aside.thread
            if thread is not None and follower.busy and now - thread.watch.began > _TOO_LONG:
                follower.give_up(f"its grammar needs more than {_TOO_LONG:g} s to say which tokens may be next")

    def forget(self, follower: Follower) -> None:
        """Nobody waits for this one any more."""
        with self._lock:
            aside = self._aside.pop(follower, None)
            if aside is not None and aside.thread is not None:
                self._forgotten.append(aside.thread)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._closed = True
        self._posted.set()
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)
                self._thread = None


class _FollowerThread(threading.Thread):
    """Advances what is in a queue; `once` ends it after the follower that it has, at which it is as `watch` shows."""

    def __init__(self, queue: _Followers, ahead: LookAhead, only: Follower | None = None) -> None:
        """With `only` that one, who is in the queue, is advanced, in what time others leave."""
        super().__init__(name="grammar", daemon=True)
        self.follower = only
        self.watch = _Stopwatch()
        self.once = only is not None
        self._queue, self._ahead = queue, ahead

    def run(self) -> None:
        if self.once:
            hold_back(self)
        patience = Patience(_MUCH)
        while (follower := self._queue.get()) is not None:
            self.watch.start()
            self.follower = follower
            with patience:
                follower.advance()
            self._ahead.note(follower.seconds)
            self._ahead.was_advanced(self)
            if self.once:
                return

    def fail(self, error: RuntimeError) -> None:
        """It could not be started."""
        self._ahead.lose(self, self._queue, error)


@dataclass(slots=True)
class _Turn:
    """A thread that compiles, what it compiles now, and whether that takes long, so that another has the turn."""

    thread: threading.Thread = field(default_factory=threading.current_thread)
    watch: _Stopwatch = field(default_factory=_Stopwatch)
    grammar: str = ""
    is_slow: bool = False


class GrammarCompiler:
    """Compiled grammars by their text: kept as long as somebody holds them, and a few beyond that."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._tokenizer: GrammarTokenizer | GrammarError | None = None
        self._known: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()
        self._kept: deque[CompiledGrammar] = deque(maxlen=_MOST_KEPT)
        self._lock = threading.RLock()
        # What waits to be compiled, the oldest first; who compiles it, one after the other; and how many take long.
        self._waiting: dict[str, _CompilerDone] = {}
        self._turn: _Turn | None = None
        self._num_slow = 0

    @property
    def tokenizer(self) -> GrammarTokenizer:
        """The model's tokenizer, made when it is first asked for. Raises GrammarError if it can't be."""
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = GrammarTokenizer(self._folder, self._vocab_size)
                except GrammarError as error:
                    self._tokenizer = error
        if isinstance(self._tokenizer, GrammarError):
            raise self._tokenizer
        return self._tokenizer

    def find(self, grammar: str) -> CompiledGrammar | None:
        """Return a grammar if it is compiled."""
        return self._known.get(grammar)

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar and wait for it. Raises GrammarError."""
        found = self._known.get(grammar)
        if found is not None:
            return found
        results: list[CompiledGrammar | GrammarError] = []

        def work() -> None:
            try:
                results.append(self._compile_here(grammar))
            except GrammarError as error:
                results.append(error)

        thread = threading.Thread(target=work, name="grammars", daemon=True)
        start_with_stack(thread, _DEEP_STACK, _raise)
        thread.join()
        if isinstance(results[0], GrammarError):
            raise results[0]
        return results[0]

    def _compile_here(self, grammar: str) -> CompiledGrammar:
        """Compile in this thread, which must have room to recurse."""
        found = self._known.get(grammar)
        if found is None:
            tokenizer = self.tokenizer
            try:
                with Patience(_MUCH):
                    found = tokenizer.compile(grammar)
            except GrammarError:
                raise
            except BaseException as error:  # a panic of the library is no Exception
                raise GrammarError(f"the grammar can't be compiled: {first_line(error)}") from None
            self._known[grammar] = found
        self._kept.append(found)
        return found

    def compile_aside(self, grammar: str, done: _CompilerDone) -> None:
        """Compile a grammar in another thread, which calls `done`.

        One that takes long gets the time that others leave, and the next one's turn comes. Only a few may take long at
        once: until one of them is done, the rest waits.
        """
        with self._lock:
            self._waiting[grammar] = done
            self._go_on()

    def cancel(self, grammar: str) -> bool:
        """Forget a grammar that waits to be compiled; return whether it did, so that nobody will call its `done`."""
        with self._lock:
            return self._waiting.pop(grammar, None) is not None

    def _go_on(self) -> None:
        """Start a thread, if one is needed and may start. The lock is held."""
        if self._waiting and self._turn is None and self._num_slow < _MOST_SLOW:
            self._turn = turn = _Turn()
            turn.thread = threading.Thread(target=self._take_turn, args=(turn,), name="grammars", daemon=True)
            STARTER.start(turn.thread, partial(self._lose, turn), stack_bytes=_DEEP_STACK)

    def _lose(self, turn: _Turn, error: RuntimeError) -> None:
        """The thread of a turn could not be started."""
        with self._lock:
            if self._turn is turn:
                self._turn = None
            refused, self._waiting = self._waiting, {}
        for done in refused.values():
            done(GrammarError(f"nothing can compile it now: {error}"))

    def _take_turn(self, turn: _Turn) -> None:
        """Compile what waits, until there is nothing or one took long."""
        while (done := self._next(turn)) is not None:
            turn.watch.start()
            if len(turn.grammar) > _LARGE:
                self._leave_alone(turn, turn.grammar)
            else:
                self._look_later(turn, turn.grammar)
            result: CompiledGrammar | GrammarError
            try:
                result = self._compile_here(turn.grammar)
            except GrammarError as error:
                result = error
            done(result)

    def _next(self, turn: _Turn) -> _CompilerDone | None:
        """Take what has waited longest; None ends the turn."""
        with self._lock:
            if turn.is_slow:
                self._num_slow -= 1
                self._go_on()
            elif self._waiting:
                turn.grammar = next(iter(self._waiting))
                return self._waiting.pop(turn.grammar)
            else:
                self._turn = None
        return None

    def _look_later(self, turn: _Turn, grammar: str) -> None:
        """Have a thread see to it that the turn does not stay long with that grammar."""
        timer = threading.Timer(_LOOK_EVERY, self._look, (turn, grammar))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # without another thread the others wait for this one
            timer.start()

    def _look(self, turn: _Turn, grammar: str) -> None:
        if turn.watch.shows_long():
            self._leave_alone(turn, grammar)
        elif turn is self._turn and turn.grammar == grammar:
            self._look_later(turn, grammar)

    def _leave_alone(self, turn: _Turn, grammar: str) -> None:
        """Give the turn to another thread, and what time others leave to this one, if it still is at that grammar."""
        with self._lock:
            if turn is not self._turn or turn.grammar != grammar:
                return
            turn.is_slow = True
            self._turn = None
            self._num_slow += 1
            hold_back(turn.thread)
            self._go_on()


def _raise(error: Exception) -> None:
    raise error

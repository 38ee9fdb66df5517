"""Compiles grammars in threads beside the model's, and holds up nobody."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chairlift.runners.grammars.grammar import CompiledGrammar, GrammarError, GrammarTokenizer, first_line
from chairlift.runners.grammars.stopwatch import LOOK_EVERY, MUCH, Stopwatch
from chairlift.runners.low_priority import Patience, hold_back, rest
from chairlift.runners.thread_starter import STARTER, start_with_stack

# Characters of a grammar beyond which compiling takes long, as far as one can tell beforehand.
_LARGE = 16_384
# How many that take long may be compiled at once.
_MOST_SLOW = 4
# Compiled grammars that are kept though no request that is here has them.
_MOST_KEPT = 32
# Bytes of the stack of threads that compile, of which only what is used is taken: some kilobytes for each level.
_DEEP_STACK = 2**28

_CompilerDone = Callable[[CompiledGrammar | GrammarError], None]


@dataclass(slots=True)
class _Turn:
    """A thread that compiles, what it compiles now, and whether that takes long, so that another has the turn."""

    thread: threading.Thread = field(default_factory=threading.current_thread)
    watch: Stopwatch = field(default_factory=Stopwatch)
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
        rest()
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
                with Patience(MUCH):
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
        timer = threading.Timer(LOOK_EVERY, self._look, (turn, grammar))
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

"""Stop strings: find them as text streams by, and never let a part of one out."""

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The Aho-Corasick automaton of a request's stop strings, built once and shared by all its samples.

    A tree of prefixes, and from each the longest proper tail that is in the tree. State 0 is the root. Nothing changes
    after it is built, which takes time and memory linear in the strings' characters. Under the limits of
    SamplingParams that is about a millisecond, so it is built on the event loop: a thread's round trip costs as much.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.first = frozenset(stop[0] for stop in stops)
        # A state's depth is the length of the longest tail that some stop string starts with.
        self.depth = [0]
        self.match: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def step(self, state: int, letter: str) -> int:
        """The state after one more character."""
        while letter not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][letter]

    def _add(self, stop: str) -> None:
        state = 0
        for letter in stop:
            if letter not in self._next[state]:
                self._next[state][letter] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._next[state][letter]
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for letter, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], letter)
                if self.match[child] is None:
                    self.match[child] = self.match[self._fail[child]]
                queue.append(child)


class StopStrings:
    """Watches one stream of text for stop strings, one automaton step a character, whatever the chunks.

    The match that is complete first ends the text; of several that end at the same character, the longest. Text that
    may yet turn out to be the start of a stop string is held back. `matched` is the stop string found, or None.
    """

    def __init__(self, automaton: StopAutomaton, include_stop: bool = False) -> None:
        self._automaton = automaton
        self._include = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next text; return what may be shown. After a match nothing more is."""
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        if state == 0 and automaton.first.isdisjoint(text):
            return text
        for position, letter in enumerate(text):
            state = automaton.step(state, letter)
            if automaton.match[state] is not None:
                return self._cut(state, text[: position + 1])
        self._state = state
        if self._include:
            return text
        seen = self._held + text
        keep = len(seen) - automaton.depth[state]
        self._held = seen[keep:]
        return seen[:keep]

    def finish(self) -> str:
        """No more text: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _cut(self, state: int, text: str) -> str:
        self.matched = self._automaton.match[state]
        seen, self._held = self._held + text, ""
        return seen if self._include else seen[: len(seen) - len(self.matched or "")]

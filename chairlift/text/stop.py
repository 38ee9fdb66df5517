"""Stop strings: find them as text streams by, and never let a part of one out."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Watches a stream of text for stop strings, one automaton step a character, whatever the chunks.

    The match that is complete first ends the text; of several that end at the same character, the longest. Text that
    may yet turn out to be the start of a stop string is held back. `matched` is the stop string found, or None.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._include = include_stop
        self._first = frozenset(stop[0] for stop in stops)
        self._build(stops)
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next text; return what may be shown. After a match nothing more is."""
        if self.matched is not None:
            return ""
        if self._state == 0 and self._first.isdisjoint(text):
            return text
        state = self._state
        for position, letter in enumerate(text):
            state = self._step(state, letter)
            if self._match[state] is not None:
                return self._cut(state, text[: position + 1])
        self._state = state
        if self._include:
            return text
        seen = self._held + text
        # A state's depth is the length of the longest tail that some stop string starts with.
        keep = len(seen) - self._depth[state]
        self._held = seen[keep:]
        return seen[:keep]

    def finish(self) -> str:
        """No more text: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _cut(self, state: int, text: str) -> str:
        self.matched = self._match[state]
        seen, self._held = self._held + text, ""
        return seen if self._include else seen[: len(seen) - len(self.matched or "")]

    def _step(self, state: int, letter: str) -> int:
        while letter not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][letter]

    def _build(self, stops: Sequence[str]) -> None:
        """The Aho-Corasick automaton: a tree of prefixes, and from each the longest proper tail that is in the tree."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            state = 0
            for letter in stop:
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._match.append(None)
                state = self._next[state][letter]
            self._match[state] = stop
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for letter, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], letter)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)

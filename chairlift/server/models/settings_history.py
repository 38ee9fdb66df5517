"""Which settings a model had when: what became of a request is told by those that held then."""

from collections import deque
from math import inf
from typing import Generic, TypeVar

SettingsT = TypeVar("SettingsT")

# So many changes are known.
_KEPT = 32


class SettingsHistory(Generic[SettingsT]):
    """The settings that a model had before its last changes. Moments are of `time.monotonic()`."""

    def __init__(self) -> None:
        self._former: deque[tuple[float, SettingsT]] = deque(maxlen=_KEPT)

    def note(self, former: SettingsT, now: float) -> None:
        """These hold no more."""
        self._former.append((now, former))

    @property
    def last_change(self) -> float:
        """When settings changed last; long ago if they never did."""
        return self._former[-1][0] if self._former else -inf

    def at(self, moment: float, current: SettingsT) -> SettingsT:
        """Return what held then, where `current` is what holds now; of long ago, the oldest that is known."""
        return next((settings for until, settings in self._former if moment < until), current)

    def steady(self, since: float, until: float) -> bool:
        """Whether nothing changed in between, as far as that is known."""
        forgotten = len(self._former) == _KEPT and since < self._former[0][0]
        return not forgotten and not any(since <= moment <= until for moment, _ in self._former)

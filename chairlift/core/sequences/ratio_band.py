"""Between what times ratios of actual and expected waits lie, by those that were seen last."""

from bisect import bisect_left, insort
from collections import deque

_MOST = 256
# The band of a wait is that of so many waits which were expected to take about as long: short ones are as much as
# three times what was expected, long ones seldom half as much again.
_ALIKE = 64


class RatioBand:
    """The band that leaves out a share of the ratios at either end, the next one included.

    Where ratios of like waits come in any order, the next one lies outside as often as that (conformal prediction;
    Vovk, Gammerman and Shafer 2005, of the nearest by what was expected). Only the last are kept, so changes are
    followed.
    """

    def __init__(self, left_out: float) -> None:
        self._left_out = left_out
        self._last: deque[tuple[float, float]] = deque()
        # The same, by what was expected.
        self._sorted: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, expected: float, ratio: float) -> None:
        """Take in by how much a wait differed from what was expected, in seconds."""
        if len(self._last) == _MOST:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append((expected, ratio))
        insort(self._sorted, (expected, ratio))

    def ends(self, expected: float) -> tuple[float, float]:
        """Return the lowest and the highest ratio of a wait that is expected to take so many seconds.

        At least one must have been seen.
        """
        known, spare = self._sorted, max(len(self._sorted) - _ALIKE, 0)
        # The nearest lie together: the first of them is no farther away than what comes after the last.
        first = bisect_left(range(spare), True, key=lambda i: expected - known[i][0] <= known[i + _ALIKE][0] - expected)
        ratios = sorted(ratio for _, ratio in known[first : first + _ALIKE])
        outside = self._left_out * (len(ratios) + 1)
        return _at(ratios, outside), _at(ratios, len(ratios) + 1 - outside)


def _at(ordered: list[float], place: float) -> float:
    """Return what stands at a place counted from 1; between two, what lies between them."""
    below = min(max(int(place), 1), len(ordered))
    above = min(below + 1, len(ordered))
    share = min(max(place - below, 0.0), 1.0)
    return ordered[below - 1] + share * (ordered[above - 1] - ordered[below - 1])

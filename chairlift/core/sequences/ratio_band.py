"""Between what times ratios of actual and expected times lie, by those that were seen last."""

from bisect import bisect_left, insort
from collections import deque

_MOST = 256


class RatioBand:
    """The band that leaves out a share of the ratios at either end, the next one included.

    Where ratios come in any order, the next one lies outside no more often than that (conformal prediction; Vovk,
    Gammerman and Shafer 2005). Only the last are kept, so changes are followed.
    """

    def __init__(self, left_out: float) -> None:
        self._left_out = left_out
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, ratio: float) -> None:
        """Take in a ratio."""
        if len(self._last) == _MOST:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append(ratio)
        insort(self._sorted, ratio)

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest ratio of the band. There must be one."""
        outside = max(int(self._left_out * (len(self._sorted) + 1)), 1)
        return self._sorted[outside - 1], self._sorted[-outside]

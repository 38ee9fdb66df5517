"""How much a call may hold, learned from calls that ran out of memory."""

from math import inf

_PATIENCE, _MOST_PATIENCE = 64, 8192
_GROWTH = 1.125
# A call this close to the limit counts as having tried it.
_NEAR = 0.85


class MemoryLimit:
    """The largest batch that fits, in computed size and, where size does not explain it, in items.

    After a call that ran out of memory the limit is the larger of half of it and what is known to fit. After 64
    calls in a row near the limit it grows by an eighth; each time that proves wrong, the patience doubles. A single
    item is never refused: alone it either fits or gets the error.
    """

    def __init__(self) -> None:
        self.max_size = inf
        self.max_items: float = inf
        self.num_exceeded = 0
        self._proven = 0.0
        self._patience = _PATIENCE
        self._near = 0

    def exceeded(self, computed: float, count: int) -> None:
        """Note that a call ran out of memory."""
        self.num_exceeded += 1
        self._near = 0
        if self.num_exceeded > 1:
            self._patience = min(self._patience * 2, _MOST_PATIENCE)
        if computed <= self._proven:
            # As much once fitted: either memory has become scarcer, or it is the number of items that counts.
            self._proven = computed / 2
            self.max_items = min(self.max_items, max(count // 2, 1))
        self.max_size = max(self._proven, computed / 2)

    def fitted(self, computed: float, count: int) -> None:
        """Note that a call went well."""
        self._proven = max(self._proven, computed)
        if computed < _NEAR * self.max_size and count < _NEAR * self.max_items:
            return
        self._near += 1
        if self._near >= self._patience:
            self._near = 0
            # At least by one item, or of small batches an eighth would be nothing.
            self.max_size = max(self.max_size * _GROWTH, self.max_size + computed / count)
            self.max_items = max(self.max_items * _GROWTH, self.max_items + 1)

"""Items whose call failed, and that go again in smaller batches until it is known who is to blame."""

from collections import deque

import msgspec

from chairlift.core.items.item import Batch, Failure, Item
from chairlift.core.items.limits import BatchLimits

# One culprit among n takes 2 log2(n) calls to find. Where there are more than about four, the model itself is at fault.
_CULPRITS = 4


class Bisection(msgspec.Struct, eq=False):
    """The calls that may still be made for all that a failed batch was split into."""

    calls_left: int


class BatchPart(msgspec.Struct, eq=False):
    """A part of a failed batch; `detail` says what happened to it."""

    items: list[Item]
    search: Bisection
    detail: str


class Bisections(dict[str, BatchPart]):
    """Items that go again, each by its id with the part that it goes in.

    Next are halves of the batch that failed last, so that a search ends before another begins.
    """

    def __init__(self, limits: BatchLimits) -> None:
        super().__init__()
        self.num_bisections = 0
        self._limits = limits
        self._parts: deque[BatchPart] = deque()

    def remove(self, item_id: str) -> None:
        """Forget an item. Raises KeyError."""
        part = self.pop(item_id)
        part.items = [item for item in part.items if item.id != item_id]

    def take(self) -> BatchPart | None:
        """Return who goes next, or None."""
        while self._parts:
            part = self._parts.popleft()
            if part.items:
                for item in part.items:
                    del self[item.id]
                return part
        return None

    def split(
        self, batch: Batch, items: list[Item], failure: Failure, search: Bisection | None, what: str
    ) -> str | None:
        """Put what is left of a failed batch to the front, in halves; return None, or why its items must fail instead.

        `search` is that of the part which the batch was, if it was one.
        """
        alone = len(batch.items) == 1
        if failure in (Failure.RAISED, Failure.OUT_OF_MEMORY):
            if alone or not self._limits.bisect:
                return ""
        elif self._limits.retries == 0:
            return ""
        elif alone and items[0].attempts > self._limits.retries:
            return f" (in each of {items[0].attempts} calls)"
        if search is None:
            search = Bisection(2 * _CULPRITS * max(len(batch.items) - 1, 1).bit_length())
        if failure is not Failure.OUT_OF_MEMORY and not alone:
            if search.calls_left < 2:
                return "; smaller batches of the same items failed as well, too many to look for each that is to blame"
            search.calls_left -= 2
        self.num_bisections += not alone
        middle = (len(items) + 1) // 2
        for half in (items[middle:], items[:middle]):
            if half:
                detail = f"a batch of {len(batch.items)} with it {what}, so it is tried again in one of {len(half)}"
                part = BatchPart(half, search, detail)
                self._parts.appendleft(part)
                self.update((item.id, part) for item in half)
        return None

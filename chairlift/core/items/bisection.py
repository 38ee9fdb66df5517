"""Items whose call failed, and that go again in smaller batches until it is known who is to blame."""

from collections import deque
from typing import NamedTuple

import msgspec

from chairlift.core.items.item import Batch, Failure, Item
from chairlift.core.items.learned import Room
from chairlift.core.items.limits import BatchLimits

# One culprit among n takes 2 log2(n) calls to find. Where there are more than about four, the model itself is at fault.
_CULPRITS = 4
# Whoever ends or hangs a process costs its restart, or as long as a call may take, and one call more costs little next
# to that. So such a batch is not halved time and again, but taken into so many parts at once: up to as many items it is
# known after one more such call who is to blame, and all others have their results.
_PARTS = 64
_DEADLY = (Failure.DIED, Failure.TIMED_OUT)
_TOO_MANY = "; smaller batches of the same items failed as well, too many to look for each that is to blame"


class Bisection(msgspec.Struct, eq=False):
    """What may be spent on all that a failed batch was split into: calls of halves, and calls that are deadly.

    `calls` and `deaths` count them by request, each of which may have as many, and those of items of several by None.
    So nobody pays for what the items of another's request do. Of deaths there may be as many requests that have any.
    `room` is what batches could hold before it failed.
    """

    most_calls: int
    most_deaths: int
    room: Room
    calls: dict[str | None, int] = msgspec.field(default_factory=dict)
    deaths: dict[str | None, int] = msgspec.field(default_factory=dict)

    def spent_by(self, request: str | None) -> bool:
        """Whether a request has had all deaths that it may have; or with None, whether all of them together have."""
        if request is not None:
            return self.deaths.get(request, 0) > self.most_deaths
        return self.deaths.get(None, 0) + len(self.deaths.keys() - {None}) > self.most_deaths


class BatchPart(msgspec.Struct, eq=False):
    """A part of a failed batch; `detail` says what happened to it.

    `deadly` if that ended or hung a process, and `again` if the item in it was alone then.
    """

    items: list[Item]
    search: Bisection
    detail: str
    deadly: bool = False
    again: bool = False


class Blame(NamedTuple):
    """Why a batch's items fail without another try; and the `others` of the same search, which fail for it as well.

    `deadly` if there is one item, and it ended or hung a process alone.
    """

    text: str
    others: list[Item]
    deadly: bool = False


class Bisections(dict[str, BatchPart]):
    """Items that go again, each by its id with the part that it goes in.

    Next are parts of the batch that failed last, so that a search ends before another begins.
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
        if not part.items:
            self._parts.remove(part)

    def take(self, most: int, deadly: bool = True) -> BatchPart | None:
        """Return who goes next, or None; unless `deadly`, of those who may end or hang a process nobody does.

        If a batch has room for fewer by now, only the first `most` items of the part go.
        """
        part = next((part for part in self._parts if deadly or not part.deadly), None)
        if part is None:
            return None
        self._parts.remove(part)
        self._forget(part.items)
        if len(part.items) > most:
            rest = BatchPart(part.items[most:], part.search, part.detail, part.deadly, part.again)
            self._add([rest], last=False)
            part.items = part.items[:most]
        return part

    @property
    def deadly(self) -> bool:
        """Whether any of those who go again may end or hang a process."""
        return any(part.deadly for part in self._parts)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of any of them."""
        deadlines = (item.deadline for part in self._parts for item in part.items if item.deadline is not None)
        return min(deadlines, default=None)

    def take_expired(self, moment: float) -> list[Item]:
        """Take out everyone whose deadline is before this moment."""
        items = [item for part in self._parts for item in part.items]
        gone = [item for item in items if item.deadline is not None and item.deadline < moment]
        for item in gone:
            self.remove(item.id)
        return gone

    def split(
        self, batch: Batch, items: list[Item], failure: Failure, part: BatchPart | None, what: str, room: Room
    ) -> Blame | None:
        """Take what is left of a failed batch into parts that go next; return None, or why its items must fail instead.

        `part` is the one that the batch was, if it was one, and `room` what batches could hold before it. A call that
        raised, or ran out of memory, is halved. Items of a request stay together, so that few parts have several.
        """
        alone, deadly = len(batch.items) == 1, failure in _DEADLY
        if (self._limits.retries == 0) if deadly else (alone or not self._limits.bisect):
            return Blame("", [], deadly and alone)
        search = self._begin(batch, room) if part is None else part.search
        request = _request_of(batch.items)
        if deadly and not (part is None or part.again):
            search.deaths[request] = search.deaths.get(request, 0) + 1
            for spender in (None, request):
                if search.spent_by(spender):
                    return Blame(_TOO_MANY, self._give_up(search, spender))
        if deadly and alone and items[0].attempts > self._limits.retries:
            return Blame(f" (in each of {items[0].attempts} calls)", [], deadly=True)
        if failure is Failure.RAISED:
            spent = search.calls.get(request, 0) + 2
            if spent > search.most_calls:
                return Blame(_TOO_MANY, [])
            search.calls[request] = spent
        self.num_bisections += not alone
        parts = []
        for members in _divide(items, failure):
            detail = f"a batch of {len(batch.items)} with it {what}, so it is tried again in one of {len(members)}"
            parts.append(BatchPart(members, search, detail, deadly, again=deadly and alone))
        self._add(parts, last=alone)
        return None

    def _begin(self, batch: Batch, room: Room) -> Bisection:
        count = len(batch.items)
        levels = 1
        while _PARTS**levels < count:
            levels += 1
        return Bisection(2 * _CULPRITS * max(count - 1, 1).bit_length(), _CULPRITS * levels, room)

    def _add(self, parts: list[BatchPart], last: bool) -> None:
        """Put parts to the front; whoever was alone goes last, as nobody else need wait for that."""
        if last:
            self._parts.extend(parts)
        else:
            self._parts.extendleft(reversed(parts))
        for part in parts:
            self.update((item.id, part) for item in part.items)

    def _give_up(self, search: Bisection, request: str | None) -> list[Item]:
        """Take out everyone who waits in a search, or of them those of a request."""
        items = [item for part in self._parts if part.search is search for item in part.items]
        gone = [item for item in items if request in (None, _request_of([item]))]
        for item in gone:
            self.remove(item.id)
        return gone

    def _forget(self, items: list[Item]) -> None:
        for item in items:
            del self[item.id]


def _request_of(items: list[Item]) -> str | None:
    """The request that all these items came in, or None."""
    requests = {item.request or item.id for item in items}
    return requests.pop() if len(requests) == 1 else None


def _divide(items: list[Item], failure: Failure) -> list[list[Item]]:
    """Take items apart, those of a request side by side; after an error half of the requests from the other half."""
    requests: dict[str, list[Item]] = {}
    for item in items:
        requests.setdefault(item.request or item.id, []).append(item)
    items = [item for members in requests.values() for item in members]
    if failure is Failure.RAISED and len(requests) > 1:
        first = list(requests.values())[: (len(requests) + 1) // 2]
        cut = sum(map(len, first))
        return [items[:cut], items[cut:]]
    size = -(-len(items) // _PARTS) if failure in _DEADLY else (len(items) + 1) // 2
    return [items[start : start + size] for start in range(0, len(items), size)]

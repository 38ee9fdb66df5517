"""The items that wait: a queue for each shape key, most urgent first."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable
from itertools import accumulate
from math import inf
from operator import attrgetter

import msgspec

from chairlift.core.items.item import Item
from chairlift.core.queue import QueueOrder, Rank

_rank = attrgetter("rank")


class WaitingItem(msgspec.Struct, eq=False):
    """An item that waits. The lowest `rank` is first; `passed_over` counts the batches in which later ones did.

    `level` is its priority, and by how much its size sets it back.
    """

    item: Item
    rank: Rank
    level: tuple[int, float]
    passed_over: int = 0


class ShapeQueue:
    """Those who may share a batch, by rank. `size` is the sum of theirs."""

    def __init__(self) -> None:
        self.waiting: list[WaitingItem] = []
        self.size = 0.0
        self._oldest: float | None = None

    def push(self, waiter: WaitingItem) -> None:
        """Join in order of rank; nearly always that is at the end."""
        waiting = self.waiting
        if not waiting or waiting[-1].rank < waiter.rank:
            waiting.append(waiter)
        else:
            insort(waiting, waiter, key=_rank)
        self.size += waiter.item.size
        if self._oldest is not None:
            self._oldest = min(self._oldest, waiter.item.arrival)

    def remove(self, gone: Iterable[WaitingItem]) -> None:
        """Take some out, wherever they stand."""
        serials = set()
        for waiter in gone:
            serials.add(waiter.rank[1])
            self.size -= waiter.item.size
        if len(serials) == 1:
            del self.waiting[bisect_left(self.waiting, waiter.rank, key=_rank)]
        else:
            self.waiting = [waiter for waiter in self.waiting if waiter.rank[1] not in serials]
        self._oldest = None
        if not self.waiting:
            self.size = 0.0  # and no rounding errors pile up

    @property
    def oldest(self) -> float:
        """The earliest arrival. Raises ValueError if nobody waits."""
        if self._oldest is None:
            self._oldest = min(waiter.item.arrival for waiter in self.waiting)
        return self._oldest


class WaitingItems:
    """Everyone who waits, in `order`. Joining and leaving take O(log n) steps and a shift of pointers."""

    def __init__(self, order: QueueOrder) -> None:
        self.queues: dict[Hashable, ShapeQueue] = {}
        self._order = order
        self._by_id: dict[str, WaitingItem] = {}
        # By priority and level of size: how many, and the sum of their sizes.
        self._loads: dict[tuple[int, float], tuple[int, float]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._by_id

    def find(self, item_id: str) -> WaitingItem:
        """Return who waits under this id. Raises KeyError."""
        return self._by_id[item_id]

    def num_ahead(self, item_ids: Iterable[str]) -> dict[str, int]:
        """Return how many are more urgent than each of these that wait, of all shapes.

        Of each shape either those are looked up in its queue or its queue in them, whichever are fewer.
        """
        found = sorted((self._by_id[item_id] for item_id in set(item_ids) & self._by_id.keys()), key=_rank)
        ahead, more = [0] * len(found), [0] * (len(found) + 1)
        for queue in self.queues.values():
            if len(queue.waiting) < len(found):
                for waiter in queue.waiting:
                    more[bisect_right(found, waiter.rank, key=_rank)] += 1
            else:
                for place, waiter in enumerate(found):
                    ahead[place] += bisect_left(queue.waiting, waiter.rank, key=_rank)
        total = accumulate(more)
        return {waiter.item.id: count + next(total) for waiter, count in zip(found, ahead, strict=True)}

    def push(self, item: Item) -> None:
        """Join the queue of its shape. Raises ValueError, and nothing has changed, for one that can't be looked up."""
        try:
            queue = self.queues.get(item.shape_key)
        except TypeError as error:
            raise ValueError(f"shape_key must be hashable: {error}; a tuple will do instead of a list") from None
        self._serial = serial = self._serial + 1
        level = self._level(item)
        waiter = WaitingItem(item, (self._order.moment(item.arrival, item.priority, item.size), serial), level)
        self._by_id[item.id] = waiter
        if queue is None:
            queue = self.queues[item.shape_key] = ShapeQueue()
        queue.push(waiter)
        count, size = self._loads.get(level, (0, 0.0))
        self._loads[level] = count + 1, size + item.size
        if item.deadline is not None:
            heapq.heappush(self._deadlines, (item.deadline, serial, item.id))

    def remove(self, gone: list[WaitingItem]) -> None:
        """Take some of one shape out of the queue. `gone` must not be empty."""
        key = gone[0].item.shape_key
        queue = self.queues[key]
        queue.remove(gone)
        if not queue.waiting:
            del self.queues[key]
        for waiter in gone:
            item = waiter.item
            del self._by_id[item.id]
            level = waiter.level
            count, size = self._loads[level]
            if count > 1:
                self._loads[level] = count - 1, size - item.size
            else:
                del self._loads[level]
        if len(self._deadlines) > 2 * len(self._by_id) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._is_waiting(entry)]
            heapq.heapify(self._deadlines)

    def leave(self, window: list[WaitingItem], chosen: list[WaitingItem], gone: list[WaitingItem]) -> None:
        """Take some of a queue's first ones out; who stays behind while later ones are `chosen` is passed over."""
        if chosen:
            last = max(waiter.rank for waiter in chosen)
            leaving = {waiter.rank[1] for waiter in gone}
            for waiter in window:
                if waiter.rank >= last:
                    break
                if waiter.rank[1] not in leaving:
                    waiter.passed_over += 1
        if gone:
            self.remove(gone)

    def load(self, newcomer: Item | None = None) -> tuple[int, float]:
        """Return how many wait, or only those surely ahead of a newcomer, and the sum of their sizes."""
        count, total = 0, 0.0
        priority, level = (inf, inf) if newcomer is None else self._level(newcomer)
        for (each_priority, each_level), (number, size) in self._loads.items():
            if each_priority <= priority and each_level <= level:
                count += number
                total += size
        return count, total

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of anyone who waits."""
        while self._deadlines and not self._is_waiting(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take_expired(self, moment: float) -> list[WaitingItem]:
        """Take out everyone whose deadline is before this moment."""
        gone = []
        while (deadline := self.next_deadline()) is not None and deadline < moment:
            waiter = self._by_id[heapq.heappop(self._deadlines)[2]]
            self.remove([waiter])
            gone.append(waiter)
        return gone

    def _level(self, item: Item) -> tuple[int, float]:
        return item.priority, self._order.level(item.size)

    def _is_waiting(self, entry: tuple[float, int, str]) -> bool:
        waiter = self._by_id.get(entry[2])
        return waiter is not None and waiter.rank[1] == entry[1]

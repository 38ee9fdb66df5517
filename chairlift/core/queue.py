"""Who of those who wait is next, one rule for sequences and items; a queue in that order, and a bound on one."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from math import ceil, frexp, ldexp
from typing import Generic, Protocol, TypeVar

import msgspec

# Lowest first: a moment in seconds on the scheduler's clock, and a serial number for those of one moment.
Rank = tuple[float, int]

# By name: the seconds by which work of a size stands further back than its arrival, given those that a unit counts.
ORDERS: dict[str, Callable[[float, float], float]] = {
    "arrival": lambda size, unit: 0.0,
    "shortest": lambda size, unit: size * unit,
}
# Setbacks that differ by less than this share of a power of two are of one level.
_LEVELS = 16


class QueueOrder(msgspec.Struct, frozen=True):
    """Ranks work by `arrival + priority * priority_ageing + setback`, in seconds; the order's name says what sets back.

    A level of priority, or a unit of size, is worth so many seconds of waiting: whoever waits is overtaken only by work
    that came at most so much later, and nobody starves, whatever comes.
    """

    name: str = "arrival"
    priority_ageing: float = 1.0
    size_ageing: float = 0.001

    def moment(self, arrival: float, priority: int, size: float) -> float:
        """Return the first part of a rank."""
        return arrival + priority * self.priority_ageing + ORDERS[self.name](size, self.size_ageing)

    def level(self, size: float) -> float:
        """Return the setback, rounded up to one of few: who came before and is on no higher level is ahead, roughly."""
        setback = ORDERS[self.name](size, self.size_ageing)
        if not setback:
            return 0.0
        mantissa, exponent = frexp(setback)
        return ldexp(ceil(mantissa * _LEVELS) / _LEVELS, exponent)


class HasRank(Protocol):
    """One who waits."""

    @property
    def rank(self) -> Rank:
        """Lower is sooner."""
        ...


class Ranked(HasRank, Protocol):
    """What the queue needs to know of one who waits. The serial number in its `rank` is its own."""

    @property
    def arrival(self) -> float:
        """When it came."""
        ...


R = TypeVar("R", bound=Ranked)


class WaitingQueue(Generic[R]):
    """Those who wait, by rank.

    `push`, `pop` and `remove` take O(log n) amortized, everything else O(1). A removed entry stays in the heaps as a
    tombstone until it surfaces or until tombstones outnumber the living. Ages are kept from when somebody first asks
    for them: most strategies never do.
    """

    def __init__(self) -> None:
        self._living: dict[int, R] = {}
        self._ranks: list[Rank] = []
        self._ages: list[tuple[float, int]] | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._living)

    def __iter__(self) -> Iterator[R]:
        """All of them, in no order of urgency."""
        return iter(self._living.values())

    def push(self, entry: R) -> None:
        """Join the queue."""
        rank = entry.rank
        self._living[rank[1]] = entry
        heapq.heappush(self._ranks, rank)
        if self._ages is not None:
            heapq.heappush(self._ages, (entry.arrival, rank[1]))

    def head(self) -> R | None:
        """Return the most urgent entry, or None."""
        self._bury()
        return self._living[self._ranks[0][1]] if self._ranks else None

    def pop(self) -> R:
        """Take the most urgent entry out of the queue. Raises IndexError when nobody waits."""
        self._bury()
        return self._living.pop(heapq.heappop(self._ranks)[1])

    def in_order(self) -> list[R]:
        """Return all who wait, most urgent first, in O(n log n)."""
        return sorted(self._living.values(), key=lambda entry: entry.rank)

    def remove(self, entry: R) -> None:
        """Take an entry out of the queue, wherever it stands. Raises KeyError if it is not in it."""
        del self._living[entry.rank[1]]
        if len(self._ranks) > 2 * len(self._living) + 16:
            self._ranks = [each.rank for each in self._living.values()]
            heapq.heapify(self._ranks)

    def oldest_arrival(self) -> float | None:
        """Return the earliest arrival time in the queue, whatever its rank, or None."""
        ages = self._ages
        if ages is None or len(ages) > 2 * len(self._living) + 16:
            self._ages = ages = [(each.arrival, each.rank[1]) for each in self._living.values()]
            heapq.heapify(ages)
        while ages and ages[0][1] not in self._living:
            heapq.heappop(ages)
        return ages[0][0] if ages else None

    def _bury(self) -> None:
        while self._ranks and self._ranks[0][1] not in self._living:
            heapq.heappop(self._ranks)


class QueueLimit:
    """A bounded queue. The time to come back follows from the rate at which requests lately ended.

    `max_waiting` counts requests that have not begun to run. Times are in seconds on the caller's clock.
    """

    def __init__(self, max_waiting: int, memory: int = 64) -> None:
        self.max_waiting = max_waiting
        self._ends: deque[float] = deque(maxlen=memory)

    def ended(self, now: float) -> None:
        """Note that a request ended, so a slot came free."""
        self._ends.append(now)

    def retry_after(self, waiting: int, newcomers: int, now: float) -> float | None:
        """Return None if `newcomers` may join the `waiting`, else the seconds until there should be places for them."""
        excess = waiting + newcomers - self.max_waiting
        if excess <= 0:
            return None
        return min(max(excess / self.rate(now), 1.0), 600.0)

    def rate(self, now: float) -> float:
        """Requests ended per second lately; 1 before there is anything to go by."""
        if len(self._ends) < 2:
            return 1.0
        return len(self._ends) / max(now - self._ends[0], 1e-3)

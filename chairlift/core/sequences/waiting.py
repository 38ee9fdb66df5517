"""The line: who waits, most urgent first."""

import heapq
from typing import Generic, Protocol, TypeVar


class Rider(Protocol):
    """What the line needs to know of a waiting request. `key` is (priority, arrival, serial number)."""

    @property
    def key(self) -> tuple[int, float, int]:
        """Lower boards sooner."""
        ...


R = TypeVar("R", bound=Rider)


class WaitingQueue(Generic[R]):
    """Waiting requests by priority (lower is sooner), then arrival.

    `push`, `pop` and `remove` take O(log n) amortized, everything else O(1). A removed entry stays in the heaps as a
    tombstone until it surfaces or until tombstones outnumber the living. Ages are kept from when somebody first asks
    for them: most policies never do.
    """

    def __init__(self) -> None:
        self._living: dict[int, R] = {}
        self._urgency: list[tuple[int, float, int]] = []
        self._age: list[tuple[float, int]] | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._living)

    def push(self, rider: R) -> None:
        """Join the line."""
        _, arrival, serial = rider.key
        self._living[serial] = rider
        heapq.heappush(self._urgency, rider.key)
        if self._age is not None:
            heapq.heappush(self._age, (arrival, serial))

    def head(self) -> R | None:
        """Return the most urgent request, or None."""
        self._bury()
        return self._living[self._urgency[0][2]] if self._urgency else None

    def pop(self) -> R:
        """Take the most urgent request out of the line. Raises IndexError when nobody waits."""
        self._bury()
        return self._living.pop(heapq.heappop(self._urgency)[2])

    def remove(self, rider: R) -> None:
        """Take a request out of the line, wherever it stands. Raises KeyError if it is not in it."""
        del self._living[rider.key[2]]
        if len(self._urgency) > 2 * len(self._living) + 16:
            self._urgency = [r.key for r in self._living.values()]
            heapq.heapify(self._urgency)

    def oldest_arrival(self) -> float | None:
        """Return the earliest arrival time in the line, whatever its priority, or None."""
        age = self._age
        if age is None or len(age) > 2 * len(self._living) + 16:
            self._age = age = [(r.key[1], r.key[2]) for r in self._living.values()]
            heapq.heapify(age)
        while age and age[0][1] not in self._living:
            heapq.heappop(age)
        return age[0][0] if age else None

    def _bury(self) -> None:
        while self._urgency and self._urgency[0][2] not in self._living:
            heapq.heappop(self._urgency)

"""Virtual time: what happens when, and a clock that jumps from one event to the next."""

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """Events to come, in order of time, and those of one moment in the order in which they were put down."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Call `event` at a moment; one that has passed is now."""
        heapq.heappush(self._events, (moment, next(self._serial), event))

    def run(self) -> None:
        """Go from event to event until none is left."""
        events = self._events
        while events:
            moment, _, event = heapq.heappop(events)
            if moment > self.now:
                self.now = moment
            event()

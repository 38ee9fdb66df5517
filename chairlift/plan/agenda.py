"""Virtual time: what happens when, and a clock that jumps from one event to the next."""

import heapq
from collections.abc import Callable
from itertools import count

# Events between two questions whether all is over.
_ASKED_EVERY = 256

_Event = tuple[float, bool, int, Callable[[], None]]


class Agenda:
    """Events to come, in order of time.

    At one moment those that decide come `last`, so that they know of all that has come by then, and of others the first
    that was put down. Deadlines come after all of them.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[_Event] = []
        self._deadlines: list[_Event] = []
        self._serial = count()

    def at(self, moment: float, event: Callable[[], None], last: bool = False) -> None:
        """Call `event` at a moment; one that has passed is now."""
        heapq.heappush(self._events, (max(moment, self.now), last, next(self._serial), event))

    def at_deadline(self, moment: float, event: Callable[[], None]) -> None:
        """Call `event` at a moment, if there is anything else to do then or later: nobody waits for a deadline."""
        heapq.heappush(self._deadlines, (max(moment, self.now), True, next(self._serial), event))

    def run(self, over: Callable[[], bool] | None = None) -> bool:
        """Go from event to event until none is left, or `over`, which is asked now and then; return whether it was."""
        events, deadlines = self._events, self._deadlines
        for number in count(1):
            if not events:
                break
            due = deadlines if deadlines and deadlines[0][0] < events[0][0] else events
            self.now, _, _, event = heapq.heappop(due)
            event()
            if over is not None and number % _ASKED_EVERY == 0 and over():
                return True
        return False

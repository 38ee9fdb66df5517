"""Whether one more request may wait, and if not, when to come back."""

from collections import deque


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

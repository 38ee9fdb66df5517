"""How large batches may be, and how long they wait for company, when all that is asked for is a latency."""

from collections import deque
from math import inf

from chairlift.core.items.learned import LinearCost

_MEMORY = 32
# Whoever just missed a batch waits for it and then for its own.
_SHARE = 0.5
# How much more than what arrives a batch size must be able to serve.
_HEADROOM = 1.25


class LatencyTarget:
    """Follows the arrivals of one model, whose answers shall come within `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._arrivals: deque[float] = deque(maxlen=_MEMORY)
        self._mean_size = 0.0

    @classmethod
    def of(cls, seconds: float | None, before: "LatencyTarget | None" = None) -> "LatencyTarget | None":
        """One of this target, if there is any: the one before if it has the same, or with no arrivals yet."""
        if seconds is None:
            return None
        return before if before is not None and before.seconds == seconds else cls(seconds)

    def arrived(self, size: float, now: float) -> None:
        """Note an arrival."""
        self._arrivals.append(now)
        self._mean_size += (size - self._mean_size) / len(self._arrivals)

    def rate(self, now: float) -> float:
        """Arrivals per second, over the last 32."""
        if len(self._arrivals) < 2:
            return 0.0
        return len(self._arrivals) / max(now - self._arrivals[0], 1e-9)

    def most_computed(self, time: LinearCost, num_instances: int, now: float) -> float:
        """Return the computed size that a batch may have.

        So much that two batches in a row are within the target, or where that would not keep up with the arrivals, as
        much as keeps up: then the queue must not grow, or everyone would be late.
        """
        if time.size <= 0:
            return inf
        within = (_SHARE * self.seconds - time.call) / time.size
        rate = self.rate(now) * self._mean_size / num_instances
        busy = rate * time.size * _HEADROOM
        keeps_up = rate * _HEADROOM * time.call / (1 - busy) if busy < 1 else inf
        return max(within, keeps_up)

    def leaves_at(self, count: int, oldest: float, time: LinearCost, computed: float, now: float) -> float:
        """Return when a batch of `count` items should leave an idle instance if nobody else comes until then.

        Waiting for one more delays all of them by the time between arrivals, and saves the call that the next one would
        need: it is worth it while the former is less. Never does the oldest wait until it might be late.
        """
        latest = oldest + self.seconds - 2 * time.seconds(computed)
        if len(self._arrivals) < 2:
            return now
        worth = self._arrivals[0] + len(self._arrivals) * time.call / count
        return min(worth, latest)

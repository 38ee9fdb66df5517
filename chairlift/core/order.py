"""Who of those who wait is next: one rule for sequences and items, and a table of what else may count."""

from collections.abc import Callable
from math import ceil, frexp, ldexp

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

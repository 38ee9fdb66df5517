"""The highest rate at which a server still keeps its target."""

from collections.abc import Callable

LOWEST, HIGHEST = 0.02, 10_000.0


def highest_rate(holds: Callable[[float], bool], start: float = 1.0, precision: float = 1.05) -> float | None:
    """Double or halve from `start` until the limit lies between two rates, then bisect to within `precision`.

    Returns the highest rate that held, or None if none did. A trial is a sample, not a proof: near the limit another
    one may fall the other way.
    """
    low, high = None, None
    rate = start
    while low is None or high is None:
        if not LOWEST <= rate <= HIGHEST:
            return low
        if holds(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
    while high / low > precision:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low

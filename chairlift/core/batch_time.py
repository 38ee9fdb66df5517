"""How long a batch will take on one instance, and how far to trust that."""

from typing import NamedTuple

from chairlift.core.cost import CostModel

# Before anything is known: a call costs as much by itself as 8 items, give or take ten times as much. One call that
# holds more or fewer items than the first then settles both terms, for any executor between 0.1 + 10 b and 1 + 0.05 b.
_SHAPE = (8.0, 1.0, 1.0, 1.0)
_DOUBT = 100.0
_RATE = 0.1
_MOST_ERROR = 0.5
# A prediction is trusted up to so many mean errors.
_MARGIN = 2.0


class Line(NamedTuple):
    """Seconds until a batch has been answered: `call` + `size` * (what the runner computes)."""

    call: float
    size: float

    def seconds(self, computed: float) -> float:
        """Return how long a batch of this computed size takes."""
        return self.call + self.size * computed


class BatchTime:
    """Seconds = a + b * computed size, fitted to the calls of one instance.

    Sizes may be in any unit: they are measured in mean items of the first call. `error` is the mean relative deviation
    of late, and `lag` the seconds by which answers come later than the call itself explains.
    """

    def __init__(self) -> None:
        self.error = 0.0
        self.lag = 0.0
        self._model = CostModel(_SHAPE, _DOUBT)
        self._unit = 1.0

    @property
    def num_observed(self) -> int:
        """How many calls it has learned from."""
        return self._model.num_observed

    @property
    def expected(self) -> Line:
        """What a call takes, most likely. Zero before the first one: nothing is refused on a guess."""
        if not self._model.num_observed:
            return Line(0.0, 0.0)
        a, b, _, _ = self._model.coefficients
        return Line(a, b / self._unit)

    @property
    def cautious(self) -> Line:
        """By when an answer can be promised: the expected time, its usual error, and the lag."""
        a, b = self.expected
        factor = 1 + _MARGIN * self.error
        return Line(a * factor + self.lag, b * factor)

    def observe(self, seconds: float, elapsed: float, computed: float, count: int) -> None:
        """Take in a call of `count` items that took `seconds`, and was answered `elapsed` after it was sent off."""
        if not self._model.num_observed:
            self._unit = computed / count if computed > 0 else 1.0
        else:
            predicted = self.expected.seconds(computed)
            deviation = min(abs(seconds / predicted - 1), _MOST_ERROR) if predicted > 0 else _MOST_ERROR
            self.error += _RATE * (deviation - self.error)
        self.lag += _RATE * (min(max(elapsed - seconds, 0.0), seconds) - self.lag)
        self._model.observe(seconds, computed / self._unit, 0)

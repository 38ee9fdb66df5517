"""How long a batch will take on one instance, and how far to trust that."""

from typing import NamedTuple

from chairlift.core.cost import CostModel

# Before anything is known: a call costs as much by itself as 8 items, give or take ten times as much. One call that
# holds more or fewer items than the first then settles both terms, for any executor between 0.1 + 10 b and 1 + 0.05 b.
_SHAPE = (8.0, 1.0, 1.0, 1.0)
_DOUBT = 100.0
_MOST_MARGIN = 0.5
# Answers are promised by when 19 of 20 came. One that comes later moves that by up to a twentieth of the prediction.
_EPSILON = 1e-3
_PROMISE, _STEP = 0.95, 0.05


class LinearCost(NamedTuple):
    """Seconds until a batch has been answered: `call` + `size` * (what the runner computes)."""

    call: float
    size: float

    def seconds(self, computed: float) -> float:
        """Return how long a batch of this computed size takes."""
        return self.call + self.size * computed


class BatchTime:
    """Seconds = a + b * computed size, fitted to the calls of one instance.

    `expected` is what a call takes, most likely; zero before the first one, as nothing is refused on a guess. Sizes may
    be in any unit: they are measured in mean items of the first call. `margin` is how much later than predicted nearly
    all answers came, relative to the prediction; it is found by stochastic approximation (Robbins and Monro 1951).
    """

    def __init__(self) -> None:
        self.margin = 0.0
        self.expected = LinearCost(0.0, 0.0)
        self._model = CostModel(_SHAPE, _DOUBT)
        self._unit = 1.0

    @property
    def num_observed(self) -> int:
        """How many calls it has learned from."""
        return self._model.num_observed

    @property
    def cautious(self) -> LinearCost:
        """By when an answer can be promised: later than expected by the margin."""
        a, b = self.expected
        return LinearCost(a * (1 + self.margin), b * (1 + self.margin))

    def observe(self, seconds: float, elapsed: float, computed: float, count: int) -> None:
        """Take in a call of `count` items that took `seconds`, and was answered `elapsed` after it was sent off."""
        if not self._model.num_observed:
            self._unit = computed / count if computed > 0 else 1.0
        else:
            predicted = self.expected.seconds(computed)
            is_late = elapsed > predicted * (1 + self.margin + _EPSILON)
            moved = self.margin + _STEP * (_PROMISE if is_late else _PROMISE - 1)
            self.margin = min(max(moved, 0.0), _MOST_MARGIN)
        self._model.observe(seconds, computed / self._unit, 0)
        if self._model.num_observed:
            a, b, _, _ = self._model.coefficients
            self.expected = LinearCost(a, b / self._unit)

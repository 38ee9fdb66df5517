"""What is learned from the calls of a model: how long they take, how much fits, when to send the next ahead."""

from math import inf
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


_PATIENCE, _MOST_PATIENCE = 64, 8192
_GROWTH = 1.125
# A call this close to the limit counts as having tried it.
_NEAR = 0.85


class MemoryLimit:
    """The largest batch that fits, in computed size and, where size does not explain it, in items.

    After a call that ran out of memory the limit is the larger of half of it and what is known to fit. After 64
    calls in a row near the limit it grows by an eighth; each time that proves wrong, the patience doubles. A single
    item is never refused: alone it either fits or gets the error.
    """

    def __init__(self) -> None:
        self.max_size = inf
        self.max_items: float = inf
        self.num_exceeded = 0
        self._proven = 0.0
        self._patience = _PATIENCE
        self._near = 0

    def exceeded(self, computed: float, count: int) -> None:
        """Note that a call ran out of memory."""
        self.num_exceeded += 1
        self._near = 0
        if self.num_exceeded > 1:
            self._patience = min(self._patience * 2, _MOST_PATIENCE)
        if computed <= self._proven:
            # As much once fitted: either memory has become scarcer, or it is the number of items that counts.
            self._proven = computed / 2
            self.max_items = min(self.max_items, max(count // 2, 1))
        self.max_size = max(self._proven, computed / 2)

    def fitted(self, computed: float, count: int) -> None:
        """Note that a call went well."""
        self._proven = max(self._proven, computed)
        if computed < _NEAR * self.max_size and count < _NEAR * self.max_items:
            return
        self._near += 1
        if self._near >= self._patience:
            self._near = 0
            # At least by one item, or of small batches an eighth would be nothing.
            self.max_size = max(self.max_size * _GROWTH, self.max_size + computed / count)
            self.max_items = max(self.max_items * _GROWTH, self.max_items + 1)


# What a call waited for beyond this many seconds is waiting; below, it is what taking a message costs.
_NEGLIGIBLE = 2e-4
# Nothing waited: a little later will do as well. This shrinks what was learned to a third in 100 calls.
_DECAY = 0.01
# A lead is no more than this share of a call: what took longer was a hiccup, and no reason to bind batches so early.
_MOST_LEAD = 0.5


class Lead:
    """Follows what calls that were sent ahead had their instance wait, and grows by that much; else it slowly shrinks.

    So it becomes what sending takes, how late timers are and how far predictions err, all together, for this instance.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, idle: float, seconds: float) -> None:
        """Take in a call that its instance waited `idle` seconds for; the one before was to take `seconds`."""
        late = max(idle - _NEGLIGIBLE, 0.0)
        self.seconds = min(self.seconds * (1 - _DECAY) + late, _MOST_LEAD * seconds)


# What it grows from.
_LEAST = 1e-5


class HighQuantile:
    """Follows the 95th percentile of positive values, by stochastic approximation (Robbins and Monro 1951)."""

    def __init__(self) -> None:
        self.value = 0.0

    def observe(self, value: float) -> None:
        """Take in a value."""
        if value > self.value:
            self.value = max(self.value * (1 + _STEP * _PROMISE), _LEAST)
        else:
            self.value *= 1 - _STEP * (1 - _PROMISE)

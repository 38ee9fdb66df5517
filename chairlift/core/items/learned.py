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


class Room(NamedTuple):
    """What a batch may hold as far as memory goes; how much is known to fit, and how patiently more is tried."""

    size: float = inf
    items: float = inf
    proven: float = 0.0
    patience: int = _PATIENCE
    was_exceeded: bool = False


class MemoryLimit:
    """The largest batch that fits, in computed size and, where size does not explain it, in items.

    After a call that ran out of memory the limit is the larger of half of it and what is known to fit. After 64
    calls in a row that had no room for one item more it grows by an eighth; each time that proves wrong, the patience
    doubles. A single item is never refused: alone it either fits or gets the error.

    An item that runs out of memory alone says nothing of batches but of those that it was in. So where it was found in
    smaller and smaller parts of a batch, the limit is again what it was before that one.
    """

    def __init__(self) -> None:
        self.room = Room()
        self._near = 0

    @property
    def max_size(self) -> float:
        """The computed size that a batch may have."""
        return self.room.size

    @property
    def max_items(self) -> float:
        """How many items a batch may hold."""
        return self.room.items

    def exceeded(self, computed: float, count: int, before: Room | None = None) -> None:
        """Note that a call ran out of memory. Of a part of a batch that failed, `before` is the room before that."""
        size, items, proven, patience, was_exceeded = self.room
        if count == 1:
            if before is not None:
                self.room = Room(
                    max(size, before.size),
                    max(items, before.items),
                    max(proven, before.proven),
                    min(patience, before.patience),
                    before.was_exceeded,
                )
            return
        self._near = 0
        if was_exceeded:
            patience = min(patience * 2, _MOST_PATIENCE)
        if computed <= proven:
            # As much once fitted: either memory has become scarcer, or it is the number of items that counts.
            proven = computed / 2
            items = min(items, max(count // 2, 1))
        self.room = Room(max(proven, computed / 2), items, proven, patience, True)

    def fitted(self, computed: float, count: int, again: bool = False) -> None:
        """Note that a call went well. If it was a part of one that failed, it may have been more than the limit is now.

        Of other calls that says nothing: they were sent before the limit was lowered, or another instance has more.
        """
        size, items, proven, patience, was_exceeded = self.room
        proven = max(proven, computed)
        if again:
            size, items = max(size, computed), max(items, count)
        self.room = Room(size, items, proven, patience, was_exceeded)
        if computed + computed / count <= size and count + 1 <= items:
            return
        self._near += 1
        if self._near >= patience:
            self._near = 0
            # At least by one item, or of small batches an eighth would be nothing.
            size = max(size * _GROWTH, size + computed / count)
            items = max(items * _GROWTH, items + 1)
            self.room = Room(size, items, proven, patience, was_exceeded)


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

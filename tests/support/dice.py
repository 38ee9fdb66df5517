"""Where the choices of a random history come from, of sequences or of items."""

import random
from typing import Any, Protocol

import hypothesis.strategies as st

# Percent of background work among all.
SHARES = (0, 20, 50, 80)


class Dice(Protocol):
    """Where a history's choices come from."""

    def integer(self, low: int, high: int) -> int: ...


class RandomDice:
    """Choices from a seeded generator."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))


class HypothesisDice:
    """Choices that Hypothesis can shrink."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))


def pick(dice: Dice, options: Any) -> Any:
    return options[dice.integer(0, len(options) - 1)]

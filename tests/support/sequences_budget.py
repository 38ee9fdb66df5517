"""A budget without sense, for histories in which every step may hold another number of tokens."""

import random
from collections.abc import Iterable

from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.step import Step


class RandomBudget:
    """Leaves another number of tokens in every step, at times very few, but never none."""

    lazy = False

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.drawn = self.left = 0
        self.short = False

    def begin(self, running: Iterable[Sequence]) -> None:
        self.drawn = self.left = self._rng.choice((1, 1, 2, 5, 20, 100))
        self.short = False

    def capacity(self, computed: int) -> int:
        return 0 if self.short else self.left

    def grant(self, computed: int, wanted: int, starts: bool) -> int:
        given = min(wanted, self.capacity(computed))
        self.left -= given
        self.short |= given < wanted
        return given

    def takes_decode(self, computed: int) -> bool:
        return self.grant(computed, 1, starts=True) == 1

    def returns_decode(self, computed: int) -> None:
        self.left += 1

    def end(self, running: Iterable[Sequence], step: Step) -> None:
        assert {sequence.id for sequence in running} == step.num_tokens.keys()

    def observe(self, seconds: float) -> None:
        pass

    def explain(self) -> str:
        return "as luck would have it"

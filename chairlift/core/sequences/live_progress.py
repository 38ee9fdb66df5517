"""How far a live request has come, as its front follows it: it waits, it runs, or it lost its slot and waits again."""

from collections.abc import Hashable

from chairlift.core.queue import Rank
from chairlift.core.sequences.output_lengths import LengthCurve
from chairlift.core.sequences.request import Request

# Sequences take different shares of their lengths' distribution, spread evenly (the golden ratio's multiples).
_GOLDEN = 0.6180339887498949


class LiveProgress:
    """A live request that has not ended: waiting until its first token is there, then running.

    It has `begun` while it has a slot, in which its prompt is computed first. `foreseen` is when somebody asked for it,
    and the wait that was foreseen then.
    """

    __slots__ = (
        "begun",
        "deadline",
        "expected",
        "foreseen",
        "group",
        "halted",
        "leads",
        "rank",
        "request",
        "share",
        "since",
    )

    def __init__(self, request: Request, group: Hashable, rank: Rank, deadline: float | None, leads: bool) -> None:
        self.request = request
        self.group = group
        self.rank = rank
        self.deadline = deadline
        self.leads = leads  # the first of those that came together, by which the target goes
        self.share = rank[1] * _GOLDEN % 1.0
        self.begun = False
        self.expected: float | None = None
        self.foreseen: tuple[float, float] | None = None
        # The step of the first token, put off by those that it missed later: as if it had one in each step from there.
        self.since: int | None = None
        # How many steps there were when it lost its slot after its first token, while it has none.
        self.halted: int | None = None

    @property
    def runs(self) -> bool:
        """Whether it has tokens, and its slot."""
        return self.since is not None and self.halted is None

    def move(self, has_slot: bool, steps: int) -> None:
        """Hear that it took or lost its slot after so many steps."""
        self.begun = has_slot
        if self.since is None:
            return
        if not has_slot:
            self.halted = steps if self.halted is None else self.halted
        elif self.halted is not None:
            self.since += steps - self.halted
            self.halted = None

    def made(self, steps: int) -> int:
        """Tokens that it has after so many steps: one in each since its first in which it had its slot.

        Of those in which it is computed anew it has none but in the last, but nobody is told how many these are.
        """
        if self.since is None:
            return 0
        until = steps if self.halted is None else self.halted
        return min(max(until - self.since, 0) + 1, self.request.max_tokens)

    def left(self, curve: LengthCurve, made: int, share: float) -> int:
        """Tokens that it is yet to have beyond those."""
        return max(self.length(curve, made, share) - made, 1)

    def length(self, curve: LengthCurve, made: int, share: float) -> int:
        """Tokens that it will have; all that it may have, if nothing can end it before."""
        request = self.request
        if not self.request.may_stop:
            return request.max_tokens
        least = max(made, request.params.min_tokens - 1)
        return max(min(int(curve.length(least, share)), request.max_tokens), made + 1)

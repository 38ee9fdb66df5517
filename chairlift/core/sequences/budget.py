"""How much of a step prompts may have, when the time between two tokens of everyone else is to stay inside a target."""

from collections.abc import Collection, Iterable
from math import inf
from typing import ClassVar, Protocol

from chairlift.core.cost import Coefficients, CostModel
from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.step import Step

# Prompt tokens that every step has time for. Without them prompts would stop whenever the decodes alone take longer
# than the target, perhaps for ever, and their clients would wait for nothing: a target that can't be met is not met any
# better by starving half of the requests. So few cost little beside such decodes.
FLOOR = 8
# Of how many steps a cost model must have learned to be believed where nothing but habit is at stake.
LEAST_STEPS = 4
# What prompts have of a step that decodes wait for, at least, whatever its time: as much as these, lest prompts hardly
# move where the decodes alone fill it, and so many times what a step costs by itself, since smaller steps mean more of
# them: prompts get slower by at most about a thirteenth for it.
_DECODES, _STEPS = 1.0, 12.0


def seconds_beside(decodes: float, cost: Coefficients, step_time: float) -> float:
    """Return what a step with prompts may take in which the decodes alone take so many seconds."""
    return max(step_time, decodes + max(_DECODES * decodes, _STEPS * cost.step))


def bends_beside(cost: Coefficients, step_time: float, bounds: Collection[float]) -> tuple[float, ...]:
    """Return for which seconds of decodes what `seconds_beside` leaves to prompts follows them in another way.

    Also for which it is one of `bounds`. Between two of these it changes evenly with them, or not at all.
    """
    steps = _STEPS * cost.step
    turns = step_time - steps, step_time / (1 + _DECODES), steps / _DECODES
    return (*turns, *(step_time - bound for bound in bounds), *(bound / _DECODES for bound in bounds))


class StepBudget(Protocol):
    """Hands out a step's tokens beyond the one that each running sequence gets in any case.

    It is asked in order of urgency, and once someone got less than was wanted, nobody gets any more in that step: a
    long prompt is not passed by those to whom a token costs less. One that is `lazy` is begun, and learns from a step,
    only where prompts ask for tokens beside others who run.
    """

    lazy: ClassVar[bool]

    def begin(self, running: Iterable[Sequence]) -> None:
        """Start a step in which all of these get one token."""
        ...

    def capacity(self, computed: int) -> int:
        """Return how many tokens a prompt that starts now, with this many found in the prefix cache, could be given."""
        ...

    def grant(self, computed: int, wanted: int, starts: bool) -> int:
        """Give a sequence up to `wanted` tokens more: from none if it starts, else beyond its one."""
        ...

    def takes_decode(self, computed: int) -> bool:
        """Give one token to a sequence that joins with so many computed; the same as `grant` of 1, but many times."""
        ...

    def returns_decode(self, computed: int) -> None:
        """Hear that the one which `takes_decode` was last asked for does not join after all."""
        ...

    def end(self, running: Collection[Sequence], step: Step) -> None:
        """The step is what it will be."""
        ...

    def observe(self, seconds: float) -> None:
        """Take in how long it took."""
        ...

    def explain(self) -> str:
        """Say why a prompt must wait for the next step."""
        ...


class LatencyBudget:
    """Gives prompts what the decodes leave of `target` seconds, by a cost model that learns from every step.

    Chunks grow smaller as a prompt grows longer, since its attention grows dearer. `predicted` and `seconds` are the
    last step's duration as foreseen and as it was; `tokens` is how many that step could have held: one each, and a
    prompt from its start. At least `FLOOR` prompt tokens go into every step, whatever the target, and it
    never gives more than `most`, the scheduler's limit. After Sarathi-Serve (OSDI 2024), which finds such a limit by
    profiling and then keeps it.
    """

    lazy: ClassVar[bool] = False

    def __init__(self, target: float, most: int, model: CostModel | None = None) -> None:
        self.target = target
        self.most = most
        self.model = model or CostModel()
        self.tokens = most
        self.predicted = 0.0
        self.seconds = 0.0
        self._floor = 0
        self._gives = False
        self._given_out = False
        self._decodes = 0
        self._holds = (0, 0, 0)
        # While one decode after the other joins: seconds left, and what one costs by itself and for each KV token.
        self._spare: float | None = None
        self._decode = self._decode_kv = 0.0

    def begin(self, running: Iterable[Sequence]) -> None:
        """Start with one token for each, attending to all before it."""
        count = read = 0
        for sequence in running:
            count += 1
            read += sequence.num_computed_tokens + 1
        self._floor = FLOOR
        self._gives = True
        self._given_out = False
        self._decodes = count
        self._holds = count, read, read
        self._spare = None
        self.tokens = min(count + self.capacity(0), self.most)

    def capacity(self, computed: int) -> int:
        """Return how many tokens a prompt that starts now, with `computed` of them cached, has time for."""
        return self._time_for(computed, self._holds[1])

    def grant(self, computed: int, wanted: int, starts: bool) -> int:
        """Give up to `wanted` tokens of time to a sequence with `computed` tokens in the KV cache."""
        tokens, read, pairs = self._holds
        if not starts:
            computed += 1
        # The context of one that runs is among what is read already.
        given = min(wanted, self._time_for(computed, read if starts else read - computed))
        self._given_out |= given < wanted
        self._spare = None
        self._floor = max(self._floor - given, 0)
        read += given + computed if starts else given
        self._holds = tokens + given, read, pairs + given * computed + given * (given + 1) // 2
        return given

    def takes_decode(self, computed: int) -> bool:
        """Give one token to a sequence that joins with `computed` in the KV cache, if there is time for it.

        A decode's time is linear in what it reads, so nothing is left of the prediction but to take it off.
        """
        if self._spare is None:
            self._spare = self._left()
        context = computed + 1
        left = self._spare - self._decode - self._decode_kv * context
        if self._floor:
            self._floor -= 1
        elif left < 0:
            return False
        self._spare = left
        tokens, read, pairs = self._holds
        self._holds = tokens + 1, read + context, pairs + context
        return True

    def returns_decode(self, computed: int) -> None:
        """Have back what the last `takes_decode` gave, for others."""
        assert self._spare is not None
        # Where there was time for it the floor may have paid; that is left as it is, as there is time for others too.
        if self._floor or self._spare < 0:
            self._floor += 1
        context = computed + 1
        self._spare += self._decode + self._decode_kv * context
        tokens, read, pairs = self._holds
        self._holds = tokens - 1, read - context, pairs - context

    def _left(self) -> float:
        """The seconds that there are for decodes that join the step as it is."""
        if self._given_out:
            self._floor = 0
        if self._given_out or not self.model.num_observed:
            return -inf
        _, token, kv_token, pair = self.model.coefficients
        # One that joins has experts read that nobody has chosen yet; those who follow it, fewer.
        self._decode, self._decode_kv = token + self.model.more_for(self._holds[0]), kv_token + pair
        return self.target - self.model.predict(*self._holds)

    def _time_for(self, computed: int, read: int) -> int:
        if self._given_out:
            return 0
        tokens, _, pairs = self._holds
        if not self.model.num_observed:
            return self._floor  # a guess might be wrong by a hundred times
        within = self.model.tokens_within(self.target, tokens, read, pairs, computed)
        return max(self.most if within is None else min(within, self.most), self._floor)

    def end(self, running: Collection[Sequence], step: Step) -> None:
        """Predict the step as it is: whoever was preempted is not in it."""
        # All that is in the step was given here, if this budget gave it; so where nothing is missing, nothing changed.
        if not self._gives or self._holds[0] != step.total_tokens:
            tokens = read = pairs = 0
            if step.total_tokens == len(step.num_tokens) == len(running):
                # Nothing but decodes: each computes one token, which attends to itself and all before it.
                tokens = len(running)
                pairs = read = tokens + sum([sequence.num_computed_tokens for sequence in running])
                running = ()
            for sequence in running:
                given, computed = step.num_tokens[sequence.id], sequence.num_computed_tokens
                tokens += given
                read += computed + given
                pairs += given * computed + given * (given + 1) // 2
            self._holds = tokens, read, pairs
        self._gives = False
        self.predicted = self.model.predict(*self._holds)

    def observe(self, seconds: float) -> None:
        """Learn from the step that just ended."""
        self.seconds = seconds
        self.model.observe(seconds, *self._holds)

    def explain(self) -> str:
        """Say what the step's time went to."""
        return (
            f"the step's {self.target * 1000:g} ms are given out: {self._holds[0]} tokens, "
            f"{self._decodes} of them one each for those who ran"
        )


class StepTimeBudget(LatencyBudget):
    """Holds a step whose tokens somebody reads along to `step_time` seconds, or more where `seconds_beside` says so.

    Others have all that there is: where nobody decodes, or whoever does hears of it only in the end; and so has
    everyone until the model has learned from a few steps. `target` is what the present step may take, in seconds.
    """

    lazy: ClassVar[bool] = True

    def __init__(self, step_time: float, most: int, model: CostModel | None = None) -> None:
        super().__init__(inf, most, model)
        self.step_time = step_time

    def begin(self, running: Iterable[Sequence]) -> None:
        """Start a step in which all of these get one token, and find out how long it may take."""
        self.target = inf
        super().begin(running)
        known = self.model.num_observed >= LEAST_STEPS
        if known and any(not each.reads_prompt and not each.request.hold_updates for each in running):
            decodes = self.model.predict(*self._holds)
            self.target = seconds_beside(decodes, self.model.coefficients, self.step_time)

    def _time_for(self, computed: int, read: int) -> int:
        return self.most if self.target == inf else super()._time_for(computed, read)

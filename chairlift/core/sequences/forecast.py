"""When those who wait will have their first tokens: the steps to come, as the cost model has them, from end to end."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from chairlift.core.cost import Coefficients
from chairlift.core.sequences.budget import FLOOR, bends_beside, seconds_beside


class StepLimits(NamedTuple):
    """What the steps of a model are held to: slots, tokens, KV blocks and their size, and perhaps seconds.

    `step_time` holds those in which somebody decodes, as `StepTimeBudget` does.
    """

    slots: int
    tokens: int
    num_blocks: int
    block_size: int
    seconds: float | None = None
    step_time: float | None = None


class Expected(NamedTuple):
    """When a sequence has its first token, on the caller's clock, and how many seconds each of the others takes.

    `start` is when the first step begins that computes something of it.
    """

    first: float
    pace: float
    start: float


class Forecast:
    """Follows the scheduler's rules through time, one admission after the other, without looking at single steps.

    Sequences that run get a token in each step, which takes as long as the cost model says. Whoever is admitted next
    waits until a slot and blocks are free, and then for the steps that hold its prompt. `running` gives, for each that
    runs, its tokens so far and how many are to come.

    An admission takes O(log slots) for each of its `passes` over steps: one or two for each sequence that ends before,
    and at most 32 for a prompt, however long it is. Where all its chunks up to the next end are of one size they are
    summed up exactly. Where a limit in seconds has them grow or shrink with what the decodes leave, they are taken to
    do so evenly, without rounding each to whole tokens: as they are of 8 tokens or more, the steps of a prompt may be a
    sixteenth too many or too few. To begin or copy a forecast takes O(slots).
    """

    def __init__(
        self, limits: StepLimits, cost: Coefficients, now: float, running: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.limits = limits
        self.cost = cost
        # The step at hand: its number, when it begins, what prompts add to its time, and the tokens it has left.
        self._step = 0
        self._began = now
        self._added = 0.0
        # By the step with the last token: how many tokens the sequence has then.
        self._ends: list[tuple[int, int]] = []
        self._kv_tokens = 0
        for context, left in running:
            self._ends.append((left - 1, context + left))
            self._kv_tokens += context
        heapify(self._ends)
        self._prompts = 0.0
        self._room = self._tokens_left()
        # How often steps went by, whether one or many at once: the work that it was to find out.
        self.passes = 0

    def copy(self) -> "Forecast":
        """Return another that goes on from here by itself."""
        made = Forecast.__new__(Forecast)
        made.__dict__.update(self.__dict__)
        made._ends = self._ends.copy()
        return made

    def admit(self, prompt: int, cached: int, output: int) -> Expected:
        """Let the next in line run, with so many tokens in its prompt, some of them cached, and so many to come."""
        self._wait_for_place(prompt)
        if self._room < 1:
            self._pass(1)
        start = self._began
        self._compute(cached, prompt)
        first = self._began + self._seconds() + self._added
        heappush(self._ends, (self._step + output - 1, prompt + output))
        self._kv_tokens += prompt
        pace = self._seconds() + self._prompts / (self._step + 1)
        return Expected(first, pace, start)

    @property
    def pace(self) -> float:
        """Seconds that each token of those takes who run at the moment."""
        return self._seconds()

    def _compute(self, computed: int, prompt: int) -> None:
        """Fill the step at hand with a prompt, and as many more as it takes."""
        cost = self.cost
        steps, last = 1, self._room  # of the step at hand others may have had some
        while computed < prompt:
            held = steps * (self._room + last) // 2
            given = min(prompt - computed, held)
            # Each chunk reads all before it and itself; the last may be short of what its step holds.
            read = steps * computed + steps * (steps + 1) * (2 * self._room + last) / 6 - (held - given)
            pairs = given * computed + given * (given + 1) / 2
            seconds = cost.token * given + cost.kv_token * read + cost.pair * pairs
            self._added += seconds
            self._prompts += seconds
            if steps > 1:
                self._pass(steps - 1)
            self._room = held - given
            computed += given
            if computed < prompt:
                self._pass(1)
                steps, last = self._even_steps(prompt - computed)

    def _even_steps(self, left: int) -> tuple[int, int]:
        """Return how many steps, from the one that begins, so many prompt tokens fill, and what the last of them holds.

        No more than those over which that changes evenly: nobody ends before the last, and no limit comes to hold.
        """
        room, ends = self._room, self._ends
        steps = max(left // room, 1)
        if ends:
            steps = min(steps, ends[0][0] - self._step + 1)
            growth = (self.cost.kv_token + self.cost.pair) * len(ends)
            if steps > 1 and growth > 0:
                decodes = self._seconds()
                ahead = min((bend - decodes for bend in self._bends() if bend > decodes), default=inf)
                steps = 1 + int(min(ahead / growth, steps - 1))
        last = self._tokens_left(steps - 1)
        if last > room:
            steps = max(steps * room // last, 1)
            last = self._tokens_left(steps - 1)
        return steps, last

    def _bends(self) -> Iterable[float]:
        """For how many seconds of decodes the tokens that a step holds begin, or cease, to change with them."""
        limits, cost = self.limits, self.cost
        bounds = cost.token * FLOOR, cost.token * (limits.tokens - len(self._ends))
        if limits.step_time is not None:
            return bends_beside(cost, limits.step_time, bounds)
        return () if limits.seconds is None else [limits.seconds - bound for bound in bounds]

    def _wait_for_place(self, prompt: int) -> None:
        """Go on until a slot is free, and blocks for the prompt and one for each that runs."""
        limits, ends = self.limits, self._ends
        places = limits.num_blocks * limits.block_size
        while ends:
            # The last block of a sequence is half full on average, and one more is kept for each that runs.
            taken = self._kv_tokens + prompt + (1.5 * len(ends) + 1) * limits.block_size
            if len(ends) < limits.slots and taken <= places:
                return
            self._pass(ends[0][0] - self._step + 1)

    def _pass(self, steps: int) -> None:
        """Let so many steps go by, of which none but the last may be the last of a sequence."""
        self.passes += 1
        running = len(self._ends)
        growth = (self.cost.kv_token + self.cost.pair) * running * steps * (steps - 1) / 2
        self._began += self._added + steps * self._seconds() + growth
        self._added = 0.0
        self._kv_tokens += steps * running
        self._step += steps
        ends = self._ends
        while ends and ends[0][0] < self._step:
            self._kv_tokens -= heappop(ends)[1]
        self._room = self._tokens_left()

    def _seconds(self, later: int = 0) -> float:
        """How long a step takes in which those that run get a token each, and nobody more: one so many steps later."""
        cost, running = self.cost, len(self._ends)
        kv_tokens = self._kv_tokens + later * running
        return cost.step + cost.token * running + (cost.kv_token + cost.pair) * kv_tokens

    def _tokens_left(self, later: int = 0) -> int:
        """How many prompt tokens the step at hand holds, or one so many steps later if the same sequences run then."""
        limits, decodes = self.limits, self._seconds(later)
        left, seconds = limits.tokens - len(self._ends), limits.seconds
        if limits.step_time is not None and self._ends:
            seconds = seconds_beside(decodes, self.cost, limits.step_time)
        if seconds is not None and self.cost.token > 0:
            # Rounded last: where a token costs next to nothing, no number of them fills the time.
            left = ceil(min(left, max((seconds - decodes) / self.cost.token, FLOOR)))
        return max(left, 1)

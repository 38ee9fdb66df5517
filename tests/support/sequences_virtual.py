"""A language model in virtual time: the production engine and admission, and a machine that is nothing but times.

An open loop of requests meets them; whatever happens is told with its moment, and takes no longer than to compute it.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients, ExpertReads
from chairlift.core.finished import FinishReason, Shed, ShedReason
from chairlift.core.queue import QueueOrder
from chairlift.core.sequences.overload import LoadShedder
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Step, StepResult
from chairlift.engine.sequences.engine import Engine
from chairlift.runners.sequences import SequenceInfo

STOP = 2
WORD = 3
COST = Coefficients(8e-3, 2e-4, 5e-7, 1e-7)
PARAMS = SamplingParams(temperature=0, max_tokens=None)


@dataclass(frozen=True)
class Machine:
    """How long steps really take, give or take `noise` (of a lognormal), at a speed that may follow the time."""

    cost: Coefficients = COST
    noise: float = 0.0
    slowness: Callable[[float], float] = lambda now: 1.0
    num_blocks: int = 10_000
    experts: ExpertReads | None = None

    def seconds(self, tokens: int, kv_tokens: int, pairs: int) -> float:
        step, token, kv_token, pair = self.cost
        if self.experts is not None:
            step *= self.experts.read(tokens)
        return step + token * tokens + kv_token * kv_tokens + pair * pairs


@dataclass(frozen=True)
class Arrival:
    """A request that ends after `length` tokens; its client knows that beforehand, or has it end by a stop token."""

    moment: float
    prompt: int
    length: int
    max_tokens: int | None = None
    timeout: float | None = None
    priority: int = 0
    background: bool = False

    def request(self, number: int) -> Request:
        known = self.max_tokens is None
        return Request(
            id=f"{number}-{self.length}",
            prompt_ids=[number * 100_000 + index for index in range(self.prompt)],
            params=PARAMS,
            max_tokens=self.max_tokens or self.length,
            arrival=self.moment,
            priority=self.priority,
            stop_ids=frozenset() if known else frozenset({STOP}),
            background=self.background,
        )


@dataclass
class Life:
    """What became of a request; seconds on the virtual clock. `expected` is the wait that was predicted."""

    arrival: Arrival
    expected: float | None = None
    first: float | None = None
    done: float | None = None
    shed: Shed | None = None
    shed_at: float | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival.moment


@dataclass
class Outcome:
    """All lives, in order of arrival, and how long requests came."""

    seconds: float
    lives: list[Life] = field(default_factory=list)

    def goodput(self, target: float) -> float:
        """Requests a second whose first token was in time."""
        return sum(life.ttft is not None and life.ttft <= target for life in self.lives) / self.seconds

    def ttft(self, quantile: float) -> float:
        """Of those that had a first token."""
        found = sorted(life.ttft for life in self.lives if life.ttft is not None)
        return found[min(int(quantile * len(found)), len(found) - 1)] if found else 0.0

    def inside(self, target: float) -> float:
        """The share of all requests that were in time."""
        return self.goodput(target) * self.seconds / max(len(self.lives), 1)

    def shed(self, reason: ShedReason) -> list[Life]:
        return [life for life in self.lives if life.shed is not None and life.shed.reason is reason]


class VirtualRunner:
    """Knows no tokens but how many there are, and moves the clock by what each step would take."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.now = 0.0
        self._machine = machine
        self._rng = random.Random(seed)
        self._computed: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._ends_at: dict[str, int] = {}

    def load(self) -> SequenceInfo:
        return SequenceInfo(
            vocab_size=10,
            max_model_len=4096,
            num_blocks=self._machine.num_blocks,
            block_size=16,
            dtype="none",
            device="virtual",
            ops="none",
            weight_bytes=0,
            kv_bytes=0,
            experts=self._machine.experts,
        )

    def warm_up(self) -> None:
        pass

    def _end_of(self, request: Request) -> int:
        """With how many tokens it ends by a stop token; 0 if it does not."""
        return len(request.prompt_ids) + int(request.id.rpartition("-")[2]) if request.stop_ids else 0

    def execute(self, step: Step) -> StepResult:
        for name in step.released:
            self._computed.pop(name, None)
            self._known.pop(name, None)
        for start in step.started:
            request = start.request
            self._computed[request.id] = start.num_computed_tokens
            self._known[request.id] = len(start.token_ids)
            self._ends_at[request.id] = self._end_of(request)
        tokens = read = pairs = 0
        made = {}
        for name, given in step.num_tokens.items():
            computed = self._computed[name]
            tokens += given
            read += computed + given
            pairs += given * computed + given * (given + 1) // 2
            self._computed[name] = computed + given
            if computed + given == self._known[name]:
                self._known[name] += 1
                made[name] = [STOP if self._known[name] == self._ends_at[name] else WORD]
        seconds = self._machine.seconds(tokens, read, pairs) * self._machine.slowness(self.now)
        seconds *= self._rng.lognormvariate(0, self._machine.noise)
        self.now += seconds
        return StepResult(made, seconds=seconds)

    def close(self) -> None:
        pass


class VirtualModel:
    """One model and its front, as `SequenceClient` puts them together."""

    def __init__(self, config: SequenceConfig, machine: Machine, seed: int = 0) -> None:
        self.runner = VirtualRunner(machine, seed)
        self.engine = Engine(config, self.runner, clock=lambda: self.runner.now)
        target = config.target_ttft_ms
        order = QueueOrder(config.order, config.priority_ageing_ms / 1000, config.order_ageing_ms / 1000)
        self.shedder = LoadShedder(None if target is None else target / 1000, order)
        info = self.engine.info
        self.shedder.limits = config.step_limits(info.num_blocks, info.block_size)
        # Before the first request a worker says that it has nothing to do, and what it knows.
        self.shedder.stepped(0, 0, self.engine.stats().coefficients, 0.0)
        self.lives: dict[str, Life] = {}
        self.runner.now = 0.0

    @property
    def now(self) -> float:
        """Seconds on the virtual clock, which begins when the model is ready."""
        return self.runner.now

    def send(self, arrival: Arrival, number: int) -> Life:
        """A request comes at its moment, which may be amid a step; the engine hears of it after that."""
        request = arrival.request(number)
        life = self.lives[request.id] = Life(arrival)
        if not request.background:
            deadline = None if arrival.timeout is None else request.arrival + arrival.timeout
            try:
                self.shedder.arrive([request], request.arrival, arrival.max_tokens, deadline)
            except Shed as shed:
                life.shed, life.shed_at = shed, arrival.moment
                return life
            life.expected = self.shedder.expected_of(request.id)
        self.engine.add(request)
        return life

    def step(self) -> bool:
        """One step, and what the front makes of it; False if there is nothing to do."""
        output = self.engine.step()
        if output is None:
            return False
        self.shedder.moved(output.started, output.preempted)
        for update in output.updates:
            life = self.lives[update.id]
            if life.first is None:
                life.first = self.now
                self.shedder.started(update.id, output.stats.steps, update.num_cached_tokens, self.runner.now)
            if update.finish_reason is not None:
                life.done = self.now
                cut_off = life.arrival.max_tokens or life.arrival.length
                self.shedder.ended(update.id, cut_off if update.finish_reason is FinishReason.LENGTH else None)
        stats = output.stats
        for name, shed in self.shedder.stepped(stats.steps, stats.waiting, stats.coefficients, self.runner.now):
            self.lives[name].shed, self.lives[name].shed_at = shed, self.now
            self.engine.abort([name])
            self.shedder.ended(name)
        return True

    def run(self, arrivals: Iterator[Arrival]) -> Outcome:
        """Serve everyone, to the last."""
        coming, number, last = next(arrivals, None), 0, 0.0
        while coming is not None or self.engine.num_unfinished:
            while coming is not None and coming.moment <= self.now:
                self.send(coming, number)
                coming, number, last = next(arrivals, None), number + 1, coming.moment
            if not self.step() and coming is not None:
                self.runner.now = max(coming.moment, self.now)
        return Outcome(last, list(self.lives.values()))


def poisson(
    rate: float | Callable[[float], float],
    seconds: float,
    seed: int = 1,
    *,
    prompts: tuple[int, int] = (16, 384),
    mean_length: float = 64.0,
    most: int = 256,
    knows_length: bool = True,
) -> Iterator[Arrival]:
    """Requests like those of a chat, by themselves: prompts of any length in between, exponential outputs up to `most`.

    The same seed gives the same lengths in the same order at any rate.
    """
    rng, now = random.Random(seed), 0.0
    while True:
        now += rng.expovariate(1.0) / (rate(now) if callable(rate) else rate)
        if now >= seconds:
            return
        length = max(1, min(most, math.ceil(rng.expovariate(1 / mean_length))))
        yield Arrival(now, rng.randint(*prompts), length, None if knows_length else most)


def serve(arrivals: Iterator[Arrival], machine: Machine | None = None, seed: int = 0, **settings: object) -> Outcome:
    """Serve arrivals with a model of these settings."""
    config = SequenceConfig(model="virtual", **({"max_num_seqs": 16} | settings))  # type: ignore[arg-type]
    return VirtualModel(config, machine or Machine(), seed).run(arrivals)

"""A question to the simulator: what a machine makes of some traffic, under some settings and at some rate."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from math import inf, sqrt
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.plan.bottleneck import Limit
from chairlift.plan.figures import Latencies, latencies, report
from chairlift.plan.items import ItemModel
from chairlift.plan.judge import Judge
from chairlift.plan.machine_profile import FrontCost, ProfileT
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.simulator import simulate
from chairlift.plan.targets import LatencyTargets
from chairlift.plan.trace import TraceRequest, duration, repeated, scaled

# Shares of what a server can do at all, from the top: the first at which the targets are kept is near the highest rate.
_LADDER = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.12, 0.05)
# Where company alone is too much it is rare at these.
_RARE = (0.02, 0.01)
# In a crowd there are so many requests for each place, or nobody would wait for one.
_TURNS = 2
# Requests so many times as far apart as one takes on average have no company, but for the very longest.
_APART = 20

ConfigT = TypeVar("ConfigT", SequenceConfig, ItemConfig)


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """What came of one rate. Rates are a second, of requests, of output tokens and of items; times are in seconds.

    `latencies` are at the targets' percentile, `missed` names the targets that they miss, and `mean_e2e` is of answered
    requests. `mean_batch` is of the steps, or calls, `busy` the share of the time that they took; of the KV cache of a
    language model at most the share `kv` was held, which is `kv_tokens`.
    """

    rate: float
    throughput: float
    latencies: Latencies
    mean_e2e: float
    mean_batch: float
    busy: float
    failed: int
    missed: tuple[str, ...]
    output_tokens: float = 0.0
    items: float = 0.0
    kv: float = 0.0
    kv_tokens: int = 0


@dataclass(frozen=True)
class PlanCase(ABC, Generic[ConfigT, ProfileT]):
    """A model on its machine, what comes to it, and what is promised of it.

    Whatever is compared meets the same requests in the same order, sped up or slowed down, and draws with one seed.
    """

    profile: ProfileT
    trace: tuple[TraceRequest, ...]
    targets: LatencyTargets = field(default_factory=LatencyTargets)
    front: FrontCost = field(default_factory=FrontCost)
    seed: int = 0

    # Those that a model of this kind has.
    strategies: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """What another process makes of it for itself is not sent there."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    # What is particular to a kind of model

    @abstractmethod
    def candidates(self, base: ConfigT, strategy: str) -> list[ConfigT]:
        """Return every configuration of a strategy that is worth a try, each once."""

    @abstractmethod
    def one_by_one(self, base: ConfigT) -> ConfigT:
        """Return settings under which nobody waits for company."""

    @abstractmethod
    def patient(self, config: ConfigT, crowd: int) -> ConfigT:
        """Return the same settings, but that none of so many who wait is refused."""

    @abstractmethod
    def work(self, request: TraceRequest) -> int:
        """Return how much a request takes to simulate: tokens of its output and blocks of its prompt, or items."""

    @abstractmethod
    def places(self, config: ConfigT) -> int:
        """Return how many requests are computed at once."""

    @abstractmethod
    def answered(self, run: SimulatedRun, until: float) -> float:
        """Return how many requests a second are answered where there are always enough, from a run until a moment.

        Up to then there were, and at that moment the last one began.
        """

    @abstractmethod
    def mode_targets(self, mode: str, alone: Latencies) -> LatencyTargets:
        """Return the targets of a mode, where requests that have no company see `alone`."""

    @abstractmethod
    def limit(self, config: ConfigT, run: SimulatedRun) -> Limit:
        """Return what limits a server, from a run at which it misses its targets, or has all it can do."""

    @abstractmethod
    def front_seconds(self, request: TraceRequest) -> float:
        """Return the seconds that a request takes the front's one thread."""

    @abstractmethod
    def model(self, config: ConfigT, crowd: int = 0) -> SequenceModel | ItemModel:
        """Return the model to simulate, in whose queue so many at least have room."""

    # What is asked

    def at(self, rate: float, count: int) -> list[TraceRequest]:
        """Return the first `count` requests, so many a second; those that all come at one moment still do."""
        part = repeated(self.trace, count)
        return scaled(part, rate * duration(part) / len(part) or 1.0)

    def run(self, config: ConfigT, rate: float, count: int, replicas: int = 1) -> SimulatedRun:
        """Let the first `count` requests come at a rate."""
        return simulate([self.model(config)], self.at(rate, count), front=self.front, replicas=replicas, seed=self.seed)

    def alone(self, base: ConfigT, count: int) -> Latencies:
        """Return what the first `count` requests see without company, at the targets' percentile, in whatever time.

        Raises ConfigError, saying why, if none of them can be answered.
        """
        config = self.one_by_one(base)
        capacity = self.capacity(config, count)
        if not capacity:
            whys = (life.refusal for life in self.run(config, 1.0, count).requests if life.refusal is not None)
            raise ConfigError(f"no request of the traffic can be answered: {next(whys)}")
        gap = _APART / capacity
        first = self.trace[:count]
        trace = [msgspec.structs.replace(each, arrival=n * gap, timeout=None) for n, each in enumerate(first)]
        run = simulate([self.model(base)], trace, front=self.front, seed=self.seed)
        return latencies(run, self.targets.percentile)

    def point(self, config: ConfigT, rate: float, count: int, replicas: int = 1) -> Point:
        """Return what comes of a rate."""
        return self.summed_up(config, self.run(config, rate, count, replicas), rate)

    def keeps(self, config: ConfigT, rate: float, count: int) -> bool:
        """Whether the targets are kept at a rate; a run ends as soon as it is certain that they are not."""
        trace = self.at(rate, count)
        judge = Judge(self.targets, trace)
        run = simulate([self.model(config)], trace, front=self.front, seed=self.seed, over=judge.has_missed)
        return not judge.missed and not self.targets.missed(latencies(run, self.targets.percentile))

    def capacity(self, config: ConfigT, count: int) -> float:
        """Return the requests a second that are answered where there are always enough of the first `count`.

        Only what is done as long as somebody waits tells that: the last answers have the machine for themselves.
        """
        crowd = [
            msgspec.structs.replace(request, arrival=0.0, timeout=None, background=False)
            for request in repeated(self.trace[:count], max(count, _TURNS * self.places(config)))
        ]
        # Reading requests goes on beside the steps, which it slows down, and in the crowd would come before all.
        idle = msgspec.structs.replace(self.front, request=0.0, prompt_token=0.0)
        waiting = sum(max(request.items, 1) for request in crowd)
        model = self.model(self.patient(config, waiting), waiting)
        run = simulate([model], crowd, front=idle, seed=self.seed, over=_all_have_begun)
        rate = self.answered(run, max((life.scheduled or 0.0 for life in run.requests), default=0.0))
        if not rate:
            # Of those who can be answered at all none had to wait: it takes what the last of them does.
            run = simulate([model], crowd, front=idle, seed=self.seed)
            ends = [life.end for life in run.requests if life.end is not None]
            rate = len(ends) / max(ends, default=inf)
        reading = self.front.request + self.front.prompt_token * fmean(_prompt_tokens(request) for request in crowd)
        if rate:
            rate = 1 / (1 / rate + min(self.front.contention * reading, 1 / rate))
        front = fmean(self.front_seconds(request) for request in crowd)
        return min(rate, 1 / front) if front else rate

    def summed_up(self, config: ConfigT, run: SimulatedRun, rate: float) -> Point:
        """Return a run in figures."""
        found, felt = report(run), latencies(run, self.targets.percentile)
        gauges = list(found.gauges.values())
        return Point(
            rate=rate,
            throughput=found.throughput,
            latencies=felt,
            mean_e2e=found.e2e.mean,
            mean_batch=fmean(gauge.mean_batch for gauge in gauges),
            busy=fmean(gauge.busy for gauge in gauges),
            failed=found.requests - found.answered,
            missed=self.targets.missed(felt),
            output_tokens=found.output_tokens,
        )


def highest_rate(
    case: PlanCase[Any, Any], config: Any, count: int, precision: float = 0.05, rare: bool = False
) -> float:
    """Return the highest rate at which the first `count` requests are served within the targets; 0 if there is none.

    It is sought from above: who waits for a batch to fill misses the targets at low rates too. Only with `rare` it is
    sought where company is rare.
    """
    capacity = case.capacity(config, count)
    if not case.targets.any:
        return capacity
    low, high = 0.0, capacity
    for share in (*_LADDER, *(_RARE if rare else ())):
        if case.keeps(config, share * capacity, count):
            low = share * capacity
            break
        high = share * capacity
    while 0 < low * (1 + precision) < high:
        middle = sqrt(low * high)
        if case.keeps(config, middle, count):
            low = middle
        else:
            high = middle
    return low


def changed(config: SequenceConfig | ItemConfig) -> dict[str, Any]:
    """Return the settings, but for what the model is, that are not what they are where nobody sets them."""
    bare = type(config)(model=config.model)
    names = [field.name for field in msgspec.structs.fields(config) if field.name not in ("model", "kind")]
    return {name: value for name in names if (value := getattr(config, name)) != getattr(bare, name)}


def _all_have_begun(run: SimulatedRun, now: float) -> bool:
    return all(life.scheduled is not None or life.refusal is not None for life in reversed(run.requests))


def _prompt_tokens(request: TraceRequest) -> int:
    return max(request.items, 1) * request.input_length

"""A question to the simulator: what a machine makes of some traffic, under some settings and at some rate."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf, sqrt
from statistics import fmean
from typing import Any

import msgspec

from chairlift.config.sequences import SequenceConfig
from chairlift.plan.figures import Latencies, latencies, report
from chairlift.plan.machine_profile import FrontCost, SequenceProfile
from chairlift.plan.resampler import StepTimes
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.simulator import simulate
from chairlift.plan.targets import LatencyTargets
from chairlift.plan.trace import TraceRequest, duration, scaled

# Shares of what a server can do at all, from the top: the first at which the targets are kept is near the highest rate.
_LADDER = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.12, 0.05)


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """What came of one rate. Rates are a second, of requests and of output tokens; times are in seconds.

    `latencies` are at the targets' percentile, `missed` names the targets that they miss, and `mean_e2e` is of answered
    requests. `mean_batch` is of the steps, `busy` the share of the time that they took; of the KV
    cache at most the share `kv` was held, which is `kv_tokens`.
    """

    rate: float
    throughput: float
    output_tokens: float
    latencies: Latencies
    mean_e2e: float
    mean_batch: float
    busy: float
    kv: float
    kv_tokens: int
    failed: int
    missed: tuple[str, ...]


@dataclass(frozen=True)
class PlanCase:
    """A language model on its machine, what comes to it, and what is promised of it.

    Whatever is compared meets the same requests in the same order, sped up or slowed down, and draws with one seed.
    `max_waiting` is that of the server's settings.
    """

    profile: SequenceProfile
    trace: tuple[TraceRequest, ...]
    targets: LatencyTargets = field(default_factory=LatencyTargets)
    front: FrontCost = field(default_factory=FrontCost)
    max_waiting: int = 1024
    seed: int = 0

    def __reduce__(self) -> tuple[type["PlanCase"], tuple[Any, ...]]:
        """What another process makes of it for itself is not sent there."""
        return PlanCase, tuple(getattr(self, each.name) for each in fields(self))

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(self.profile, random.Random(self.seed))

    def at(self, rate: float, count: int) -> list[TraceRequest]:
        """Return the first `count` requests, so many a second; those that all come at one moment still do."""
        part = self.trace[:count]
        return scaled(part, rate * duration(part) / len(part) or 1.0)

    def run(self, config: SequenceConfig, rate: float, count: int, replicas: int = 1) -> SimulatedRun:
        """Let the first `count` requests come at a rate."""
        model = self._model(config, self.max_waiting)
        return simulate([model], self.at(rate, count), front=self.front, replicas=replicas, seed=self.seed)

    def run_apart(self, config: SequenceConfig, gap: float, count: int) -> SimulatedRun:
        """Let the first `count` requests come one by one, so many seconds apart."""
        trace = [msgspec.structs.replace(each, arrival=n * gap) for n, each in enumerate(self.trace[:count])]
        model = self._model(config, self.max_waiting)
        return simulate([model], trace, front=self.front, seed=self.seed)

    def point(self, config: SequenceConfig, rate: float, count: int, replicas: int = 1) -> Point:
        """Return what comes of a rate."""
        return self.summed_up(config, self.run(config, rate, count, replicas), rate)

    def summed_up(self, config: SequenceConfig, run: SimulatedRun, rate: float) -> Point:
        """Return a run in figures."""
        found, felt = report(run), latencies(run, self.targets.percentile)
        gauges = list(found.gauges.values())
        blocks = max(gauge.most_kv_blocks for gauge in gauges)
        return Point(
            rate=rate,
            throughput=found.throughput,
            output_tokens=found.output_tokens,
            latencies=felt,
            mean_e2e=found.e2e.mean,
            mean_batch=fmean(gauge.mean_batch for gauge in gauges),
            busy=fmean(gauge.busy for gauge in gauges),
            kv=blocks / self.num_blocks(config),
            kv_tokens=blocks * self.profile.block_size,
            failed=found.requests - found.answered,
            missed=self.targets.missed(felt),
        )

    def keeps(self, config: SequenceConfig, rate: float, count: int) -> bool:
        """Whether the targets are kept at a rate."""
        return not self.targets.missed(latencies(self.run(config, rate, count), self.targets.percentile))

    def capacity(self, config: SequenceConfig, count: int) -> float:
        """Return the requests a second that are answered where there are always enough of them."""
        crowd = [
            msgspec.structs.replace(request, arrival=0.0, timeout=None, background=False)
            for request in self.trace[:count]
        ]
        patient = msgspec.structs.replace(config, target_ttft_ms=None)
        # Reading requests goes on beside the steps, and in the crowd would come before all of them.
        idle = msgspec.structs.replace(self.front, request=0.0, prompt_token=0.0)
        run = simulate([self._model(patient, len(crowd))], crowd, front=idle, seed=self.seed)
        rate = len(crowd) / max((life.end for life in run.requests if life.end is not None), default=inf)
        return min(rate, 1 / self._front_seconds(crowd)) if self._front_seconds(crowd) else rate

    def num_blocks(self, config: SequenceConfig) -> int:
        """Return the KV blocks of a server with these settings: no more than its slots can fill, unless told so."""
        if config.kv_cache_gb is not None:
            return self.profile.num_blocks
        longest = min(config.max_model_len or self.profile.max_model_len, self.profile.max_model_len)
        return min(self.profile.num_blocks, config.slots * -(-longest // self.profile.block_size))

    def _model(self, config: SequenceConfig, max_waiting: int) -> SequenceModel:
        profile = msgspec.structs.replace(self.profile, num_blocks=self.num_blocks(config))
        return SequenceModel(config, profile, max_waiting=max_waiting, times=self._times)

    def _front_seconds(self, trace: Sequence[TraceRequest]) -> float:
        """The seconds that a request takes the front's one thread."""
        front = self.front
        prompts, answers = fmean(each.input_length for each in trace), fmean(each.output_length for each in trace)
        return front.request + front.prompt_token * prompts + front.output_token * answers


def highest_rate(case: PlanCase, config: SequenceConfig, count: int, precision: float = 0.05) -> float:
    """Return the highest rate at which the first `count` requests are served within the targets; 0 if there is none.

    It is sought from above: who waits for a batch to fill misses the targets at low rates too.
    """
    capacity = case.capacity(config, count)
    if not case.targets.any:
        return capacity
    low, high = 0.0, capacity
    for share in _LADDER:
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

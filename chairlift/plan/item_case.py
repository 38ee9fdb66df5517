"""A model that answers in one call, and is planned for."""

import random
from dataclasses import dataclass
from functools import cached_property
from math import inf

import msgspec

from chairlift.config.items import ItemConfig
from chairlift.plan.bottleneck import Limit, item_limit
from chairlift.plan.case import PlanCase, Point
from chairlift.plan.figures import Latencies
from chairlift.plan.item_candidates import ITEM_STRATEGIES, item_candidates
from chairlift.plan.items import ItemModel
from chairlift.plan.machine_profile import CallSample, ItemProfile
from chairlift.plan.resampler import CallTimes
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.targets import LatencyTargets, targets_of
from chairlift.plan.trace import TraceRequest


@dataclass(frozen=True)
class ItemCase(PlanCase[ItemConfig, ItemProfile]):
    """An embedder, a cross-encoder, an ONNX file or a Python class on its machine."""

    strategies = tuple(ITEM_STRATEGIES)

    def candidates(self, base: ItemConfig, strategy: str) -> list[ItemConfig]:
        """Batch size, window or target, instances, and the step of background items."""
        background = any(request.background for request in self.trace)
        return item_candidates(base, strategy, self.targets, self.profile, background)

    def one_by_one(self, base: ItemConfig) -> ItemConfig:
        """Batches leave at once."""
        return msgspec.structs.replace(base, max_wait_ms=0.0, target_latency_ms=None)

    def patient(self, config: ItemConfig, crowd: int) -> ItemConfig:
        """A queue for all, and no deadline; a target says how large batches may be, which is kept."""
        return msgspec.structs.replace(
            config, max_waiting=max(config.max_waiting, crowd), max_queue_ms=None, timeout_ms=None
        )

    def alone(self, base: ItemConfig, count: int) -> Latencies:
        """As of any other case, so without the model's own deadline too."""
        return super().alone(msgspec.structs.replace(base, timeout_ms=None), count)

    def work(self, request: TraceRequest) -> int:
        """Its items."""
        return max(request.items, 1)

    def places(self, config: ItemConfig) -> int:
        """Of requests with one item, a full batch for each instance."""
        return config.instances * self.model(config).limits.max_batch_size

    def answered(self, run: SimulatedRun, until: float) -> float:
        """Those who began before the last call: they were done by then, or had the place of others who were not."""
        begun = sum(life.scheduled is not None and life.scheduled < until for life in run.requests)
        return begun / until if begun else 0.0

    def mode_targets(self, mode: str, alone: Latencies) -> LatencyTargets:
        """Of the whole answer, which is as much as that of a first token elsewhere."""
        found = targets_of(mode, alone, self.targets.percentile)
        return msgspec.structs.replace(found, ttft=inf, itl=inf, e2e=found.ttft)

    def limit(self, config: ItemConfig, run: SimulatedRun) -> Limit:
        """The front, the batch size, calls, arithmetic, the wait for a batch, or the targets."""
        model = self.model(config)
        return item_limit(model.limits, model.instances, model.profile, run)

    def summed_up(self, config: ItemConfig, run: SimulatedRun, rate: float) -> Point:
        """Items a second, and of all instances how busy they were."""
        point = super().summed_up(config, run, rate)
        done = [self.work(life.request) for life in run.requests if life.end is not None]
        items = point.throughput * sum(done) / (len(done) or 1)
        return msgspec.structs.replace(point, items=items, busy=point.busy / config.instances)

    def front_seconds(self, request: TraceRequest) -> float:
        """Reading texts, and writing what came of them."""
        front, items = self.front, self.work(request)
        return front.request + items * (front.prompt_token * request.input_length + front.item)

    def model(self, config: ItemConfig, crowd: int = 0) -> ItemModel:
        """The model with its instances, each as fast as the cores that they share let it be."""
        limits = config.limits(self.profile.max_batch_size, self.profile.max_wait_ms)
        profile, times = self._shared[config.instances]
        sized = config.kind == "encoder"
        return ItemModel(limits, profile, instances=config.instances, sized=sized, times=times)

    @cached_property
    def _shared(self) -> "_Shared":
        return _Shared(self.profile, self.seed)


class _Shared(dict[int, tuple[ItemProfile, CallTimes]]):
    """What each of so many instances takes where all are at work, and the draws of it, by their number."""

    def __init__(self, profile: ItemProfile, seed: int) -> None:
        super().__init__()
        self._profile = profile
        self._seed = seed

    def __missing__(self, instances: int) -> tuple[ItemProfile, CallTimes]:
        profile = self._profile
        # Where nobody knows what a call keeps busy, as many as there are share it, be it a GPU.
        slower = max(instances * profile.cores / profile.cpus, 1.0) if profile.cpus else float(instances)
        if slower > 1:
            calls = [CallSample(call.items, call.computed, slower * call.seconds) for call in profile.calls]
            profile = msgspec.structs.replace(
                profile, call=slower * profile.call, size=slower * profile.size, calls=calls
            )
        made = self[instances] = profile, CallTimes(profile, random.Random(self._seed))
        return made

"""A language model that is planned for."""

import random
from dataclasses import dataclass
from functools import cached_property

import msgspec

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.plan.bottleneck import Limit, sequence_limit
from chairlift.plan.case import PlanCase, Point
from chairlift.plan.figures import Latencies
from chairlift.plan.machine_profile import SequenceProfile
from chairlift.plan.resampler import StepTimes
from chairlift.plan.sequence_candidates import sequence_candidates, with_strategy
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.targets import LatencyTargets, targets_of
from chairlift.plan.trace import TraceRequest


@dataclass(frozen=True)
class SequenceCase(PlanCase[SequenceConfig, SequenceProfile]):
    """A language model on its machine; `max_waiting` is that of the server's settings."""

    max_waiting: int = 1024

    strategies = tuple(STRATEGIES)

    def candidates(self, base: SequenceConfig, strategy: str) -> list[SequenceConfig]:
        """Slots, tokens of a step, and whatever else the strategy reads."""
        return sequence_candidates(base, strategy, self.targets)

    def one_by_one(self, base: SequenceConfig) -> SequenceConfig:
        """One slot, of a strategy that does not wait for batches, which `base` must have."""
        return with_strategy(base, base.strategy, 1)

    def patient(self, config: SequenceConfig, crowd: int) -> SequenceConfig:
        """Without a target for the first token nobody is refused for one."""
        return msgspec.structs.replace(config, target_ttft_ms=None)

    def work(self, request: TraceRequest) -> int:
        """Tokens of output, each of which takes part in a step, and blocks of the prompt, each of which is hashed."""
        return max(request.output_length, 1) + request.input_length // self.profile.block_size

    def mode_targets(self, mode: str, alone: Latencies) -> LatencyTargets:
        """Of the first token and of those after it."""
        return targets_of(mode, alone, self.targets.percentile)

    def limit(self, config: SequenceConfig, run: SimulatedRun) -> Limit:
        """Slots, KV memory, arithmetic, memory bandwidth, the front, empty slots, or the targets."""
        return sequence_limit(config, self.num_blocks(config), self.profile.cost, run)

    def summed_up(self, config: SequenceConfig, run: SimulatedRun, rate: float) -> Point:
        """Also how full the KV cache was."""
        blocks = max(max(steps.kv_blocks, default=0) for steps in run.steps.values())
        return msgspec.structs.replace(
            super().summed_up(config, run, rate),
            kv=blocks / self.num_blocks(config),
            kv_tokens=blocks * self.profile.block_size,
        )

    def front_seconds(self, request: TraceRequest) -> float:
        """Reading a prompt, and writing an answer."""
        front = self.front
        return front.request + front.prompt_token * request.input_length + front.output_token * request.output_length

    def num_blocks(self, config: SequenceConfig) -> int:
        """Return the KV blocks of a server with these settings: no more than its slots can fill, unless told so."""
        if config.kv_cache_gb is not None:
            return self.profile.num_blocks
        longest = min(config.max_model_len or self.profile.max_model_len, self.profile.max_model_len)
        return min(self.profile.num_blocks, config.slots * -(-longest // self.profile.block_size))

    def model(self, config: SequenceConfig, crowd: int = 0) -> SequenceModel:
        """The model with the KV blocks that its slots can fill."""
        profile = msgspec.structs.replace(self.profile, num_blocks=self.num_blocks(config))
        waiting = max(self.max_waiting, crowd)
        return SequenceModel(config, profile, max_waiting=waiting, times=self._times)

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(self.profile, random.Random(self.seed))

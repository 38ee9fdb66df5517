"""A language model that is planned for."""

import random
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

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
from chairlift.plan.simulated_run import SimulatedRequest, SimulatedRun
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

    def places(self, config: SequenceConfig) -> int:
        """Its slots."""
        return config.slots

    def answered(self, run: SimulatedRun, until: float) -> float:
        """By the time that a token of an answer takes, once all prompts that have begun are paid for.

        By tokens, since those who have ended by then have the shorter answers.
        """
        begun = [life for life in run.requests if life.scheduled is not None and life.scheduled < until]
        made = sum(_tokens_made(life, run, until) for life in begun)
        if not made:
            return 0.0
        prompt = sum(map(self._prompt_seconds, begun)) / len(begun)
        length = fmean(max(life.request.output_length, 1) for life in run.requests if life.refusal is None)
        return 1 / (prompt + length * max(until - len(begun) * prompt, 0.0) / made)

    def _prompt_seconds(self, life: SimulatedRequest) -> float:
        """What a prompt adds to the steps that hold it, without what was cached of it."""
        cost, cached = self.profile.cost, life.cached_tokens
        tokens = life.request.input_length - cached
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        return cost.token * tokens + cost.kv_token * life.request.input_length + cost.pair * pairs

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
        most, block_size = self.profile.max_model_len, self.profile.block_size
        longest = -(-min(config.max_model_len or most, most) // block_size)
        expected = config.expected_blocks(block_size)
        enough = config.slots * longest if expected is None else max(expected, longest)
        return min(self.profile.num_blocks, config.slots * longest, enough)

    def model(self, config: SequenceConfig, crowd: int = 0) -> SequenceModel:
        """The model with the KV blocks that its slots can fill."""
        profile = msgspec.structs.replace(self.profile, num_blocks=self.num_blocks(config))
        waiting = max(self.max_waiting, crowd)
        return SequenceModel(config, profile, max_waiting=waiting, times=self._times)

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(self.profile, random.Random(self.seed))


def _tokens_made(life: SimulatedRequest, run: SimulatedRun, until: float) -> int:
    """How many tokens of an answer the steps before a moment gave."""
    steps = bisect_left(run.steps[life.model, life.replica].began, until)
    made = sum(max(min(last + 1, steps) - first, 0) for first, last in life.spans[:-1])
    if life.spans:
        first, last = life.spans[-1]
        made += max((steps if life.end is None else min(last + 1, steps)) - first, 0)
    return min(made, max(life.request.output_length, 1))

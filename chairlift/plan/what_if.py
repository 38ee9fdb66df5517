"""What would have been: the last minutes of a running server, simulated anew with something changed."""

import random
from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.core.items.limits import BatchLimits
from chairlift.plan.items import ItemModel
from chairlift.plan.machine_profile import CallSample, SequenceProfile
from chairlift.plan.resampler import CallTimes, StepTimes
from chairlift.plan.seen_traffic import (
    SeenRequest,
    SeenStep,
    item_profile,
    item_trace,
    seen_front,
    sequence_profile,
    sequence_trace,
)
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulated_run import SimulatedRequest, SimulatedRun
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest

# The same traffic is met with so many different draws of what steps take, as far as there is time: one by itself is off
# by a tenth in the median first token where half of all wait. With few changes there are more, up to so many runs.
_SEEDS, _RUNS = 3, 8
# Steps and calls of shapes that differ by less, in octaves, are alike.
_ALIKE = 0.5
# Numbers of prefixes that only one request has begin here.
_OWN_PREFIX = 2**40


class Change(msgspec.Struct, kw_only=True):
    """What is different: the settings, the machines, or of the request that is asked about its priority, or that its
    prompt had been computed before."""

    config: SequenceConfig | None = None
    limits: BatchLimits | None = None
    replicas: int = 1
    priority: int | None = None
    cached: bool = False


class WhatIfQuestion(msgspec.Struct, kw_only=True):
    """The traffic of one model, in order of arrival, and what is to be changed.

    What is told in figures is of those that came from `since` on and were answered, refused, or given up at their
    deadline. `target` is the place of a request that is asked about by itself.
    """

    requests: list[SeenRequest]
    changes: list[Change]
    since: float
    target: int | None = None


class SequenceQuestion(WhatIfQuestion, kw_only=True, tag="sequences"):
    """Of a language model, its settings, what its memory holds, and its steps; `profile` has no steps of its own.

    The settings may have been changed since its memory was made, for `loaded_slots`.
    """

    config: SequenceConfig
    profile: SequenceProfile
    loaded_slots: int
    max_waiting: int
    steps: list[SeenStep]
    cost: Coefficients | None = None


class ItemQuestion(WhatIfQuestion, kw_only=True, tag="items"):
    """Of a model that answers in one call, its limits, instances and calls. Sizes count where items are `sized`."""

    limits: BatchLimits
    instances: int
    ahead: bool
    sized: bool
    calls: list[CallSample]


class Spread(msgspec.Struct, array_like=True):
    """The 50th and the 95th percentile, in seconds."""

    p50: float
    p95: float


class TrafficFigures(msgspec.Struct, kw_only=True):
    """What so many answered requests saw, and the rates a second from the first's arrival to the last's end.

    Of a language model `ttft` and `itl` are told and `outputs_per_s` counts tokens, of another model items. `refused`
    are those that were not answered, given up at their deadline or never let in.
    """

    requests: int
    refused: int
    ttft: Spread | None
    itl: Spread | None
    latency: Spread | None
    requests_per_s: float
    outputs_per_s: float


class RequestTimes(msgspec.Struct):
    """Seconds of the one request that was asked about, from its arrival; None where it was not answered."""

    first_s: float | None
    total_s: float | None


class Foretold(msgspec.Struct):
    """What came of one simulation, or of several on average."""

    figures: TrafficFigures
    target: RequestTimes | None = None


class WhatIfAnswer(msgspec.Struct):
    """What was measured, what the twin makes of it as it was, and of each change; None of those it had no time for.

    All of it took `cpu_s` of processor time.
    """

    measured: TrafficFigures
    now: Foretold
    changed: list[Foretold | None]
    cpu_s: float = 0.0


class _Moments(NamedTuple):
    """When a request came, had its first token, and ended."""

    came: float
    first: float
    ended: float


class _Lives(NamedTuple):
    """What became of the same requests: arrivals, first tokens, ends and outputs, and all times between tokens."""

    arrived: list[float]
    first: list[float]
    ended: list[float]
    outputs: list[int]
    gaps: list[float]
    refused: int


def answer(question: SequenceQuestion | ItemQuestion, is_late: Callable[[], bool]) -> WhatIfAnswer:
    """Simulate the traffic as it was and with each change, with several seeds if it is not late by then.

    Raises ConfigError or ValueError for what can't be simulated.
    """
    twin = _SequenceTwin(question) if isinstance(question, SequenceQuestion) else _ItemTwin(question)
    changes = [Change(), *question.changes]
    rounds: list[list[SimulatedRun]] = []
    for seed in range(max(_SEEDS, _RUNS // len(changes))):
        runs: list[SimulatedRun] = []
        for change in changes:
            if (seed or runs) and is_late():
                break
            runs.append(twin.run(change, seed))
        if seed and len(runs) < len(rounds[0]):
            break
        rounds.append(runs)
    told = [twin.foretold([runs[index] for runs in rounds]) for index in range(len(rounds[0]))]
    changed = [told[index] if index < len(told) else None for index in range(1, len(changes))]
    return WhatIfAnswer(_figures([twin.measured()]), told[0], changed)


def _counts(request: SeenRequest) -> bool:
    """Whether a request is told of: one that was answered, or a live one that the server had no time for."""
    return request.answered or ((request.refused or request.late) and not request.background)


class _Twin:
    """A model with its traffic, as it was."""

    def __init__(self, question: WhatIfQuestion) -> None:
        self._question = question
        requests = question.requests
        self._told = [n for n, each in enumerate(requests) if _counts(each) and each.arrival >= question.since]
        self._front = seen_front(requests)

    def run(self, change: Change, seed: int) -> SimulatedRun:
        """Simulate it."""
        raise NotImplementedError

    def foretold(self, runs: Sequence[SimulatedRun]) -> Foretold:
        """Sum up simulations that differ in nothing but their seed."""
        target = self._question.target
        lives = [self._lives(run) for run in runs]
        if target is None:
            return Foretold(_figures(lives))
        moments = [self._moments(self._requests(run)[target]) for run in runs]
        told = [each for each in moments if each is not None]
        if len(told) < len(runs):
            return Foretold(_figures(lives), RequestTimes(None, None))
        first = fmean(each.first - each.came for each in told)
        return Foretold(_figures(lives), RequestTimes(first, fmean(each.ended - each.came for each in told)))

    def _moments(self, life: SimulatedRequest) -> _Moments | None:
        """When a request came, and had its first token and its end, as the server notes them; None if it had none."""
        if life.first is None or life.end is None:
            return None
        return _Moments(life.request.arrival, life.first, life.end)

    def _requests(self, run: SimulatedRun) -> list[SimulatedRequest]:
        """Those that came, without what was put before them."""
        return run.requests[len(run.requests) - len(self._question.requests) :]

    def _lives(self, run: SimulatedRun) -> _Lives:
        requests = self._requests(run)
        asked = [(requests[index], self._moments(requests[index])) for index in self._told]
        done = [(each, moments) for each, moments in asked if moments is not None]
        return _Lives(
            [moments.came for _, moments in done],
            [moments.first for _, moments in done],
            [moments.ended for _, moments in done],
            [each.request.items or each.num_tokens for each, _ in done],
            [gap for each, _ in done for gap in run.token_gaps(each)],
            len(asked) - len(done),
        )

    def measured(self) -> _Lives:
        """What really became of them."""
        asked = [self._question.requests[index] for index in self._told]
        done = [
            (each, each.first, each.ended)
            for each in asked
            if each.answered and each.first is not None and each.ended is not None
        ]
        return _Lives(
            [each.arrival for each, _, _ in done],
            [first for _, first, _ in done],
            [end for _, _, end in done],
            [each.outputs for each, _, _ in done],
            self._gaps([(first, end) for _, first, end in done]),
            len(asked) - len(done),
        )

    def _gaps(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """The times between the tokens of requests that had them from one moment to another."""
        return []


class _SequenceTwin(_Twin):
    def __init__(self, question: SequenceQuestion) -> None:
        super().__init__(question)
        self._asked = question
        self._profile = sequence_profile(question.steps, question.requests, question.cost, question.profile)
        longest = min(question.config.max_model_len or question.profile.max_model_len, question.profile.max_model_len)
        self._longest = longest
        self._trace = sequence_trace(question.requests, question.profile.block_size, longest)

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(self._profile, random.Random(0), _ALIKE)

    def run(self, change: Change, seed: int) -> SimulatedRun:
        question = self._asked
        config = change.config or question.config
        profile = msgspec.structs.replace(self._profile, num_blocks=self._num_blocks(config))
        model = SequenceModel(config, profile, max_waiting=question.max_waiting, times=self._times)
        trace = self._with_target(change)
        return simulate([model], trace, front=self._front, replicas=change.replicas, seed=seed)

    def _num_blocks(self, config: SequenceConfig) -> int:
        """KV blocks: as there are, or where these were all that the slots could fill, all that more of them can."""
        question, known = self._asked, self._profile.num_blocks
        each = -(-self._longest // self._profile.block_size)
        if question.config.kv_cache_gb is not None or known < question.loaded_slots * each:
            return known
        return max(config.slots * each, known)

    def _with_target(self, change: Change) -> list[TraceRequest]:
        """The trace, with what is changed of the one request."""
        trace, target = self._trace, self._asked.target
        if target is None or not (change.cached or change.priority is not None):
            return trace
        trace, one = list(trace), trace[target]
        if change.priority is not None:
            one = msgspec.structs.replace(one, priority=change.priority)
        if change.cached:
            own = range(_OWN_PREFIX, _OWN_PREFIX + one.input_length // one.block_size)
            one = msgspec.structs.replace(one, hash_ids=tuple(own))
            trace.insert(0, msgspec.structs.replace(one, arrival=0.0, output_length=1))
            target += 1
        trace[target] = one
        return trace

    def _gaps(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """A token comes with each step from the first one on; told are the steps' ends, which come somewhat sooner."""
        ends = np.array([step.ended for step in self._asked.steps])
        gaps: list[float] = []
        for first, end in spans:
            begin, stop = np.searchsorted(ends, (first, end), side="right")
            if begin > 0:
                gaps += np.diff(ends[begin - 1 : stop]).tolist()
        return gaps


class _ItemTwin(_Twin):
    def __init__(self, question: ItemQuestion) -> None:
        super().__init__(question)
        self._asked = question
        self._profile = item_profile("", question.calls)
        self._trace = item_trace(question.requests, question.sized)
        began = min((each.scheduled for each in question.requests if each.scheduled is not None), default=None)
        self._busy_s = 0.0 if began is None else max(began - question.requests[0].arrival, 0.0)

    @cached_property
    def _times(self) -> CallTimes:
        return CallTimes(self._profile, random.Random(0), _ALIKE)

    def run(self, change: Change, seed: int) -> SimulatedRun:
        question, trace, target = self._asked, self._trace, self._asked.target
        if change.priority is not None and target is not None:
            trace = list(trace)
            trace[target] = msgspec.structs.replace(trace[target], priority=change.priority)
        model = ItemModel(
            change.limits or question.limits,
            self._profile,
            instances=question.instances,
            ahead=question.ahead,
            sized=question.sized,
            times=self._times,
            busy_s=self._busy_s,
        )
        return simulate([model], trace, front=self._front, replicas=change.replicas, seed=seed)

    def _moments(self, life: SimulatedRequest) -> _Moments | None:
        """The server counts from when it had read a request until it knew the answer, and what the front does for it
        meanwhile is in the lags of the calls."""
        if life.read is None or life.computed is None:
            return None
        return _Moments(life.read, life.computed, life.computed)


def _figures(lives: Sequence[_Lives]) -> TrafficFigures:
    """Sum up the same requests, seen once or several times."""
    ttft = [first - came for each in lives for came, first in zip(each.arrived, each.first, strict=True)]
    latency = [end - came for each in lives for came, end in zip(each.arrived, each.ended, strict=True)]
    rates = [_rates(each) for each in lives]
    return TrafficFigures(
        requests=len(latency) // len(lives),
        refused=round(fmean(each.refused for each in lives)),
        ttft=_spread(ttft),
        itl=_spread([gap for each in lives for gap in each.gaps]),
        latency=_spread(latency),
        requests_per_s=fmean(rate for rate, _ in rates),
        outputs_per_s=fmean(rate for _, rate in rates),
    )


def _rates(lives: _Lives) -> tuple[float, float]:
    seconds = max(lives.ended, default=0.0) - min(lives.arrived, default=0.0)
    return (len(lives.ended) / seconds, sum(lives.outputs) / seconds) if seconds > 0 else (0.0, 0.0)


def _spread(samples: Any) -> Spread | None:
    if not len(samples):
        return None
    p50, p95 = np.percentile(samples, (50, 95)).tolist()
    return Spread(p50, p95)

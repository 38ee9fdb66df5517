"""A plan: for each strategy its best settings and what they reach, which of them to take, and how many machines."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import msgspec

from chairlift.plan.bottleneck import Limit
from chairlift.plan.case import PlanCase, Point, changed
from chairlift.plan.figures import Latencies
from chairlift.plan.search import Mapper, Trial, num_requests, num_trials, search, simplest
from chairlift.plan.targets import LatencyTargets

# Rates of the curve, as shares of what a server can do at all.
_CURVE = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1)
# How far beyond the highest rate what limits shows.
_BEYOND = 1.1
# Strategies whose highest rates differ by less are equal: then the fewest settings to change decide.
_ALIKE = 0.02
# Targets that even a request without company misses by so much are not sought settings for.
_HOPELESS = 1.25
# How many numbers of machines are tried, from what arithmetic says on: requests are shared out unevenly.
_MORE_REPLICAS = 8
# Of more machines than these so many are simulated, with their share of the rate: each takes memory, and how unevenly
# requests are shared out among many depends little on how many they are.
_MOST_MACHINES = 64
# All of them together do so much work, of requests as in `search`, and no less than each of them a quarter of it.
_MACHINES_WORK = 400_000


CaseT = TypeVar("CaseT", bound=PlanCase[Any, Any])


class StrategyPlan(msgspec.Struct, kw_only=True):
    """A strategy's best settings, those that are not the defaults: the highest rate, and what comes of it.

    `capacity` is the rate where nobody minds the latency. At the highest rate of 0 no rate keeps the targets, and there
    is no point `at` it. The `knee` is the index of the point of the curve beyond which more costs more than it brings.
    """

    strategy: str
    settings: dict[str, Any]
    rate: float
    capacity: float
    at: Point | None
    limit: Limit
    curve: list[Point]
    knee: int


class Replicas(msgspec.Struct, kw_only=True):
    """How many machines keep the targets at a rate, and what comes of it; 0 if no number of those tried does."""

    rate: float
    count: int
    at: Point | None


class ServingPlan(msgspec.Struct, kw_only=True):
    """What to do with a case: `chosen` is the best of the strategies, which come in the order of the case.

    `alone` is what a request without company sees. Without a strategy that keeps the targets there is none chosen.
    """

    targets: LatencyTargets
    alone: Latencies
    requests: int
    strategies: list[StrategyPlan]
    chosen: str | None
    replicas: Replicas | None = None

    @property
    def best(self) -> StrategyPlan | None:
        """The plan of the chosen strategy."""
        return next((each for each in self.strategies if each.strategy == self.chosen), None)


class _CurveJob(NamedTuple):
    case: PlanCase[Any, Any]
    config: Any
    rate: float
    requests: int


def with_mode(case: CaseT, base: Any, mode: str) -> CaseT:
    """Return the case with the targets that a mode stands for; `base` must not wait for batches."""
    return replace(case, targets=case.mode_targets(mode, case.alone(base, num_requests(case))))


def make_plan(
    case: PlanCase[Any, Any],
    base: Any,
    rate: float,
    mapper: Mapper = map,
    on_progress: Callable[[float], object] = lambda share: None,
) -> ServingPlan:
    """Plan for a case with the settings of `base`, but for those that are sought, and for a rate that is to be served.

    `base` must not wait for batches. `on_progress` hears the share of the work that is done.
    """
    wanted = {strategy: case.candidates(base, strategy) for strategy in case.strategies}
    # The curves' points are on more traffic than most trials, so they count for more.
    total, done = num_trials(wanted) + 2 * len(_CURVE) * len(wanted), 0

    def count_up(number: int) -> None:
        nonlocal done
        done += number
        on_progress(done / total)

    count = num_requests(case)
    seen = case.alone(base, count)
    if _hopeless(case.targets, seen):
        trials = {strategy: simplest([Trial(config, 0.0) for config in found]) for strategy, found in wanted.items()}
        count_up(num_trials(wanted))
    else:
        trials = search(case, wanted, mapper, lambda: count_up(1))
    capacities = {strategy: case.capacity(trial.config, count) for strategy, trial in trials.items()}
    jobs = [
        _CurveJob(case, trial.config, share * capacities[strategy], count)
        for strategy, trial in trials.items()
        for share in _CURVE
    ]
    points = []
    for point in mapper(_point, jobs):
        points.append(point)
        count_up(2)
    strategies = [
        _strategy_plan(case, strategy, trial, capacities[strategy], points[index * len(_CURVE) :][: len(_CURVE)], count)
        for index, (strategy, trial) in enumerate(trials.items())
    ]
    chosen = _chosen(strategies)
    plan = ServingPlan(targets=case.targets, alone=seen, requests=count, strategies=strategies, chosen=chosen)
    if chosen is not None:
        plan.replicas = replicas_for(case, trials[chosen], rate, count)
    return plan


def _hopeless(targets: LatencyTargets, seen: Latencies) -> bool:
    wider = {name: _HOPELESS * getattr(targets, name) for name in ("ttft", "itl", "e2e")}
    return bool(msgspec.structs.replace(targets, **wider).missed(seen))


def knee(curve: Sequence[Point]) -> int:
    """Return where a curve has the most throughput for its latency, which is Kleinrock's power.

    Before it there is more throughput to be had for little; beyond it latency grows faster.
    """
    powers = [point.throughput / point.mean_e2e if point.mean_e2e else 0.0 for point in curve]
    return powers.index(max(powers))


def replicas_for(case: PlanCase[Any, Any], trial: Trial, rate: float, count: int) -> Replicas:
    """Return how many machines with these settings keep the targets at a rate, each with its own share of it."""
    # Not fewer: a run of so many requests may end before a machine that has too much to do falls behind.
    least = max(ceil(rate / trial.rate), 1)
    stride = ceil(least / _MOST_MACHINES)
    work = fmean(case.work(request) for request in case.trace)
    for number in range(least, least + _MORE_REPLICAS * stride, stride):
        simulated = min(number, _MOST_MACHINES)
        share = simulated / number
        # One that has only its share of few requests never has a crowd.
        each = min(max(round(_MACHINES_WORK / (work * simulated)), count // 4), count)
        point = case.point(trial.config, share * rate, each * simulated, simulated)
        if not point.missed:
            of_all = {name: getattr(point, name) / share for name in ("rate", "throughput", "output_tokens", "items")}
            return Replicas(rate=rate, count=number, at=msgspec.structs.replace(point, **of_all))
    return Replicas(rate=rate, count=0, at=None)


def _point(job: _CurveJob) -> Point:
    return job.case.point(job.config, job.rate, job.requests)


def _strategy_plan(
    case: PlanCase[Any, Any], strategy: str, trial: Trial, capacity: float, curve: list[Point], count: int
) -> StrategyPlan:
    config, rate = trial
    beyond = case.run(config, _BEYOND * (rate or capacity), count)
    return StrategyPlan(
        strategy=strategy,
        settings=changed(config),
        rate=rate,
        capacity=capacity,
        at=case.point(config, rate, count) if rate else None,
        limit=case.limit(config, beyond),
        curve=curve,
        knee=knee(curve),
    )


def _chosen(strategies: Sequence[StrategyPlan]) -> str | None:
    best = max(each.rate for each in strategies)
    if best == 0:
        return None
    alike = [each for each in strategies if each.rate >= (1 - _ALIKE) * best]
    return min(alike, key=lambda each: len(each.settings)).strategy

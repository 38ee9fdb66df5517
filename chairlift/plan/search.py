"""The best settings of each strategy, by successive halving: many are tried on little traffic, the best on more.

All of them meet the same requests, and the same draws of the machine's moods (common random numbers), so that what is
compared is the settings. Nothing depends on how fast this runs or in how many processes: the same case has one outcome.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from chairlift.plan.case import PlanCase, changed, highest_rate

# Of those tried in a round the best quarter goes on to the next, which has four times the traffic.
_KEEP = 4
_ROUNDS = 3
# What the last round simulates: so many tokens of output, or items, in so many requests.
_WORK, _LEAST, MOST_SIMULATED = 20_000, 100, 1_000
# The first round, however long answers are.
_LEAST_FIRST = 16
# Precision of the highest rate, by round.
_PRECISION = (0.12, 0.06, 0.03)
# Rates that differ by less are equal, and then the fewest settings to change are best.
_ALIKE = 0.02


# Does something for each of many, in any number of processes; results come in the order of the questions.
Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


class Trial(NamedTuple):
    """Settings, and the highest rate at which they keep the targets."""

    config: Any
    rate: float


class _Job(NamedTuple):
    case: PlanCase[Any, Any]
    config: Any
    requests: int
    precision: float


def num_requests(case: PlanCase[Any, Any]) -> int:
    """Return how many requests a case is decided on: fewer of longer answers, or of more items."""
    mean = fmean(case.work(request) for request in case.trace)
    return min(max(round(_WORK / mean), _LEAST), MOST_SIMULATED, len(case.trace))


def num_trials(candidates: Mapping[str, Sequence[Any]]) -> int:
    """Return how many settings all rounds try together."""
    return sum(_kept(len(configs), number) for configs in candidates.values() for number in range(_ROUNDS))


def search(
    case: PlanCase[Any, Any],
    candidates: Mapping[str, Sequence[Any]],
    mapper: Mapper = map,
    on_trial: Callable[[], object] = lambda: None,
) -> dict[str, Trial]:
    """Return the best of each strategy's candidates; `on_trial` is called for each trial.

    Those of strategies of which nothing keeps the targets are left out, and count as done.
    """
    left = {strategy: list(configs) for strategy, configs in candidates.items()}
    trials: dict[str, list[Trial]] = {}
    for number in range(_ROUNDS):
        jobs = [_job(case, config, number) for configs in left.values() for config in configs]
        for _ in range(sum(_kept(len(configs), number) for configs in candidates.values()) - len(jobs)):
            on_trial()
        rates = []
        for rate in mapper(_highest, jobs):
            rates.append(rate)
            on_trial()
        found = iter(rates)
        for strategy, configs in left.items():
            tried = [Trial(config, next(found)) for config in configs]
            # Of equals those that change least go on, and of these the first: nothing depends on chance.
            trials[strategy] = sorted(tried, key=lambda each: (-each.rate, len(changed(each.config))))
            kept = _kept(len(candidates[strategy]), number + 1)
            if trials[strategy][0].rate == 0:
                # None of them keeps the targets at all: one is enough to show that on more traffic.
                kept = 1
            left[strategy] = [each.config for each in trials[strategy][:kept]]
    return {strategy: simplest(found) for strategy, found in trials.items()}


def _kept(count: int, number: int) -> int:
    """How many of so many candidates are in a round, counted from 0."""
    kept: int = -(-count // _KEEP**number)
    return kept


def _job(case: PlanCase[Any, Any], config: Any, number: int) -> _Job:
    count = num_requests(case) // _KEEP ** (_ROUNDS - 1 - number)
    return _Job(case, config, max(count, _LEAST_FIRST), _PRECISION[number])


def _highest(job: _Job) -> float:
    return highest_rate(job.case, job.config, job.requests, job.precision)


def simplest(trials: Sequence[Trial]) -> Trial:
    """Of the best, which cannot be told apart, the one that leaves most at its default."""
    alike = [each for each in trials if each.rate >= (1 - _ALIKE) * trials[0].rate]
    return min(alike, key=lambda each: len(changed(each.config)))

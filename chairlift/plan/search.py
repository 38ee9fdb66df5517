"""The best settings of each strategy, by successive halving: many are tried on little traffic, the best on more.

Each time some go first, and what does not keep the targets at a rate near theirs is not looked at further (a race). All
of them meet the same requests, and the same draws of the machine's moods (common random numbers), so that what is
compared is the settings. Nothing depends on how fast this runs or in how many processes: the same case has one outcome.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from chairlift.plan.case import PlanCase, changed, highest_rate

# Of those tried on little traffic the best quarter is tried on four times as much. Less than that would not do: few
# requests are never a crowd, and to them all settings look alike.
_KEEP, _KEPT_AT_LEAST = 4, 4
# What the last round simulates: so much work, in so many requests, or if that is few for a crowd, more work and no less
# than so many.
_WORK, _CROWD, MOST_SIMULATED = 20_000, 128, 1_000
_MOST_WORK, _LEAST = 100_000, 100
# Little traffic, however long answers are.
_LEAST_FIRST = 64
# On little traffic every fifth goes first, and the others must keep the targets at this share of the best one's rate.
_FIRST, _FLOOR = 5, 0.5
# Precision of the highest rate, on little traffic and on all.
_COARSE, _FINE = 0.1, 0.03
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
    # A rate at which the targets must be kept for the highest to be of interest.
    floor: float = 0.0
    # Whether to look where company is rare, too.
    rare: bool = False


def num_requests(case: PlanCase[Any, Any]) -> int:
    """Return how many requests a case is decided on: fewer of longer prompts and answers, or of more items."""
    mean = fmean(case.work(request) for request in case.trace)
    crowd = max(min(round(_MOST_WORK / mean), _CROWD), _LEAST)
    return min(max(round(_WORK / mean), crowd), MOST_SIMULATED, len(case.trace))


def num_trials(candidates: Mapping[str, Sequence[Any]]) -> int:
    """Return how many settings both rounds try together."""
    return sum(len(configs) + _num_kept(configs) for configs in candidates.values())


def search(
    case: PlanCase[Any, Any],
    candidates: Mapping[str, Sequence[Any]],
    mapper: Mapper = map,
    on_trial: Callable[[], object] = lambda: None,
) -> dict[str, Trial]:
    """Return the best of each strategy's candidates; `on_trial` is called for each trial.

    Those of strategies of which nothing keeps the targets are left out, and count as done.
    """

    def tried(jobs: Mapping[str, Sequence[_Job]]) -> dict[str, list[Trial]]:
        rates = iter(mapper(_highest, [job for each in jobs.values() for job in each]))
        return {strategy: [_tried(job, rates, on_trial) for job in each] for strategy, each in jobs.items()}

    count = num_requests(case)
    little = min(max(count // _KEEP, _LEAST_FIRST), count)
    ahead = tried(
        {s: [_Job(case, each, little, _COARSE) for each in found[::_FIRST]] for s, found in candidates.items()}
    )
    behind = {}
    for strategy, found in candidates.items():
        floor = _FLOOR * max(each.rate for each in ahead[strategy])
        rest = [config for index, config in enumerate(found) if index % _FIRST]
        behind[strategy] = [_Job(case, each, little, _COARSE, floor) for each in rest]
    first = _ranked(candidates, ahead, tried(behind))
    best = tried({s: [_Job(case, found[0].config, count, _FINE, rare=not found[0].rate)] for s, found in first.items()})
    others = {}
    for strategy, found in first.items():
        kept = _num_kept(found)
        floor = (1 - _ALIKE) * best[strategy][0].rate
        # Where none of them keeps the targets at all, one is enough to show that on more traffic.
        rest = [each.config for each in found[1:kept]] if found[0].rate else []
        others[strategy] = [_Job(case, each, count, _FINE, floor) for each in rest]
        for _ in range(kept - 1 - len(rest)):
            on_trial()
    return {strategy: simplest(found) for strategy, found in _ranked(candidates, best, tried(others)).items()}


def _ranked(
    candidates: Mapping[str, Sequence[Any]], ahead: Mapping[str, list[Trial]], behind: Mapping[str, list[Trial]]
) -> dict[str, list[Trial]]:
    """Of equals those that change least come first, and of these who was tried first: nothing depends on chance."""
    return {
        strategy: sorted(
            [*ahead[strategy], *behind[strategy]], key=lambda each: (-each.rate, len(changed(each.config)))
        )
        for strategy in candidates
    }


def _num_kept(configs: Sequence[Any]) -> int:
    return max(-(-len(configs) // _KEEP), min(len(configs), _KEPT_AT_LEAST))


def _tried(job: _Job, rates: Iterator[float], on_trial: Callable[[], object]) -> Trial:
    trial = Trial(job.config, next(rates))
    on_trial()
    return trial


def _highest(job: _Job) -> float:
    if job.floor and not job.case.keeps(job.config, job.floor, job.requests):
        return 0.0
    return highest_rate(job.case, job.config, job.requests, job.precision, job.rare)


def simplest(trials: Sequence[Trial]) -> Trial:
    """Of the best, which cannot be told apart, the one that leaves most at its default."""
    alike = [each for each in trials if each.rate >= (1 - _ALIKE) * trials[0].rate]
    return min(alike, key=lambda each: len(changed(each.config)))

"""What traffic is like, and what the advice on it has in common for all kinds of models."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

import msgspec
import numpy as np

from chairlift.plan.planner import ServingPlan
from chairlift.plan.trace import TraceRequest, duration

# So many requests at once are as good as one.
ALONE = 1.2
# A gap of more than this share of a trace is no part of its traffic, but a server that was off.
_A_PAUSE = 0.5
# Units of time, from the longest: seconds of one, and its name.
_UNITS = ((86_400, "days"), (3600, "h"), (60, "min"))
# Where fewer are simulated for each that runs at a time, most of them come into a machine that fills or empties.
_A_CROWD = 4


class TrafficFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What traffic is like: `rate` a second, lengths in tokens, and of gaps and answers how much they vary.

    `gap_cv` and `output_cv` are coefficients of variation: 1 for Poisson arrivals and exponential lengths. `shared` is
    the share of prompt tokens that lie in blocks which an earlier prompt had as well. To a model that answers in one
    call a request has `items`, of as many tokens as the inputs say, on average. The share `background` of the requests
    ran in the background, where nobody waits.
    """

    requests: int
    rate: float
    gap_cv: float
    input_mean: float
    input_p95: float
    output_mean: float
    output_p95: float
    output_cv: float
    shared: float
    items: float = 0.0
    background: float = 0.0


def facts_of(trace: Sequence[TraceRequest], rate: float | None = None) -> TrafficFacts:
    """Return what a trace is like, at its own rate or at another."""
    inputs = [request.input_length for request in trace]
    outputs = [max(request.output_length, 1) for request in trace]
    gaps = [later.arrival - sooner.arrival for sooner, later in pairwise(trace)]
    return TrafficFacts(
        requests=len(trace),
        rate=rate or len(trace) / duration(trace),
        gap_cv=_variation(gaps),
        input_mean=fmean(inputs),
        input_p95=float(np.percentile(inputs, 95)),
        output_mean=fmean(outputs),
        output_p95=float(np.percentile(outputs, 95)),
        output_cv=_variation(outputs),
        shared=_shared(trace),
        items=fmean(request.items for request in trace),
        background=fmean(request.background for request in trace),
    )


def rounded(value: float) -> str:
    """Return a number as people read it: three digits, or all that are before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def verdict(plan: ServingPlan, advised: Collection[str], seen: str) -> str:
    """What the simulation says to that; `seen` is what those without company see, in words."""
    rates = ", ".join(f"{each.strategy} {rounded(each.rate)}" for each in plan.strategies)
    said = "keeps the targets" if plan.targets.any else "serves"
    text = f"The simulation {said} up to so many requests a second: {rates}."
    if plan.chosen is None:
        text += f" No rate is within the targets: without company {seen} (p{plan.targets.percentile:g})."
        return f"{text} Ask for less, or take a faster machine or a smaller model."
    if plan.chosen in advised:
        return f"{text} Take {plan.chosen}."
    return f"{text} Here {plan.chosen} is ahead all the same: what it loses weighs less than what it saves. Take it."


def fewness_notes(plan: ServingPlan) -> list[str]:
    """Return what a plan says of itself where it was made on few requests, which is nothing if they were enough."""
    running = plan.best.at.mean_batch if plan.best is not None and plan.best.at is not None else 0.0
    if plan.requests >= _A_CROWD * running:
        return []
    about = f"answers are so long that {plan.requests} requests were simulated, with {rounded(running)} at a time"
    return [f"{about}: the rates here are rough, and a longer run may keep less"]


def pause_notes(trace: Sequence[TraceRequest], instead: str) -> list[str]:
    """Return what is to be said of a trace most of which is one pause, and what to do `instead`; nothing of others."""
    pause = max((later.arrival - sooner.arrival for sooner, later in pairwise(trace)), default=0.0)
    if pause <= _A_PAUSE * duration(trace):
        return []
    return [f"a pause of {_lasting(pause)} counts as traffic, and what comes around it as bursts: plan {instead}"]


def at_once(plan: ServingPlan, facts: TrafficFacts) -> float:
    """Requests under way at a time, if none of them slowed down another, by Little's law."""
    return facts.rate * plan.alone.e2e


def who_waits(facts: TrafficFacts) -> str:
    """Whether somebody waits for each answer, and how requests come."""
    answer = "No, all run in the background" if facts.background == 1 else "Yes"
    return f"Does anybody wait for each answer? {answer}: {_described(facts)}"


def _described(facts: TrafficFacts) -> str:
    """How requests come."""
    text = f"{rounded(facts.rate)} requests come a second, by themselves"
    return f"{text} (their gaps have a coefficient of variation of {facts.gap_cv:.1f}; 1 is Poisson)"


def _lasting(seconds: float) -> str:
    """A time as people say it."""
    size, name = next((unit for unit in _UNITS if seconds >= 2 * unit[0]), (1, "s"))
    return f"{rounded(seconds / size)} {name}"


def _variation(values: Sequence[float]) -> float:
    mean = fmean(values) if values else 0.0
    return pstdev(values) / mean if mean > 0 else 0.0


def _shared(trace: Sequence[TraceRequest]) -> float:
    """The share of prompt tokens in blocks that some earlier prompt of the same tenant had."""
    seen: set[tuple[str, int]] = set()
    shared = total = 0
    for request in trace:
        left = request.input_length
        total += left
        for value in request.hash_ids:
            if (request.tenant, value) in seen:
                shared += min(request.block_size, left)
            seen.add((request.tenant, value))
            left = max(left - request.block_size, 0)
    return shared / total if total else 0.0

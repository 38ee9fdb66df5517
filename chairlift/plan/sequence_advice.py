"""Which strategy suits a language model's traffic, and why: a decision flow in words, with the numbers of the case."""

from collections.abc import Callable, Sequence

import numpy as np

from chairlift.core.sequences.strategy import STRATEGIES, Strategy
from chairlift.plan.advice import ALONE, TrafficFacts, at_once, rounded, verdict, who_waits
from chairlift.plan.planner import ServingPlan, StrategyPlan
from chairlift.plan.trace import TraceRequest

# Answers as short as this on average are one call, whatever they are called; those that vary less than this are alike.
_ONE_SHOT, _ALIKE_CV = 1.5, 0.1
# The batch by which the loss of closed ones is shown.
_BATCH = 8


def longest_of(lengths: Sequence[int], count: int) -> float:
    """Return how long the longest of `count` answers is on average, if they are drawn from these."""
    ordered = np.sort(np.asarray(lengths, dtype=float))
    below = np.arange(len(ordered) + 1) / len(ordered)
    return float((ordered * np.diff(below**count)).sum())


def sequence_decision(plan: ServingPlan, facts: TrafficFacts, trace: Sequence[TraceRequest]) -> list[str]:
    """Return the questions that decide, each with its answer for this case, and what follows from them all."""
    lines = [_waiting(plan, facts), _company(plan, facts), _lengths(facts, trace)]
    advised, rule = _advised(plan, facts)
    lines.append(rule)
    seen = plan.alone
    words = f"the first token takes {rounded(seen.ttft)} s, a further one {rounded(seen.itl)} s"
    lines.append(verdict(plan, advised, f"{words} and the whole {rounded(seen.e2e)} s"))
    return lines


def _waiting(plan: ServingPlan, facts: TrafficFacts) -> str:
    """Whether somebody waits for each answer, and what that means for batches that leave only when they are full."""
    text = f"{who_waits(facts)}."
    patient = _first(plan, lambda strategy: strategy.closes_batch and "max_wait_ms" not in strategy.settings)
    open_one = _first(plan, _is_open)
    if patient is not None:
        size = int(patient.settings.get(STRATEGIES[patient.strategy].slots_setting or "", _BATCH))
        text += f" A full batch of {size} takes {rounded(size / facts.rate)} s to come together,"
        text += f" so {patient.strategy} is for work that is all there at once"
        if open_one is not None:
            text += f": then it answers {rounded(patient.capacity)} a second,"
            text += f" and {open_one.strategy} {rounded(open_one.capacity)}"
        text += "."
    return text


def _company(plan: ServingPlan, facts: TrafficFacts) -> str:
    """How many requests there are at once, by Little's law."""
    several = at_once(plan, facts)
    text = f"Are there several at once? An answer takes up to {rounded(plan.alone.e2e)} s without company"
    text += f" (p{plan.targets.percentile:g}), so at this rate at most {several:.1f} are under way at a time."
    single = _first(plan, lambda strategy: strategy.slots_setting is None)
    if single is not None:
        text += f" One at a time, {rounded(single.capacity)} a second are possible"
        text += "." if single.capacity > facts.rate else ", which is not enough: steps must be shared."
    return text


def _lengths(facts: TrafficFacts, trace: Sequence[TraceRequest]) -> str:
    """Whether answers are of many lengths, and what closed batches lose by it."""
    if facts.output_mean <= _ONE_SHOT:
        return "Do answers have many tokens? No: a batch is over after a step, and nobody holds a slot for longer."
    text = f"Do answers differ in length? They have {rounded(facts.output_mean)} tokens on average, with a"
    text += f" coefficient of variation of {facts.output_cv:.2f}."
    size = _BATCH
    longest = longest_of([max(request.output_length, 1) for request in trace], size)
    text += f" A closed batch of {size} goes on for its longest, {rounded(longest)} tokens on average, so"
    return f"{text} {1 - facts.output_mean / longest:.0%} of its slots are empty over its time."


def _advised(plan: ServingPlan, facts: TrafficFacts) -> tuple[set[str], str]:
    """The strategies that these answers speak for, by their properties, and the rule that says so."""
    names = [each.strategy for each in plan.strategies]
    open_ones = {name for name in names if _is_open(STRATEGIES[name])}
    windows = {name for name in names if STRATEGIES[name].closes_batch and "max_wait_ms" in STRATEGIES[name].settings}
    if at_once(plan, facts) < ALONE:
        return set(names), "So there is hardly anything to batch, and any strategy does that waits for nobody."
    if facts.output_mean <= _ONE_SHOT:
        text = "So batches that leave when the machine is free, or after a short window, lose nothing:"
        return windows | open_ones, f"{text} {_words(windows | open_ones)}."
    if facts.output_cv < _ALIKE_CV:
        text = "So answers of one length end together, and closed batches lose only what they wait to fill:"
        return windows | open_ones, f"{text} {_words(windows | open_ones)}."
    text = "So a slot should go to the next as soon as its answer is done, at any step:"
    return open_ones, f"{text} {_words(open_ones)}."


def _first(plan: ServingPlan, wanted: Callable[[type[Strategy]], bool]) -> StrategyPlan | None:
    return next((each for each in plan.strategies if wanted(STRATEGIES[each.strategy])), None)


def _is_open(strategy: type[Strategy]) -> bool:
    """Whether a free slot is given away while others run."""
    return strategy.slots_setting is not None and not strategy.closes_batch


def _words(names: set[str]) -> str:
    return " or ".join(name for name in STRATEGIES if name in names)

"""A plan as people read it: tables, the reasons in words, and what to copy."""

import json
import shlex
from math import inf
from typing import Any

import msgspec

from chairlift.bench.raw_results import layout
from chairlift.plan.advice import TrafficFacts, rounded
from chairlift.plan.case import Point
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.planner import ServingPlan, StrategyPlan, as_flags
from chairlift.plan.targets import LatencyTargets

_GB = 1e9


class PlanResults(msgspec.Struct, kw_only=True):
    """A plan, and what it was made of and for. `mode` is None where targets were given.

    What was measured had `weight_bytes`, and `kv_bytes` for `kv_tokens`.
    """

    model: str
    machine: str
    mode: str | None
    front: FrontCost
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    facts: TrafficFacts
    plan: ServingPlan
    decision: list[str]


def markdown(results: PlanResults) -> str:
    """Everything, from what was asked to what to copy."""
    plan = results.plan
    parts = [
        _asked(results),
        f"## Highest rate within the targets\n\n{_strategies(plan)}",
        "## Which strategy, and why\n\n" + "\n".join(f"{n}. {line}" for n, line in enumerate(results.decision, 1)),
    ]
    if (best := plan.best) is not None:
        parts += [
            f"## Throughput against latency: {best.strategy}\n\n{_curve(best, plan.targets)}",
            f"## Machines and memory\n\n{_machines(results, best)}",
            f"## To copy\n\n{_to_copy(results.model, best)}",
        ]
    return "\n\n".join(parts)


def _asked(results: PlanResults) -> str:
    facts, plan = results.facts, results.plan
    lines = [
        f"# A plan for {results.model}",
        "",
        f"- machine: {results.machine}; {_front(results.front)}",
        f"- traffic: {facts.requests} requests, {rounded(facts.rate)} a second; prompts of {facts.input_mean:.0f}"
        f" tokens (p95 {facts.input_p95:.0f}), answers of {facts.output_mean:.0f} (p95 {facts.output_p95:.0f});"
        f" {facts.shared:.0%} of the prompts' tokens begin like an earlier prompt",
        f"- targets: {_targets(plan.targets)}" + (f" (mode {results.mode})" if results.mode else ""),
        f"- simulated: {plan.requests} requests at each rate",
    ]
    return "\n".join(lines)


def _front(front: FrontCost) -> str:
    if front == FrontCost():
        return "the HTTP front was not measured, and counts as free"
    return f"the HTTP front takes {1e3 * front.request:.2f} ms a request and {1e6 * front.output_token:.0f} us a token"


def _targets(targets: LatencyTargets) -> str:
    named = {"TTFT": targets.ttft, "ITL": targets.itl, "E2E": targets.e2e}
    said = [f"{name} within {rounded(1000 * value)} ms" for name, value in named.items() if value < inf]
    return f"{', '.join(said)}, for {targets.percentile:g}%" if said else "none"


def _strategies(plan: ServingPlan) -> str:
    """A row for each strategy: what it reaches with its best settings, and what keeps it from more."""
    title = f"p{plan.targets.percentile:g} ms"
    head = ["strategy", "req/s", "tok/s", f"TTFT {title}", f"ITL {title}", f"E2E {title}", "mean batch", "limited by"]
    rows = [[*head, "settings"]]
    for each in plan.strategies:
        mark = f"**{each.strategy}**" if each.strategy == plan.chosen else each.strategy
        settings = " ".join(as_flags(each.settings)) or "the defaults"
        rows.append([mark, rounded(each.rate), *_figures(each.at), each.limit.by, f"`{settings}`"])
    why = "\n".join(f"- {each.strategy}: {each.limit.why}" for each in plan.strategies)
    return f"{layout(rows)}\n\nWhat keeps each from more:\n\n{why}"


def _figures(point: Point | None) -> list[str]:
    """Tokens a second, three latencies, and the mean batch."""
    if point is None:
        return ["-"] * 5
    felt = point.latencies
    times = (_milliseconds(value) for value in (felt.ttft, felt.itl, felt.e2e))
    return [f"{point.output_tokens:.0f}", *times, f"{point.mean_batch:.1f}"]


def _milliseconds(seconds: float) -> str:
    return "never" if seconds == inf else f"{1000 * seconds:.0f}"


def _curve(best: StrategyPlan, targets: LatencyTargets) -> str:
    """The chosen strategy at rates from a tenth of what it can do to more than that."""
    title = f"p{targets.percentile:g} ms"
    head = ["req/s", "answered/s", "tok/s", f"TTFT {title}", f"ITL {title}", f"E2E {title}", "mean batch", "busy", ""]
    rows = [head]
    for index, point in enumerate(best.curve):
        notes = ["knee"] if index == best.knee else []
        if point.missed:
            notes.append(f"misses {', '.join(name.upper() for name in point.missed)}")
        about = [rounded(point.rate), rounded(point.throughput), *_figures(point), f"{point.busy:.0%}"]
        rows.append([*about, "; ".join(notes)])
    return (
        f"{layout(rows)}\n\nAt the knee there is most throughput for the latency; beyond it latency grows faster than"
        " throughput."
    )


def _machines(results: PlanResults, best: StrategyPlan) -> str:
    """How many machines, how busy they are, and what memory the settings take."""
    plan, lines = results.plan, []
    replicas, title = plan.replicas, f"p{plan.targets.percentile:g}"
    if replicas is not None and replicas.at is not None:
        machines = "1 machine" if replicas.count == 1 else f"{replicas.count} machines"
        figures = zip((f"TTFT {title}", f"ITL {title}", f"E2E {title}"), _figures(replicas.at)[1:4], strict=True)
        felt = ", ".join(f"{name} {value} ms" for name, value in figures)
        lines.append(
            f"- {rounded(replicas.rate)} requests a second take {machines} like this one, busy {replicas.at.busy:.0%}"
            f" of the time: {felt}"
        )
    elif replicas is not None:
        lines.append(f"- {rounded(replicas.rate)} requests a second: no number of machines tried keeps the targets")
    if results.kv_bytes and best.at is not None:
        held = best.at.kv_tokens * results.kv_bytes / results.kv_tokens / _GB
        lines.append(
            f"- memory: {results.weight_bytes / _GB:.2f} GB of weights; at the highest rate up to"
            f" {best.at.kv_tokens} tokens are held in the KV cache, {held:.2f} GB or {best.at.kv:.0%} of what there is"
        )
    return "\n".join(lines)


def _to_copy(model: str, best: StrategyPlan) -> str:
    """The same settings as a command and as a file."""
    command = " ".join(["chairlift serve", shlex.quote(model), *as_flags(best.settings)])
    table = "\n".join(f"{name} = {_toml(value)}" for name, value in {"model": model, **best.settings}.items())
    return f"```\n{command}\n```\n\n```toml\n{table}\n```"


def _toml(value: Any) -> str:
    """A word, a number or a truth, as TOML has it, which for these is as JSON has it."""
    return json.dumps(value)

"""A plan as people read it: tables, the reasons in words, and what to copy."""

import shlex
from math import inf
from typing import Any, Literal

import msgspec

from chairlift.bench.raw_results import layout
from chairlift.plan.advice import TrafficFacts, rounded
from chairlift.plan.as_copied import as_flags, as_toml
from chairlift.plan.case import Point
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.planner import ServingPlan, StrategyPlan
from chairlift.plan.targets import LatencyTargets

_GB = 1e9


class PlanResults(msgspec.Struct, kw_only=True):
    """A plan, and what it was made of and for. `mode` is None where targets were given.

    What was measured had `weight_bytes`, and a language model `kv_bytes` for `kv_tokens`, any other `process_bytes` for
    each instance. `notes` say how far that can be trusted. `given` are settings that go with any plan.
    """

    title: str
    model: str
    kind: Literal["sequences", "items"]
    machine: str
    mode: str | None
    front: FrontCost
    weight_bytes: int
    kv_bytes: int = 0
    kv_tokens: int = 0
    process_bytes: int = 0
    notes: list[str] = []
    given: dict[str, Any] = {}
    facts: TrafficFacts
    plan: ServingPlan
    decision: list[str]


def markdown(results: PlanResults) -> str:
    """Everything, from what was asked to what to copy."""
    plan = results.plan
    parts = [
        _asked(results),
        f"## Highest rate within the targets\n\n{_strategies(results)}",
        "## Which strategy, and why\n\n" + "\n".join(f"{n}. {line}" for n, line in enumerate(results.decision, 1)),
    ]
    if (best := plan.best) is not None:
        parts += [
            f"## Throughput against latency: {best.strategy}\n\n{_curve(results, best)}",
            f"## Machines and memory\n\n{_machines(results, best)}",
            f"## To copy\n\n{_to_copy(results, best)}",
        ]
    return "\n\n".join(parts)


def _asked(results: PlanResults) -> str:
    facts, plan = results.facts, results.plan
    lines = [
        f"# A plan for {results.title}",
        "",
        f"- machine: {results.machine}; {_front(results.front)}",
        f"- traffic: {facts.requests} requests, {rounded(facts.rate)} a second; {_lengths(results)}",
        f"- targets: {_targets(plan.targets)}" + (f" (mode {results.mode})" if results.mode else ""),
        f"- simulated: {plan.requests} requests at each rate",
        *(f"- {note}" for note in results.notes),
    ]
    return "\n".join(lines)


def _lengths(results: PlanResults) -> str:
    facts = results.facts
    if results.kind == "items":
        size = f" of {facts.input_mean:.0f} tokens (p95 {facts.input_p95:.0f})" if facts.input_mean > 1 else ""
        return f"{rounded(facts.items)} items{size} in each on average"
    return (
        f"prompts of {facts.input_mean:.0f} tokens (p95 {facts.input_p95:.0f}), answers of {facts.output_mean:.0f}"
        f" (p95 {facts.output_p95:.0f}); {facts.shared:.0%} of the prompts' tokens begin like an earlier prompt"
    )


def _front(front: FrontCost) -> str:
    if front == FrontCost():
        return "the HTTP front was not measured, and counts as free"
    each = f"{1e6 * front.item:.0f} us an item" if front.item else f"{1e6 * front.output_token:.0f} us a token"
    return f"the HTTP front takes {1e3 * front.request:.2f} ms a request and {each}"


def _targets(targets: LatencyTargets) -> str:
    named = {"TTFT": targets.ttft, "ITL": targets.itl, "E2E": targets.e2e}
    said = [f"{name} within {rounded(1000 * value)} ms" for name, value in named.items() if value < inf]
    return f"{', '.join(said)}, for {targets.percentile:g}% of the requests" if said else "none"


def _strategies(results: PlanResults) -> str:
    """A row for each strategy: what it reaches with its best settings, and what keeps it from more."""
    plan = results.plan
    rows = [["strategy", "req/s", *_titles(results), "limited by", "settings"]]
    for each in plan.strategies:
        mark = f"**{each.strategy}**" if each.strategy == plan.chosen else each.strategy
        settings = shlex.join(as_flags(each.settings)) or "the defaults"
        rows.append([mark, rounded(each.rate), *_figures(results, each.at), each.limit.by, f"`{settings}`"])
    why = "\n".join(f"- {each.strategy}: {each.limit.why}" for each in plan.strategies)
    return f"{layout(rows)}\n\nWhat keeps each from more:\n\n{why}"


def _titles(results: PlanResults) -> list[str]:
    """Of what `_figures` gives."""
    title = f"p{results.plan.targets.percentile:g} ms"
    if results.kind == "items":
        return ["items/s", f"latency {title}", "mean batch"]
    return ["tok/s", f"TTFT {title}", f"ITL {title}", f"E2E {title}", "mean batch"]


def _figures(results: PlanResults, point: Point | None) -> list[str]:
    """Tokens, or items, a second, the latencies, and the mean batch."""
    if point is None:
        return ["-"] * len(_titles(results))
    felt, batch = point.latencies, f"{point.mean_batch:.1f}"
    if results.kind == "items":
        return [rounded(point.items), _milliseconds(felt.e2e), batch]
    return [f"{point.output_tokens:.0f}", *map(_milliseconds, (felt.ttft, felt.itl, felt.e2e)), batch]


def _milliseconds(seconds: float) -> str:
    return "never" if seconds == inf else f"{1000 * seconds:.0f}"


def _curve(results: PlanResults, best: StrategyPlan) -> str:
    """The chosen strategy at rates from a tenth of what it can do to more than that."""
    rows = [["req/s", "answered/s", *_titles(results), "busy", ""]]
    for index, point in enumerate(best.curve):
        notes = ["knee"] if index == best.knee else []
        if point.missed:
            notes.append(f"misses {', '.join(name.upper() for name in point.missed)}")
        about = [rounded(point.rate), rounded(point.throughput), *_figures(results, point), f"{point.busy:.0%}"]
        rows.append([*about, "; ".join(notes)])
    return (
        f"{layout(rows)}\n\nAt the knee there is most throughput for the latency; beyond it latency grows faster than"
        " throughput."
    )


def _machines(results: PlanResults, best: StrategyPlan) -> str:
    """How many machines, how busy they are, and what memory the settings take."""
    plan, lines = results.plan, []
    replicas = plan.replicas
    if replicas is not None and replicas.at is not None:
        machines = "1 machine" if replicas.count == 1 else f"{replicas.count} machines"
        times = zip(_titles(results)[1:-1], _figures(results, replicas.at)[1:-1], strict=True)
        felt = ", ".join(f"{name.removesuffix(' ms')} {value} ms" for name, value in times)
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
    if results.process_bytes:
        count = best.settings.get("instances", 1)
        workers = "its worker takes" if count == 1 else f"each of {count} workers takes"
        lines.append(
            f"- memory: {workers} up to {results.process_bytes / _GB:.2f} GB, of which"
            f" {results.weight_bytes / _GB:.2f} GB are weights; {count * results.process_bytes / _GB:.2f} GB in all"
        )
    return "\n".join(lines)


def _to_copy(results: PlanResults, best: StrategyPlan) -> str:
    """The same settings as a command and as a file."""
    settings = results.given | best.settings
    command = shlex.join(["chairlift", "serve", results.model, *as_flags(settings)])
    table = as_toml({"model": results.model, **settings})
    served = results.title != results.model
    where = f"\n\nA server does not tell where its models are: {results.model} stands for that." if served else ""
    return f"```\n{command}\n```\n\n```toml\n{table}\n```{where}"

"""Whether `chairlift plan` names the best settings: python benchmarks/plan_sweep.py MODEL_DIR --out FILE
[--traffics NAME ...] [--brisk TTFT_MS ITL_MS] [--patient TTFT_MS ITL_MS] [--shares SHARE ...] [--only SETTINGS ...]

For each traffic and target `chairlift plan` is run as anybody runs it, and timed; the first of them measures the model,
and saves that for the others. Then a server with each of the `grid`'s settings, and one with each plan's, meets the
same traffic at shares of the rates that the plans promise. A setting's goodput is the most requests a second that were
inside the target at any of these rates: the first token in time, and 95% of its own gaps. What a plan promises is told
too: that 95% of the requests keep the one, and as many the other.
Settings that at the lowest rate reach less than half of the best plan's goodput are spared the others. What is best of
so many noisy runs is best by luck too, so the plans and the best few are measured again in more rounds, in turn, longer
if asked, and only these decide. At the end the simulator meets the same requests with each of the settings: how many
pairs of them it puts in the order in which they really are.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from engines import SERVED_NAME
from fidelity import at_load, settings_of, simulated, use_memory
from server_process import free_port, running
from tqdm import tqdm

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import Slo, ttft
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.bench.raw_results import spread as spread_of
from chairlift.bench.replay import PromptMaker, replay
from chairlift.config.sequences import SequenceConfig
from chairlift.plan.as_copied import as_flags
from chairlift.plan.case import changed
from chairlift.plan.machine_profile import MachineProfile, SequenceProfile
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.sequence_case import SequenceCase
from chairlift.plan.simulated_run import within
from chairlift.plan.trace import TraceRequest, fitted
from chairlift.plan.trace_files import write_trace
from chairlift.plan.traffic import Traffic, synthetic

TRAFFICS = {
    "chat": Traffic(arrivals="poisson:10", input_length="uniform:16:384", output_length="exponential:64"),
    "long prompts": Traffic(arrivals="poisson:10", input_length="uniform:400:1000", output_length="exponential:24"),
    "bursts": Traffic(arrivals="gamma:10:3", input_length="lognormal:80:300", output_length="lognormal:40:120"),
}
# What a target is called, and milliseconds to the first token and between two, unless other ones are asked for.
TARGETS = {"brisk": Slo(600.0, 50.0), "patient": Slo(2000.0, 120.0)}
# Of the rate that a plan promises, unless other ones are asked for: that itself, and more than it should hold, so that
# settings which hold more are seen.
SHARES = (1.0, 1.15, 1.3)
# Those of results from before they were saved.
UNSAVED_SHARES = (0.9, 1.1)
# Rates so near to each other are one.
_NEAR = 0.06
NAMES = (
    Column("traffic", "traffic", "{}"),
    Column("target", "target", "{}"),
    Column("settings", "settings", "{}"),
)
COLUMNS = (Column("goodput", "inside the target/s", "{:.2f}"),)
_WARM_UP = 8
# Of KV memory, which the prompts of `use_memory` fill for a model of 135m.
_KV_GB = 0.5
# By how much of the larger, more than noise, two goodputs differ that have an order.
_APART = 0.15
# Of the gaps between tokens, as `chairlift plan` has it.
_PERCENTILE = 0.95
_NEVER_MS = 3.6e6


class Reached(NamedTuple):
    """At each rate: for each target the requests a second inside it, and the milliseconds that 95% of the requests keep
    to the first token, and for 95% of their own gaps, which is what a plan promises."""

    inside: dict[str, list[float]]
    p95: list[tuple[float, float]]


class Job(NamedTuple):
    """A server to measure: what its settings are called, and its flags."""

    name: str
    flags: tuple[str, ...]


def main() -> None:
    args = _parser().parse_args()
    TARGETS.update({name: Slo(*vars(args)[name]) for name in TARGETS})
    recording = Recording(start("plan_sweep", vars(args), args.model), args.out)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        for traffic in args.traffics:
            trace = fitted(synthetic(TRAFFICS[traffic], args.trace_seconds), args.max_model_len)
            path = Path(folder) / "trace.jsonl"
            write_trace(path, trace)
            plans = {target: plan_of(args, profile, traffic, path, target, recording) for target in TARGETS}
            sweep(args, traffic, trace, plans, recording, profile)
    print(markdown(recording.results))


def plan_of(
    args: argparse.Namespace, profile: Path, traffic: str, trace: Path, target: str, recording: Recording
) -> dict[str, Any]:
    """The strategy that a plan chooses, with its settings and rate."""
    slo, out = TARGETS[target], profile.with_name("plan.json")
    command = [sys.executable, "-m", "chairlift.cli", "plan", args.model, "--profile", str(profile)]
    command += ["--trace", str(trace), "--target-ttft-ms", f"{slo.ttft_ms:g}", "--target-itl-ms", f"{slo.tpot_ms:g}"]
    command += [*_common(args), "--measure-seconds", f"{args.measure_seconds:g}", "--out", str(out)]
    measures = not profile.exists()
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    plan = json.loads(out.read_text())["plan"]
    chosen = next((each for each in plan["strategies"] if each["strategy"] == plan["chosen"]), None)
    if chosen is None:
        raise SystemExit(f"no setting keeps the target {target!r}: choose others")
    kept = {name: chosen[name] for name in ("strategy", "settings", "rate")} | {
        "target": target,
        "seconds": seconds,
        "measures": measures,
    }
    recording.results.setdefault("plans", []).append({**kept, "traffic": traffic})
    return kept


def sweep(
    args: argparse.Namespace,
    traffic: str,
    trace: Sequence[TraceRequest],
    plans: dict[str, dict[str, Any]],
    recording: Recording,
    profile: Path,
) -> None:
    """Measure the plans and the whole grid once, then the plans and the best again."""
    own = [Job(plan_name(target), tuple(as_flags(plan["settings"]))) for target, plan in plans.items()]
    rates = merged(share * plan["rate"] for plan in plans.values() for share in args.shares)
    jobs = [*own, *(named(grid(args.model), args.only) if args.only else spread(grid(args.model), args.most))]
    reached: dict[str, dict[str, float]] = {}
    least = dict.fromkeys(TARGETS, 0.0)
    with tqdm(total=len(jobs) + args.rounds * (len(own) + args.best * len(TARGETS)), desc=traffic) as bar:
        for job in jobs:
            found = goodputs(args, job, trace, rates, least if job not in own else None, args.seconds, 1)
            _add(recording, traffic, job, "once", 1, found)
            reached[job.name] = {target: max(values) for target, values in found.inside.items()}
            if job in own:
                for target in TARGETS:
                    least[target] = max(least[target], 0.5 * found.inside[target][0])
            bar.update()
        final = finalists(own, jobs, reached, args.best) if args.rounds else []
        bar.total = len(jobs) + args.rounds * len(final)
        for number in range(1, args.rounds + 1):
            for job in final if number % 2 else final[::-1]:
                found = goodputs(args, job, trace, rates, None, args.again_seconds or args.seconds, number + 1)
                _add(recording, traffic, job, "again", number, found)
                bar.update()
    for job in tqdm(jobs, desc=f"{traffic}, simulated"):
        count = max(len(run["at_each_rate"]) for run in recording.results["runs"] if _is_of(run, traffic, job, "once"))
        _add(recording, traffic, job, "simulated", 1, foretold(args, job, trace, rates[:count], profile))


def foretold(
    args: argparse.Namespace, job: Job, trace: Sequence[TraceRequest], rates: Sequence[float], profile: Path
) -> Reached:
    """What `goodputs` would be by the simulator."""
    machine = MachineProfile.load(profile)
    (model,) = machine.models.values()
    assert isinstance(model, SequenceProfile)
    config = settings_of(args.model, [*_common(args), *job.flags])
    simulable = SequenceCase(model, tuple(trace), front=machine.front).model(config)
    found = Reached({target: [] for target in TARGETS}, [])
    for rate in rates:
        sent = at_load(trace, rate, args.seconds)
        note(found, simulated(simulable, machine.front, sent, args.drain).outcomes, args.seconds)
    return found


def _is_of(run: dict[str, Any], traffic: str, job: Job, stage: str) -> bool:
    return (run["traffic"], run["settings"], run["stage"]) == (traffic, job.name, stage)


def plan_name(target: str) -> str:
    """What a plan's settings are called in the table."""
    return f"planned for {target}"


def merged(rates: Any) -> list[float]:
    """Rates in order, those that are near to one left out."""
    kept: list[float] = []
    for rate in sorted(rates):
        if not kept or rate > (1 + _NEAR) * kept[-1]:
            kept.append(rate)
    return kept


def grid(model: str) -> list[Job]:
    """Settings of all strategies, over 40 of them."""
    base = SequenceConfig(model=model)
    configs = [
        with_strategy(base, "continuous", slots, max_num_batched_tokens=tokens)
        for slots in (4, 8, 16, 32, 64, 128)
        for tokens in (128, 256, 512, 2048)
    ]
    configs += [
        with_strategy(base, "continuous", slots, max_num_batched_tokens=2048, target_itl_ms=itl)
        for slots in (32, 64, 128)
        for itl in (30.0, 60.0, 100.0)
    ]
    configs += [
        with_strategy(base, "dynamic", slots, max_wait_ms=wait) for slots in (8, 16, 32) for wait in (0.0, 100.0)
    ]
    configs += [with_strategy(base, "static", slots) for slots in (4, 8, 16, 32)]
    configs.append(with_strategy(base, "none", 1))
    flags = [tuple(as_flags(changed(config))) for config in configs]
    return [Job(" ".join(each).replace("--", "") or "defaults", each) for each in dict.fromkeys(flags)]


def named(jobs: list[Job], names: Sequence[str]) -> list[Job]:
    """Those of them that are called so."""
    known = {job.name: job for job in jobs}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no settings of the grid are called {unknown[0]!r}; there are: {'; '.join(known)}")
    return [known[name] for name in names]


def spread(jobs: list[Job], most: int | None) -> list[Job]:
    """So many of them, evenly from the first to the last; all, if it is not said how many."""
    if most is None or most >= len(jobs):
        return jobs
    return [jobs[round(place * (len(jobs) - 1) / (most - 1))] for place in range(most)]


def goodputs(
    args: argparse.Namespace,
    job: Job,
    trace: Sequence[TraceRequest],
    rates: Sequence[float],
    least: dict[str, float] | None,
    seconds: float,
    number: int,
) -> Reached:
    """What a server reaches at each rate.

    With `least` the first rate is the last where it brings less than that for all targets. The prompts are those of
    round `number`, others at each rate.
    """
    found = Reached({target: [] for target in TARGETS}, [])
    with _serving(args, job.flags) as target:
        _warm_up(args, target, trace)
        for rate in rates:
            sent = at_load(trace, rate, seconds)
            prompts = PromptMaker(args.vocab, f"{number} {rate:g}")
            load = replay(target, sent, "completions", prompts, args.drain)
            note(found, load.outcomes, seconds)
            if least is not None and all(found.inside[name][0] < least[name] for name in TARGETS):
                break
    return found


def note(found: Reached, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Add what was reached at a rate. Whoever was not answered waits for ever."""
    for name, slo in TARGETS.items():
        found.inside[name].append(sum(kept(each, slo) for each in outcomes) / seconds)
    firsts = [ttft(each) * 1000 if each.error is None else inf for each in outcomes]
    gaps = [_at_95(_gaps_ms(each)) for each in outcomes if each.error is None and len(each.times) > 1]
    found.p95.append((_at_95(firsts), _at_95(gaps)))


def _at_95(samples: Sequence[float]) -> float:
    """What 95% are within, at most an hour; 0 of none."""
    return min(within(samples, 100 * _PERCENTILE), _NEVER_MS)


def _gaps_ms(outcome: Outcome) -> list[float]:
    return [1000 * (after - before) for before, after in pairwise(outcome.times)]


def _warm_up(args: argparse.Namespace, target: Target, trace: Sequence[TraceRequest]) -> None:
    """Have a new server answer a few, and use all of its KV memory once."""
    prompts = PromptMaker(args.vocab, "warm-up")
    replay(target, at_load(trace, 4.0, _WARM_UP / 4.0), "completions", prompts, 60.0)
    use_memory(target, args.vocab)


def kept(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request was answered in time: the first token, and nearly all gaps."""
    if outcome.error is not None or ttft(outcome) * 1000 >= slo.ttft_ms:
        return False
    gaps = _gaps_ms(outcome)
    return sum(gap < slo.tpot_ms for gap in gaps) >= _PERCENTILE * len(gaps)


def finalists(own: Sequence[Job], jobs: Sequence[Job], reached: dict[str, dict[str, float]], best: int) -> list[Job]:
    """The plans, and for each target the best of the others."""
    others = [job for job in jobs if job not in own]
    kept = list(own)
    for target in TARGETS:
        ranked = sorted(others, key=lambda job: -reached[job.name][target])
        kept += [job for job in ranked[:best] if job not in kept]
    return kept


def _add(recording: Recording, traffic: str, job: Job, stage: str, number: int, found: Reached) -> None:
    for target, values in found.inside.items():
        about = {"traffic": traffic, "target": target, "settings": job.name, "stage": stage, "round": number}
        recording.add({**about, "goodput": max(values), "at_each_rate": values, "p95_at_each_rate": found.p95})


def _common(args: argparse.Namespace) -> list[str]:
    return ["--dtype", "bfloat16", "--max-model-len", str(args.max_model_len), "--kv-cache-gb", f"{_KV_GB:g}"]


@contextmanager
def _serving(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[Target]:
    """A server with these flags, whose tuner leaves them as they are, until the end of the block."""
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
    command += ["--port", str(port), "--data-dir", "", *_common(args), *flags]
    if "--target-itl-ms" in flags:
        command.append("--no-auto")
    with running(command, port, "/health/ready", {"PYTHONPATH": str(Path(__file__).parents[1])}):
        yield Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))


def markdown(results: Results) -> str:
    """The plans, how they stand to the best of the sweep, and all that was measured again, which decides."""
    said = [*_ratios(results), *_orders(results)]
    again = [run for run in results["runs"] if run["stage"] == "again"]
    count = len({run["settings"] for run in results["runs"]})
    lines = [f"{caption(results)}; {_targets(results['settings'])}:", "\n".join(said)]
    longer = results["settings"].get("again_seconds")
    head = f"Those of {count} settings that were measured again{f', {longer:g} s at each rate' if longer else ''}:"
    lines += [head, table(again, NAMES, COLUMNS)] if again else []
    return "\n\n".join(lines)


def _targets(settings: dict[str, Any]) -> str:
    slos = {name: Slo(*settings.get(name, astuple(slo))) for name, slo in TARGETS.items()}
    return ", ".join(
        f"{name}: first token in {slo.ttft_ms:g} ms and {slo.tpot_ms:g} ms a token" for name, slo in slos.items()
    )


def _ratios(results: Results) -> list[str]:
    """A line for each traffic and target: the plan's goodput over the best one's, medians of the later rounds."""
    lines = []
    seen: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in results["runs"]:
        if run["stage"] == "again":
            seen.setdefault((run["traffic"], run["target"]), {}).setdefault(run["settings"], []).append(run["goodput"])
    for (traffic, target), reached in seen.items():
        medians = {name: statistics.median(values) for name, values in reached.items()}
        best = max(medians, key=lambda name: medians[name])
        planned = medians[plan_name(target)]
        share = planned / medians[best]
        lines.append(f"- {traffic}, {target}: planned {planned:.2f}/s, {share:.2f} of the best ({best})")
        of_this = [plan for plan in results["plans"] if plan.get("traffic", traffic) == traffic]
        for plan in of_this:
            if plan.get("target") == target:
                lines.append(
                    f"  (the plan says {plan['rate']:.2f}/s; {_at_the_promised(results, traffic, plan, of_this)})"
                )
    for measures, how in ((True, "measuring included"), (False, "from a measured profile")):
        seconds = [each["seconds"] for each in results.get("plans", []) if each.get("measures", False) == measures]
        if seconds:
            lines.append(f"- a plan took {min(seconds):.0f} to {max(seconds):.0f} s, {how}")
    return lines


def _at_the_promised(results: Results, traffic: str, plan: dict[str, Any], plans: Sequence[dict[str, Any]]) -> str:
    """How many were inside the target at the measured rate that is next to the promised one, median of rounds."""
    settings, target = results["settings"], plan["target"]
    rates = merged(share * each["rate"] for each in plans for share in settings.get("shares", UNSAVED_SHARES))
    place = min(range(len(rates)), key=lambda index: abs(rates[index] / plan["rate"] - 1))
    seconds = settings.get("again_seconds") or settings["seconds"]
    offered = max(round(rates[place] * seconds), 2) / seconds
    own = [
        run
        for run in results["runs"]
        if (run["traffic"], run["target"], run["settings"]) == (traffic, target, plan_name(target))
        and run["stage"] == "again"
    ]
    inside = [100 * run["at_each_rate"][place] / offered for run in own]
    # Rates so near to each other were measured once.
    near = abs(rates[place] / plan["rate"] - 1) <= _NEAR
    where = "at the promised rate" if near else f"at {rates[place]:.2f}/s, the nearest measured"
    said = f"{where}: {spread_of(inside, '{:.0f}%')} inside"
    if not all("p95_at_each_rate" in run for run in own):
        return said
    firsts, gaps = zip(*(run["p95_at_each_rate"][place] for run in own), strict=True)
    return (
        f"{said}; 95% of the requests have the first token in {spread_of(firsts, '{:.0f}')} ms, "
        f"and 95% of their gaps in {spread_of(gaps, '{:.0f}')} ms"
    )


def _orders(results: Results) -> list[str]:
    """A line for each traffic and target: how many pairs of settings the simulator puts in their real order."""
    real: dict[tuple[str, str], dict[str, float]] = {}
    foreseen: dict[tuple[str, str], dict[str, float]] = {}
    for run in results["runs"]:
        kinds = {"once": real, "simulated": foreseen}
        if run["stage"] in kinds:
            kinds[run["stage"]].setdefault((run["traffic"], run["target"]), {})[run["settings"]] = run["goodput"]
    lines = []
    for (traffic, target), found in real.items():
        said = foreseen.get((traffic, target), {})
        pairs = [pair for pair in combinations(found, 2) if {*pair} <= said.keys()]
        ordered = [sorted(pair, key=found.__getitem__) for pair in pairs]
        apart = [(low, high) for low, high in ordered if _differ(found[low], found[high])]
        right = sum(said[low] < said[high] for low, high in apart)
        if apart:
            lines.append(f"- {traffic}, {target}: {right} of {len(apart)} pairs over {_APART:.0%} apart in their order")
    return lines


def _differ(low: float, high: float) -> bool:
    return high - low > _APART * high


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--traffics", nargs="+", choices=list(TRAFFICS), default=list(TRAFFICS))
    for name, slo in TARGETS.items():
        parser.add_argument(f"--{name}", nargs=2, type=float, default=astuple(slo), metavar=("TTFT_MS", "ITL_MS"))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the rates that the plans promise")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long requests come at each rate")
    parser.add_argument("--again-seconds", type=float, help="of those that are measured again (default: the same)")
    parser.add_argument("--drain", type=float, default=5.0)
    parser.add_argument("--best", type=int, default=3, help="how many of the grid are measured again, for each target")
    parser.add_argument("--rounds", type=int, default=3, help="of those that are measured again; 0: none are")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--only", nargs="+", metavar="SETTINGS", help="of the grid, as a table calls them")
    part.add_argument("--most", type=int, help="settings of the grid, spread evenly (default: all)")
    parser.add_argument("--trace-seconds", type=float, default=200.0, help="of made-up traffic that a plan sees")
    parser.add_argument("--measure-seconds", type=float, default=40.0)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=2000, help="prompts use the token ids below")
    parser.add_argument("--extra", default='{"logit_bias": {"1000": 100}}', metavar="JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()

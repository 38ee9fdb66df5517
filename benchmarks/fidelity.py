"""How true the simulator is: a real server meets a trace, and the simulated one beside it does.

    python benchmarks/fidelity.py MODEL_DIR [--trace FILE] [--loads 0.5 0.85 0.95 1.1] [--rounds 3] [--out FILE]
        [--again] [-- SETTINGS]

In each round first the model is measured for `--measure-seconds`, as `chairlift plan` does. Then the real server is
started with SETTINGS, flags of `chairlift serve`, and its KV memory used once, as that of one which has been up for a
while is (docs/decisions/028-kv-memory-ahead.md); nothing is sent for `--quiet-seconds`. Capacity is what the simulator
says it is, and each of the `--loads` is a share of it. After each load the model is measured anew:
the next load is simulated by that, and the same load once more, as no simulator can be truer than what it was told, and
a shared machine may be another two minutes later. After each load, too, the server is asked for a forecast of its last
two minutes as they were: the same simulator, told of the very steps that it is held against; its error is from what the
server saw. And it is asked for the traffic of these minutes, by whose steps the next load is simulated: that is what
`chairlift plan URL` plans with. With `--again` every load is sent twice to the server: how far the second time is off
the first is what nobody could have foretold. The real run is that of `chairlift bench serve`; both are summed up by the
same code. With random weights some tokens are no text, so every request's `--extra` fields make all tokens one that is;
they are drawn at a temperature, as those that were measured.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from engines import SERVED_NAME
from server_process import free_port, running
from tqdm import tqdm

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import Slo, figures
from chairlift.bench.load import Load, closed_loop
from chairlift.bench.raw_results import Column, Recording, Results, caption, machine_in_words, start, table
from chairlift.bench.replay import PromptMaker, replay
from chairlift.config.flags import add_flags
from chairlift.config.sequences import SequenceConfig
from chairlift.plan.machine_profile import FrontCost, MachineProfile, SequenceProfile
from chairlift.plan.sequence_case import SequenceCase
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest, duration, fitted, scaled
from chairlift.plan.trace_files import read_trace
from chairlift.plan.traffic import Traffic, synthetic
from chairlift.planning.measure_sequences import measure_sequences
from chairlift.planning.running_server import RunningServer
from chairlift.planning.served_traffic import ServedTraffic, served_traffic

NAMES = (Column("trace", "trace", "{}"), Column("load", "load", "{:.0%}"), Column("figure", "figure", "{}"))
COLUMNS = (
    Column("real", "real", "{:.1f}"),
    Column("simulated", "simulated", "{:.1f}"),
    Column("error_percent", "error", "{:+.1f}%"),
    Column("after", "as measured after", "{:.1f}"),
    Column("after_percent", "error", "{:+.1f}%"),
    Column("lower", "by the steps of the load before", "{:.1f}"),
    Column("lower_percent", "error", "{:+.1f}%"),
    Column("own", "by its own steps", "{:.1f}"),
    Column("own_percent", "error", "{:+.1f}%"),
    Column("again", "real again", "{:.1f}"),
    Column("again_percent", "off the first", "{:+.1f}%"),
)
FIGURES = {
    "tok/s": "output_tok_s",
    "TTFT p50 ms": "ttft_ms.p50",
    "TTFT p95 ms": "ttft_ms.p95",
    "ITL p50 ms": "itl_ms.p50",
    "ITL p95 ms": "itl_ms.p95",
    "E2E p50 ms": "e2e_ms.p50",
    "E2E p99 ms": "e2e_ms.p99",
}
# The same in a forecast: their names, the place in a spread, and how many of its unit are one of ours.
FORECAST = {
    "tok/s": ("outputs_per_s", None, 1.0),
    "TTFT p50 ms": ("ttft", 0, 1e3),
    "TTFT p95 ms": ("ttft", 1, 1e3),
    "ITL p50 ms": ("itl", 0, 1e3),
    "ITL p95 ms": ("itl", 1, 1e3),
    "E2E p50 ms": ("latency", 0, 1e3),
}
NO_TARGET = Slo(1e9, 1e9)
# By how many percent figures may be off before a table calls them outside; at 95% load a wait grows much faster than
# what it waits for. Others have no limit.
LIMITS = {"throughput": 3.0, "P50": 5.0, "P95": 10.0, "P95 at 95% load": 15.0}
NEAR_CAPACITY = 0.95
# The kinds of errors: where a row has them, and what they are called.
ERRORS = (
    ("error_percent", "as measured before"),
    ("after_percent", "as measured after"),
    ("lower_percent", "by the steps of the load before"),
    ("own_percent", "by its own steps"),
)
# Prompts that use a server's KV memory, and their tokens.
_FILL = 32, 700
# Requests that come at once, to see how many can be answered a second.
_CROWD = 400


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, flags = _parser().parse_args(given[:cut]), given[cut + 1 :]
    print(markdown(compare(args, flags)))


def settings_of(model: str, flags: list[str]) -> SequenceConfig:
    """The settings that flags of `chairlift serve` give a language model."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    known = SequenceConfig.__struct_fields__
    given = {name: value for name, value in vars(parser.parse_args(flags)).items() if name in known}
    return msgspec.convert({**given, "model": model}, SequenceConfig, strict=False)


def compare(args: argparse.Namespace, flags: list[str]) -> Results:
    """Measure, serve, replay and simulate, in every round anew; each load's figures are saved as they come."""
    recording = Recording(start("fidelity", {**vars(args), "server": flags}, args.model), args.out)
    recording.results["measured"] = []
    for number in range(1, args.rounds + 1):
        compare_once(args, flags, number, recording)
    return recording.results


def compare_once(args: argparse.Namespace, flags: list[str], number: int, recording: Recording) -> None:
    """One round, with what the machine is at its beginning."""
    config = settings_of(args.model, flags)
    profile, front = measured(args, config, "before")
    checkout = {"PYTHONPATH": str(Path(__file__).parents[1])}
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
    command += ["--port", str(port), "--data-dir", "", *flags]
    with running(command, port, "/health/ready", checkout):
        target = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))
        use_memory(target, args.vocab)
        if args.profile_out:
            machine = MachineProfile(machine=machine_in_words(), front=front, models={Path(args.model).name: profile})
            machine.save(args.profile_out)
        time.sleep(args.quiet_seconds)
        trace = wanted(args, profile.max_model_len)
        model = SequenceModel(config, profile)
        capacity = capacity_of(model, front, trace)
        about = {"front": msgspec.to_builtins(front), "cost": [list(profile.cost)], "capacity": [capacity]}
        recording.results["measured"].append(about)
        before: ServedTraffic | None = None
        for load in args.loads:
            sent = at_load(trace, load * capacity, args.seconds)
            runs = {"real": _replayed(args, target, sent)}
            own = forecast(port, FORECAST)
            if before is not None:
                seen = SequenceModel(config, before.profile)
                runs["lower"] = figures(simulated(seen, before.front, sent, args.drain), NO_TARGET)
            before = last_traffic(port)
            if args.again:
                runs["again"] = _replayed(args, target, sent)
            runs["simulated"] = figures(simulated(model, front, sent, args.drain), NO_TARGET)
            profile, front = measured(args, config, f"after {load:.0%}")
            model = SequenceModel(config, profile)
            runs["after"] = figures(simulated(model, front, sent, args.drain), NO_TARGET)
            capacity = capacity_of(model, front, trace)
            about["cost"].append(list(model.profile.cost))
            about["capacity"].append(capacity)
            names = {"round": number, "trace": args.trace.stem if args.trace else "bursty", "load": load}
            for row in rows(runs):
                recording.add(names | row | own.get(row["figure"], {}))


def _replayed(args: argparse.Namespace, target: Target, sent: Sequence[TraceRequest]) -> dict[str, Any]:
    """The figures of a trace that is sent to the server, with prompts of its own."""
    return figures(
        replay(target, sent, "completions", PromptMaker(args.vocab, random.randrange(2**32)), args.drain), NO_TARGET
    )


def forecast(port: int, figures: Mapping[str, tuple[str, int | None, float]]) -> dict[str, dict[str, float | None]]:
    """Of the last two minutes what the server saw, what its twin makes of them, and by how many percent that is off.

    Nothing where that was too little.
    """
    url = f"http://127.0.0.1:{port}/v1/models/{SERVED_NAME}/forecast"
    answer = httpx.post(url, json={}, timeout=60.0)
    if answer.status_code == httpx.codes.CONFLICT:
        # Of so many requests a second it keeps too few to tell.
        print(answer.json()["error"]["message"], file=sys.stderr)
        return {}
    told = answer.raise_for_status().json()
    found = {}
    for title, (name, place, unit) in figures.items():
        seen, own = (
            unit * (told[run][name] if place is None else told[run][name][place]) for run in ("measured", "now")
        )
        found[title] = {"seen": seen, "own": own, "own_percent": _off(seen, own)}
    return found


def last_traffic(port: int) -> ServedTraffic:
    """The last two minutes of the server, as `chairlift plan URL` gets them."""
    server = RunningServer(f"http://127.0.0.1:{port}")
    return served_traffic(server, server.model(SERVED_NAME))


def measured(args: argparse.Namespace, config: SequenceConfig, when: str) -> tuple[SequenceProfile, FrontCost]:
    """The model's profile, and what its front takes."""
    with tqdm(total=100, desc=f"measure {when}", unit="%", leave=False) as bar:
        return measure_sequences(config, args.measure_seconds, lambda share: bar.update(int(100 * share) - bar.n))


def use_memory(target: Target, vocab: int) -> None:
    """Have all of the KV memory used once, as it is in a server that has been there for a while.

    A machine that lends its memory page by page, as a virtual one does, slows down whoever is the first to use it.
    """
    prompts, (count, tokens) = PromptMaker(vocab, "memory"), _FILL
    requests = [
        target.request(prompts.token_ids(TraceRequest(arrival=0.0, input_length=tokens), number), 1)
        for number in range(count)
    ]
    closed_loop(target, requests, count, "filling the KV memory")


def wanted(args: argparse.Namespace, max_model_len: int) -> list[TraceRequest]:
    """The trace that was asked for, of at least as many requests as any run takes."""
    if args.trace:
        trace = scaled(read_trace(args.trace), 1.0, args.scale_lengths)
    else:
        lengths = {"input_length": "lognormal:150:600", "output_length": "lognormal:40:150"}
        trace = synthetic(Traffic(arrivals="gamma:10:4", **lengths), 2000.0)
    return fitted(trace, min(max_model_len, args.max_model_len))


def capacity_of(model: SequenceModel, front: FrontCost, trace: Sequence[TraceRequest]) -> float:
    """Requests a second that are answered where there are always enough of them."""
    return SequenceCase(model.profile, tuple(trace), front=front).capacity(model.config, _CROWD)


def at_load(trace: Sequence[TraceRequest], rate: float, seconds: float) -> list[TraceRequest]:
    """The first requests of a trace, sped up or slowed down so that in so many seconds that many come."""
    count = min(max(round(rate * seconds), 2), len(trace))
    part = list(trace[:count])
    return scaled(part, duration(part) / (count / rate))


def simulated(model: SequenceModel, front: FrontCost, trace: Sequence[TraceRequest], drain: float) -> Load:
    """A simulated run as the load generator would have seen it."""
    run = simulate([model], trace, front=front)
    end = duration(trace) + drain
    outcomes = []
    for life in run.requests:
        due = life.request.arrival
        outcome = Outcome(due, due, life.end or life.shed_at or due, run.token_times(life), life.num_tokens)
        if life.end is None or life.end > end:
            outcome.error = "refused" if life.end is None else "not answered in time"
        outcomes.append(outcome)
    return Load(0.0, duration(trace), outcomes, 0.0)


def rows(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each figure of the real run and of the others, and by how many percent these are off."""
    real, others = runs["real"], {name: run for name, run in runs.items() if name != "real"}
    found = []
    for title, key in FIGURES.items():
        row = {"figure": title, "real": _at(real, key)}
        for name, run in others.items():
            row[name] = _at(run, key)
            row["error_percent" if name == "simulated" else f"{name}_percent"] = _off(row["real"], row[name])
        found.append(row)
    found.append({"figure": "failed", "real": real["failed"]} | {name: run["failed"] for name, run in others.items()})
    return found


def _off(one: float, other: float) -> float | None:
    return 100 * (other / one - 1) if one else None


def markdown(results: Results) -> str:
    """What was measured around the table."""
    # Results of one round were once saved without a list.
    found = [_in_words(each) for each in results.get("measured", [results])]
    shown = table(results["runs"], NAMES, COLUMNS)
    return f"{caption(results)}; {'; then '.join(found)}:\n\n{shown}\n\n{outside(results['runs'])}"


def limit_of(figure: str, load: float) -> float | None:
    """By how many percent a figure may be off at a load; None where it has no limit."""
    if figure.endswith("/s"):
        return LIMITS["throughput"]
    if "p95" in figure:
        return LIMITS["P95 at 95% load" if load == NEAR_CAPACITY else "P95"]
    return LIMITS["P50"] if "p50" in figure else None


def outside(runs: Sequence[Mapping[str, Any]], errors: Sequence[tuple[str, str]] = ERRORS) -> str:
    """A line for each kind of error: which of the figures that have a limit are outside, by the median of rounds."""
    lines = []
    for key, name in errors:
        found: dict[tuple[float, str], list[float]] = {}
        for run in runs:
            if run.get(key) is not None and limit_of(run["figure"], run["load"]) is not None:
                found.setdefault((run["load"], run["figure"]), []).append(run[key])
        medians = {where: statistics.median(values) for where, values in found.items()}
        wide = [
            f"{figure.removesuffix(' ms')} at {load:.0%} ({off:+.1f}%)"
            for (load, figure), off in medians.items()
            if abs(round(off, 1)) > (limit_of(figure, load) or 0.0)
        ]
        if found:
            lines.append(f"- {name}, {len(wide)} of {len(found)} outside{': ' if wide else ''}{', '.join(wide)}")
    return "\n".join(lines)


def _in_words(measured: dict[str, Any]) -> str:
    """What the machine was in a round."""
    front = measured["front"]
    each = [f"{name} {1e6 * value:.1f} us" for name, value in front.items() if name not in ("contention", "delays")]
    about = f"front: {', '.join(each)}"
    # As long as steps were timed without a front.
    if delays := front.get("delays"):
        longer = ", ".join(f"{1e3 * seconds:.1f} ms with {count}" for count, seconds in delays)
        about = f"{about}, contention {front['contention']:.2f}, steps longer by {longer}"
    return f"{about}; capacity {_capacity_in_words(measured)}"


def _capacity_in_words(measured: dict[str, Any]) -> str:
    """Requests a second by what was measured before the loads, and after them."""
    capacity = measured["capacity"]
    if not isinstance(capacity, list):
        # As results were saved when nothing was measured between the loads.
        capacity = [capacity, *([measured["capacity_after"]] if "capacity_after" in measured else [])]
    before, *after = (f"{each:.2f}" for each in capacity)
    return f"{before}/s" + (f", {', '.join(after)}/s as measured after the loads" if after else "")


def _at(row: dict[str, Any], key: str) -> float:
    value: Any = row
    for part in key.split("."):
        value = value[part]
    return float(value)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """The model, the trace that it meets, and what is sent for each of its requests."""
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--trace", type=Path, help="a recorded trace (default: a bursty one that is made up)")
    parser.add_argument("--scale-lengths", type=float, default=0.25, help="of the recorded trace")
    parser.add_argument("--max-model-len", type=int, default=2048, help="cut prompts and answers to so many tokens")
    parser.add_argument("--drain", type=float, default=120.0)
    parser.add_argument("--vocab", type=int, default=2000, help="prompts use the token ids below")
    parser.add_argument("--extra", default='{"logit_bias": {"1000": 100}}', metavar="JSON")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser)
    parser.set_defaults(extra='{"logit_bias": {"1000": 100}, "temperature": 1}')
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.85, 0.95, 1.1], help="shares of the capacity")
    parser.add_argument("--rounds", type=int, default=1, help="each with the machine measured anew")
    parser.add_argument("--again", action="store_true", help="send every load twice")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long requests come at each load")
    parser.add_argument("--measure-seconds", type=float, default=50.0)
    parser.add_argument("--quiet-seconds", type=float, default=20.0, help="of the server before the loads")
    parser.add_argument("--profile-out", type=Path, metavar="FILE", help="save what was measured, for chairlift plan")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()

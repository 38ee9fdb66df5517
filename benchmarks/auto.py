"""What the tuner makes of a target alone: python benchmarks/auto.py MODEL_DIR --rate 2 [--vllm PYTHON] --out FILE

Each round starts every server in turn, and sends all of them the same traffic in an open loop. `auto` is given the
target and nothing else; `defaults` nothing at all; the fixed ones are `FIXED`, without a tuner; vLLM has its defaults.
Goodput of a phase are the requests that came in it and met the target, a second. Traffics: `steps` (once the rate, four
times, once again), `mixed` (short prompts and long answers, then long prompts and short answers) and `trace`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from engines import SERVED_NAME, vllm_environment
from fidelity import add_trace_options
from peer_versions import package_versions
from server_process import free_port, running

from chairlift.bench.completion_stream import Target
from chairlift.bench.latency import Slo, inside
from chairlift.bench.load import Load
from chairlift.bench.raw_results import Column, Recording, Results, caption, failures, start, table
from chairlift.bench.replay import PromptMaker, replay
from chairlift.plan.trace import TraceRequest, duration, fitted, scaled
from chairlift.plan.trace_files import read_trace
from chairlift.plan.traffic import Traffic, synthetic

LENGTHS = {"input_length": "uniform:16:384", "output_length": "exponential:64"}
OTHERS = {"input_length": "uniform:400:800", "output_length": "exponential:16"}
TRAFFICS = ("steps", "mixed", "trace")
# A phase's first seconds belong to the change, and are counted as all others.
FIXED: dict[str, list[str]] = {
    "16 slots": ["--max-num-seqs", "16"],
    "64 slots, 256 tokens a step": ["--max-num-seqs", "64", "--max-num-batched-tokens", "256"],
    "64 slots, steps within half the target": ["--max-num-seqs", "64", "--target-itl-ms", "{half}", "--no-auto"],
    "256 slots, steps within the target": ["--max-num-seqs", "256", "--target-itl-ms", "{itl}", "--no-auto"],
}
NAMES = (Column("traffic", "traffic", "{}"), Column("phase", "phase", "{}"), Column("server", "server", "{}"))
COLUMNS = (
    Column("offered", "offered/s", "{:.2f}"),
    Column("goodput", "inside the target/s", "{:.2f}"),
    Column("inside_percent", "inside", "{:.0f}%"),
    Column("failed", "refused"),
)
WARM_UP = 8
# Percent inside the target, below which a server's queue grew: then a ratio says how long that went on, no more.
HELD = 90.0


class Phase(NamedTuple):
    """A part of a traffic: from when to when, in seconds."""

    name: str
    begin: float
    end: float


def main() -> None:
    args = _parser().parse_args()
    peers = package_versions({"vLLM": (args.vllm, "vllm")})
    recording = Recording(start("auto", vars(args), args.model, peers=peers), args.out)
    servers = {name: each for name, each in commands(args).items() if not args.only or name in args.only}
    for number, name, target in each_server(servers, args):
        for kind in args.traffics:
            requests, phases = traffic(kind, args)
            print(f"round {number}: {name}, {kind}", file=sys.stderr)
            load = replay(target, requests, "completions", PromptMaker(args.vocab, f"{number} {kind}"), args.drain)
            for row in rows(load, phases, Slo(args.target_ttft_ms, args.target_itl_ms)):
                recording.add({"server": name, "round": number, "traffic": kind, **row})
    print(markdown(recording.results))


def each_server(
    servers: dict[str, tuple[list[str], str, dict[str, str]]], args: argparse.Namespace
) -> Iterator[tuple[int, str, Target]]:
    """Round, name and address of one server after the other, each warm and alone; every second round backwards."""
    for number in range(1, args.rounds + 1):
        for name in servers if number % 2 else reversed(servers):
            command, ready, env = servers[name]
            port = free_port()
            with running([*command, "--port", str(port)], port, ready, env, timeout=600):
                target = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))
                warm_up(target, args)
                yield number, name, target


def warm_up(target: Target, args: argparse.Namespace) -> None:
    """Let the server allocate what it allocates late."""
    arrivals = f"poisson:{args.rate:g}"
    few = fitted(synthetic(Traffic(arrivals=arrivals, **LENGTHS), WARM_UP / args.rate), args.max_model_len)
    replay(target, few[:WARM_UP], "completions", PromptMaker(args.vocab, "warm-up"), 60.0)


def commands(args: argparse.Namespace) -> dict[str, tuple[list[str], str, dict[str, str]]]:
    """Of each server its command, where it says that it is ready, and its environment."""
    own = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
    own += ["--data-dir", "", "--dtype", "bfloat16", "--max-model-len", str(args.max_model_len)]
    targets = ["--target-ttft-ms", f"{args.target_ttft_ms:g}", "--target-itl-ms", f"{args.target_itl_ms:g}"]
    numbers = {"itl": f"{args.target_itl_ms:g}", "half": f"{args.target_itl_ms / 2:g}"}
    found = {"auto": [*own, *targets], "defaults": own}
    found |= {name: [*own, *(flag.format(**numbers) for flag in flags)] for name, flags in FIXED.items()}
    checkout = {"PYTHONPATH": str(Path(__file__).parents[1])}
    servers = {name: (command, "/health/ready", checkout) for name, command in found.items()}
    if args.vllm:
        theirs = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--served-model-name"]
        theirs += [SERVED_NAME, "--dtype", "bfloat16", "--max-model-len", str(args.max_model_len)]
        servers["vLLM"] = (theirs, "/health", vllm_environment(Path(args.vllm)))
    return servers


def traffic(kind: str, args: argparse.Namespace) -> tuple[list[TraceRequest], list[Phase]]:
    """The requests of a traffic, the same for all servers, and its phases."""
    each, rate = args.phase_seconds, args.rate
    if kind == "trace":
        trace = fitted(scaled(read_trace(args.trace), 1.0, args.scale_lengths), args.max_model_len)
        part = trace[: round(3 * each * 2 * rate)]
        part = scaled(part, duration(part) / (3 * each))
        return part, [Phase("all", 0.0, 3 * each)]
    if kind == "steps":
        arrivals = f"steps:{rate:g}x{each:g},{4 * rate:g}x{each:g},{rate:g}x{each:g}"
        names = ("once", "four times", "once again")
        requests = synthetic(Traffic(arrivals=arrivals, **LENGTHS), 3 * each)
        return fitted(requests, args.max_model_len), [
            Phase(name, index * each, (index + 1) * each) for index, name in enumerate(names)
        ]
    first = synthetic(Traffic(arrivals=f"poisson:{3 * rate:g}", **LENGTHS), each)
    then = synthetic(Traffic(arrivals=f"poisson:{1.5 * rate:g}", **OTHERS), each)
    moved = [msgspec.structs.replace(request, arrival=request.arrival + each) for request in then]
    return fitted([*first, *moved], args.max_model_len), [
        Phase("long answers", 0.0, each),
        Phase("long prompts", each, 2 * each),
    ]


def rows(load: Load, phases: Sequence[Phase], slo: Slo) -> list[dict[str, Any]]:
    """What became of the requests that were due in each phase."""
    found = []
    for phase in phases:
        came = [each for each in load.outcomes if phase.begin <= each.due - load.began < phase.end]
        good = sum(inside(each, slo) for each in came)
        seconds = phase.end - phase.begin
        found.append(
            {
                "phase": phase.name,
                "offered": len(came) / seconds,
                "goodput": good / seconds,
                "inside_percent": 100 * good / max(len(came), 1),
                "failed": sum(each.error is not None for each in came),
            }
        )
    return found


def markdown(results: Results) -> str:
    """Each server in each phase, and how the tuner stands to the best fixed one, to the defaults and to vLLM."""
    settings = results["settings"]
    target = f"target: first token in {settings['target_ttft_ms']:g} ms, {settings['target_itl_ms']:g} ms a token"
    runs = sorted(results["runs"], key=lambda run: (TRAFFICS.index(run["traffic"]), run["phase"]))
    about = f"{caption(results)}; {target}:"
    return "\n\n".join([about, table(runs, NAMES, COLUMNS), *_ratios(results), *failures(results)])


def _ratios(results: Results) -> list[str]:
    """A line for each phase: the tuner's goodput over that of others, medians of rounds."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    theirs: dict[tuple[str, str], list[float]] = {}
    for run in results["runs"]:
        phase = found.setdefault((run["traffic"], run["phase"]), {})
        phase.setdefault(run["server"], []).append(run["goodput"])
        if run["server"] == "vLLM":
            theirs.setdefault((run["traffic"], run["phase"]), []).append(run["inside_percent"])
    lines = []
    for (kind, phase), servers in found.items():
        medians = {name: statistics.median(values) for name, values in servers.items()}
        tuned = medians.get("auto")
        fixed = {name: value for name, value in medians.items() if name not in ("auto", "vLLM")}
        if tuned is None or not fixed:
            continue
        best = max(fixed, key=lambda name: fixed[name])
        others = {f"the best fixed setting ({best})": fixed[best]}
        others |= {"defaults": medians["defaults"]} if "defaults" in medians else {}
        kept = statistics.median(theirs.get((kind, phase), [0.0]))
        others |= {"vLLM": medians["vLLM"]} if kept >= HELD else {}
        shown = ", ".join(f"{tuned / value:.2f} of {name}" for name, value in others.items() if value)
        not_held = "; vLLM did not hold this rate" if "vLLM" in medians and kept < HELD else ""
        lines.append(f"- {kind}, {phase}: `auto` {shown}{not_held}")
    return ["\n".join(lines)] if lines else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser)
    parser.add_argument("--traffics", nargs="+", choices=TRAFFICS, default=["steps", "mixed"])
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, of which `steps` is a multiple")
    parser.add_argument("--phase-seconds", type=float, default=60.0)
    parser.add_argument("--target-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--target-itl-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="SERVER", help="by their names in the table (default: all)")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()

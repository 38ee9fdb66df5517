"""The highest rate that a target alone holds: python benchmarks/auto_rates.py MODEL_DIR [--vllm PYTHON] --out FILE

`auto.py` sends all servers one rate. Here each of them, in turn, every second round backwards, is searched for the
highest rate of a trace at which 95% of the requests keep the target: `auto`, which is given the target and nothing
else, and `defaults` and vLLM with its defaults, which are given nothing. At each rate a hundred requests of the trace
come, for a minute at least, in an open loop; a rate is given up once the target can't be reached any more. Between two
rates a server rests until it has answered all. The first rate is sent once before, and not counted.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from auto import commands, each_server
from compare_serving import REQUESTS
from fidelity import add_trace_options, at_load
from peer_versions import package_versions
from rate_search import highest_rate
from serving import search_seconds

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import COLUMNS, RATE, Slo, figures, inside
from chairlift.bench.raw_results import Column, Recording, Results, caption, failures, start, table
from chairlift.bench.replay import PromptMaker, replay
from chairlift.plan.trace import TraceRequest, fitted, scaled
from chairlift.plan.trace_files import read_trace

SERVERS = ("auto", "defaults", "vLLM")
SHOWN = ("ttft_ms", "tpot_ms", "goodput", "inside_percent")
PRECISION, SHARE = 1.1, 95.0


def main() -> None:
    args = _parser().parse_args()
    peers = package_versions({"vLLM": (args.vllm, "vllm")})
    recording = Recording(start("auto_rates", vars(args), args.model, peers=peers), args.out)
    trace = fitted(scaled(read_trace(args.trace), 1.0, args.scale_lengths), args.max_model_len)
    servers = {name: each for name, each in commands(args).items() if name in SERVERS}
    for number, name, target in each_server(servers, args):
        at_rate(target, trace, args.rate, args, f"{number} {name} before")
        best, rows = find(target, trace, args, f"{number} {name}")
        recording.add({"server": name, "round": number, "best_rate": best, "rows": rows})
    print(markdown(recording.results))


def find(
    target: Target, trace: list[TraceRequest], args: argparse.Namespace, title: str
) -> tuple[float | None, list[dict[str, Any]]]:
    """The highest rate of the trace that keeps the target, and the figures of all that were tried, lowest first."""
    rows: list[dict[str, Any]] = []

    def holds(rate: float) -> bool:
        rows.append(row := at_rate(target, trace, rate, args, f"{title} {len(rows)}"))
        held = not row["given_up"] and row["inside_percent"] >= SHARE
        print(f"{title}: {rate:.2f}/s {'holds' if held else 'is too fast'}", file=sys.stderr)
        return held

    best = highest_rate(holds, args.rate, PRECISION)
    return best, sorted(rows, key=lambda row: float(row["rate"]))


def at_rate(
    target: Target, trace: list[TraceRequest], rate: float, args: argparse.Namespace, seed: str
) -> dict[str, Any]:
    """Figures of one rate, whose requests come until fewer than 95% can keep the target any more."""
    slo, seconds = Slo(args.target_ttft_ms, args.target_itl_ms), search_seconds(rate, args.seconds)
    sent = at_load(trace, rate, seconds)
    allowed = len(sent) * (1 - SHARE / 100)

    def lost(outcomes: list[Outcome]) -> bool:
        return sum(not inside(outcome, slo) for outcome in outcomes) > allowed

    load = replay(target, sent, "completions", PromptMaker(args.vocab, seed), args.drain, lost)
    return figures(load, slo, rate) | {"given_up": load.given_up, "sent_seconds": seconds}


def markdown(results: Results) -> str:
    """Each server at the highest rate that it held, and how far `auto` got beyond the others."""
    settings = results["settings"]
    target = f"target: first token in {settings['target_ttft_ms']:g} ms, {settings['target_itl_ms']:g} ms a token"
    runs = [run | next((row for row in run["rows"] if row["rate"] == run["best_rate"]), {}) for run in results["runs"]]
    shown = [column for column in COLUMNS if column.key.partition(".")[0] in SHOWN]
    text = table(runs, [Column("server", "server", "{}")], [RATE, REQUESTS, *shown])
    about = f"{caption(results)}; {target}; the highest rate with {SHARE:g}% inside:"
    return "\n\n".join([about, text, *_ratios(results), *failures(results)])


def _ratios(results: Results) -> list[str]:
    """By how much higher the rates are that `auto` holds, where all rounds found some; medians of rounds."""
    rates: dict[str, list[float]] = {}
    for run in results["runs"]:
        rates.setdefault(run["server"], []).append(run["best_rate"] or 0.0)
    medians = {name: statistics.median(each) for name, each in rates.items() if min(each) > 0}
    if "auto" not in medians:
        return []
    others = {name: value for name, value in medians.items() if name != "auto"}
    shown = ", ".join(f"{medians['auto'] / value:.2f} of {name}" for name, value in others.items())
    return [f"- highest rate: `auto` {shown}"] if shown else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, where the search begins")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests come at each rate, at least")
    parser.add_argument("--target-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--target-itl-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()

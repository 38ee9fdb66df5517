"""Latency and goodput of any server with OpenAI's /v1/completions: python benchmarks/serving.py URL --model NAME ...

Requests come by themselves (Poisson, `--rates`), whatever the server does, since clients that wait for their answers
would slow down with it. `--find` looks for the highest rate at which 95% of the requests stay inside the target, with
a hundred at each rate if they come within three minutes, so that slow servers may miss some, too;
`--concurrency N` is the closed loop all the same, for throughput; `--scenario prefix` shows what a shared prefix saves.
Every server gets the same requests: token ids, greedy, of a fixed length. One JSON line a rate, then a table.
`--roofline MODEL_DIR` measures in the end, once the server is idle, what the machine allows, and adds the share of it
that was used: of the closed loop's time, or of the time in which requests came.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import shared_prefix
import workloads
from rate_search import highest_rate

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import COLUMNS, RATE, Slo, figures, inside
from chairlift.bench.load import Arrival, Load, closed_loop, open_loop
from chairlift.bench.raw_results import Recording, Results, caption, start, table

# Requests at each rate of a search, and the most seconds in which they come.
SEARCH_REQUESTS, SEARCH_SECONDS = 100, 180.0


def main() -> None:
    args = _parser().parse_args()
    target = Target.of(args.url, args.model, json.loads(args.extra))
    warm_up(target, args.vocab, args.seed)
    results = start("serving", vars(args), args.model) | {"server": server_of(args.url, args.model)}
    recording = Recording(results, args.out)
    for row in measure(target, args):
        recording.add(row)
    print(markdown(results))


def measure(target: Target, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the mode that was asked for, each printed as it comes."""
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    if args.scenario == "prefix":
        rows = shared_prefix.measure(target, args.vocab, args.seed, args.repeat)
        _print_lines(rows)
        return rows
    if args.concurrency:
        rows = [
            streams(target, args.concurrency, args.vocab, args.seed + i, slo) | {"round": i + 1}
            for i in range(args.repeat)
        ]
        _print_lines(rows)
    elif args.find:
        best, rows = find(target, args, slo)
        print("no rate held" if best is None else f"highest rate with {args.share:g}% inside: {best:.2f}/s")
    else:
        rows = []
        for rate in args.rates:
            rows.append(at_rate(target, rate, args, slo))
            _print_lines(rows[-1:])
    add_shares(rows, args)
    return rows


def markdown(results: Results) -> str:
    """What was measured around the table of the mode."""
    runs = results["runs"]
    text = shared_prefix.report(runs) if "pass" in runs[0] else table(runs, [RATE], COLUMNS)
    return f"{caption(results)}; {_server_in_words(results)}:\n\n{text}"


def server_of(url: str, model: str) -> dict[str, Any] | None:
    """Its settings, as Chairlift's server tells them in a model's description; None of others'."""
    try:
        base = url.rstrip("/").removesuffix("/v1")
        answer = httpx.get(f"{base}/v1/models/{model}", timeout=10.0).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return None
    settings = answer.get("settings") if isinstance(answer, dict) else None
    return settings if isinstance(settings, dict) else None


def _server_in_words(results: Results) -> str:
    if "server" not in results:
        return "the server's settings were not saved"
    if not results["server"]:
        return "the server doesn't tell its settings"
    return "server: " + ", ".join(f"{name} {value}" for name, value in results["server"].items() if value is not None)


def add_shares(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Give each row the share of the machine's limit that it reached, if --roofline asks for it."""
    if not args.roofline:
        return
    # Here, since it imports torch, which no other client needs.
    from roofline import Machine, fewest_seconds

    machine = Machine.of(args.roofline, args.quantization, args.kv_cache_dtype)
    for row in rows:
        if row["rate"] is None:
            jobs = workloads.requests("uniform", args.vocab, args.seed)
        else:
            timed = workloads.arrivals(row["rate"], row["sent_seconds"], args.vocab, args.seed)
            jobs = [(prompt, length) for _, prompt, length in timed]
        wanted = sum(length for _, length in jobs)
        limit = wanted / fewest_seconds(machine, jobs)
        row["share_percent"] = 100 * row["output_tok_s"] / limit


def add_open_loop_options(parser: argparse.ArgumentParser) -> None:
    """The options that `at_rate` and `find` read, for every program that calls them."""
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="requests a second; --find starts there")
    parser.add_argument("--seconds", type=float, default=40.0,
                        help="how long requests are sent at each rate; a search takes longer at low ones")  # fmt: skip
    parser.add_argument("--drain", type=float, default=60.0, help="seconds that the last answers may take after that")
    parser.add_argument("--share", type=float, default=95.0, help="--find: percent that must be inside")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=120.0)
    parser.add_argument("--vocab", type=int, default=30000, help="prompts use the token ids below")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra", default="{}", metavar="JSON", help="fields to add to every request")


def warm_up(target: Target, vocab: int, seed: int) -> None:
    """Let the server allocate what it allocates late; fail at once where it refuses such requests."""
    jobs = [(ids[:64], 8) for ids, _ in workloads.requests("uniform", vocab, seed - 1)[:8]]
    load = closed_loop(target, [target.request(*job) for job in jobs], 4, "warm-up")
    failed = [outcome.error for outcome in load.outcomes if outcome.error]
    if failed:
        raise SystemExit(f"the server failed {len(failed)} of {len(jobs)} short requests: {failed[0]}")


def at_rate(
    target: Target, rate: float, args: argparse.Namespace, slo: Slo, *, needed: float | None = None
) -> dict[str, Any]:
    """Figures of one rate; with `needed`, only until fewer than these percent can be inside the target any more."""
    seconds = args.seconds if needed is None else search_seconds(rate, args.seconds)
    timed = workloads.arrivals(rate, seconds, args.vocab, args.seed)
    arrivals = [Arrival(offset, target.request(prompt, length)) for offset, prompt, length in timed]
    allowed = None if needed is None else len(arrivals) * (1 - needed / 100)

    def lost(outcomes: list[Outcome]) -> bool:
        return allowed is not None and sum(not inside(outcome, slo) for outcome in outcomes) > allowed

    load = open_loop(target, arrivals, seconds, args.drain, f"{rate:.2f}/s", lost)
    return figures(load, slo, rate) | {"given_up": load.given_up, "sent_seconds": seconds}


def search_seconds(rate: float, least: float) -> float:
    """How long a search sends requests at a rate.

    Of 19 requests none may be late if 95% must be in time, and of 100 five may.
    """
    return max(least, min(SEARCH_REQUESTS / rate, SEARCH_SECONDS))


def find(
    target: Target, args: argparse.Namespace, slo: Slo, precision: float = 1.05
) -> tuple[float | None, list[dict[str, Any]]]:
    """The highest rate with `args.share` percent inside, and the figures of all rates tried, lowest first."""
    rows: list[dict[str, Any]] = []

    def holds(rate: float) -> bool:
        row = at_rate(target, rate, args, slo, needed=args.share)
        rows.append(row)
        _print_lines([row])
        verdict = "too fast" if row["given_up"] or row["inside_percent"] < args.share else "holds"
        print(f"{rate:.2f}/s: {row['inside_percent']:.1f}% inside, {verdict}", file=sys.stderr)
        return verdict == "holds"

    best = highest_rate(holds, args.rates[0], precision)
    return best, sorted(rows, key=lambda row: float(row["rate"]))


def streams(target: Target, concurrency: int, vocab: int, seed: int, slo: Slo) -> dict[str, Any]:
    """Figures of the `uniform` workload, sent by `concurrency` clients that wait for their answers."""
    requests = [target.request(*job) for job in workloads.requests("uniform", vocab, seed)]
    load: Load = closed_loop(target, requests, concurrency, f"{concurrency} streams")
    return figures(load, slo)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="http://HOST:PORT")
    parser.add_argument("--model", required=True, help="the name under which the server knows it")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--find", action="store_true", help="search for the highest rate that holds")
    mode.add_argument("--concurrency", type=int, metavar="N", help="a closed loop of N streams")
    mode.add_argument("--scenario", choices=["prefix"])
    parser.add_argument("--repeat", type=int, default=3, help="rounds of --concurrency and --scenario")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    add_open_loop_options(parser)
    parser.add_argument("--roofline", metavar="MODEL_DIR", help="print the share of the machine's limit")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none", help="of --roofline")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto", help="of --roofline")
    return parser


def _print_lines(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""A language model under more load than it can take: python benchmarks/overload.py MODEL_DIR --out FILE [-- SETTINGS]

First a server without a target for the first token: the highest rate at which 95% of the requests have theirs within
`--slo-ttft-ms`, and what becomes of more. Then one with `--target-ttft-ms`, which refuses whom it could not serve in
time: the best rate again, and each of `--factors` times that. Requests come by themselves (Poisson), and are those of
benchmarks/serving.py. With random weights some tokens are no text, and the first one that is comes late: then
`--extra '{"logit_bias": {"1000": 100}}'` makes every token one that is. SETTINGS are flags of `chairlift serve` for
both. FILE gets every request: when it was due, had its first text and was over, in seconds, how many tokens it had, and
its status or error. benchmarks/render.py shows them in the documentation.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import serving
import workloads
from engines import SERVED_NAME
from rate_search import highest_rate
from server_process import free_port, running

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import percentiles, ttft
from chairlift.bench.load import Arrival, Load, open_loop
from chairlift.bench.raw_results import Column, Results, caption, save, start, table

QUANTILES = (50, 95, 99)
REFUSED = "429"
NAMES = (Column("target", "target", "{}"), Column("load", "load", "{}"))
COLUMNS = (
    Column("offered", "offered/s", "{:.2f}"),
    Column("goodput", "goodput/s", "{:.2f}"),
    Column("of_best", "of the best", "{:.0%}"),
    *(Column(f"ttft_ms.p{q}", f"TTFT p{q} ms") for q in QUANTILES),
    *(Column(f"e2e_ms.p{q}", f"E2E p{q} ms") for q in QUANTILES),
    Column("output_tok_s", "tok/s"),
    Column("refused", "refused", "{:.0%}"),
    *(Column(f"refusal_ms.p{q}", f"refused in p{q} ms") for q in (50, 99)),
    Column("failed", "failed"),
    Column("late_ms", "client late p99 ms", "{:.1f}"),
)


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, settings = _parser().parse_args(given[:cut]), given[cut + 1 :]
    print(markdown(measure(args, settings)))


def measure(args: argparse.Namespace, settings: list[str]) -> Results:
    """Measure a server without a target, then one with it, saving every run as it ends."""
    results = start("overload", {**vars(args), "server": settings}, args.model)
    results |= {"slo_ttft_ms": args.slo_ttft_ms, "seconds": args.seconds, "best": args.best}
    target = ["--target-ttft-ms", f"{args.target_ttft_ms or args.slo_ttft_ms:g}"]
    for name, flags in (("none", []), (f"{target[1]} ms", target)):
        port = free_port()
        command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
        command += ["--port", str(port), "--data-dir", "", *settings, *flags]
        checkout = {"PYTHONPATH": str(Path(__file__).parents[1])}
        with running(command, port, "/health/ready", checkout):
            server = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))
            serving.warm_up(server, args.vocab, args.seed)
            if results["best"] is None:
                results["best"] = best_rate(server, args)
            for factor in (1.0, *args.factors):
                rate = factor * results["best"]
                load = at_rate(server, rate, args.seconds, args.seed + 1, args)
                run = {"target": name, "factor": factor, "rate": rate, **raw(load)}
                results["runs"].append(run)
                save(results, args.out)
                row = figures(run, results)
                print(f"target {name}, {factor:.0%}: {row['goodput']:.2f}/s inside", file=sys.stderr)
    return results


def best_rate(server: Target, args: argparse.Namespace) -> float:
    """The highest rate at which `--share` percent of the requests have their first text in time."""

    def holds(rate: float) -> bool:
        load = at_rate(server, rate, args.search_seconds, args.seed, args)
        share = 100 * sum(inside(outcome, args.slo_ttft_ms) for outcome in load.outcomes) / (len(load.outcomes) or 1)
        print(f"{rate:.2f}/s: {share:.1f}% inside", file=sys.stderr)
        return share >= args.share

    best = highest_rate(holds, args.start_rate)
    if best is None:
        raise SystemExit("no rate holds the target")
    return best


def at_rate(server: Target, rate: float, seconds: float, seed: int, args: argparse.Namespace) -> Load:
    """Send requests at this rate, whatever becomes of them."""
    timed = workloads.arrivals(rate, seconds, args.vocab, seed)
    arrivals = [Arrival(offset, server.request(prompt, length)) for offset, prompt, length in timed]
    return open_loop(server, arrivals, seconds, args.drain, f"{rate:.2f}/s")


def inside(outcome: Outcome, slo_ms: float) -> bool:
    """Whether a request was answered, and had its first text in time."""
    return outcome.error is None and ttft(outcome) * 1000 <= slo_ms


def raw(load: Load) -> dict[str, Any]:
    """A load as it is saved; moments count from when the first request could come, or from when each was due."""
    requests = []
    for outcome in sorted(load.outcomes, key=lambda outcome: outcome.due):
        error = outcome.error or "200"
        status = error[5:8] if error.startswith("HTTP ") else error
        first = round(ttft(outcome), 5) if outcome.times and outcome.error is None else None
        moments = [round(moment - outcome.due, 5) for moment in (outcome.sent, outcome.ended)]
        requests.append([round(outcome.due - load.began, 5), moments[0], first, moments[1], outcome.tokens, status])
    fields = ["due", "sent", "first", "ended", "tokens", "status"]
    return {"seconds": load.seconds, "client_cpu_s": round(load.cpu, 3), "fields": fields, "requests": requests}


def figures(run: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Sum up a run. Times are of answered requests; refused ones have a column of their own, all others failed."""
    seconds, slo, requests = run["seconds"], results["slo_ttft_ms"] / 1000, run["requests"]
    statuses = Counter(REFUSED if status == REFUSED else status == "200" for *_, status in requests)
    answered = [request for request in requests if request[5] == "200"]
    good = sum(first <= slo for _, _, first, _, _, _ in answered)
    refusals = [ended - sent for _, sent, _, ended, _, status in requests if status == REFUSED]
    return {
        "target": run["target"],
        "load": f"{run['factor']:.0%}",
        "offered": len(requests) / seconds,
        "goodput": good / seconds,
        "of_best": good / seconds / results["best"],
        "ttft_ms": percentiles([first for _, _, first, _, _, _ in answered], QUANTILES),
        "e2e_ms": percentiles([ended for _, _, _, ended, _, _ in answered], QUANTILES),
        "output_tok_s": sum(_tokens_by(seconds, request) for request in answered) / seconds,
        "refused": statuses[REFUSED] / (len(requests) or 1),
        "refusal_ms": percentiles(refusals, QUANTILES) if refusals else None,
        "failed": statuses[False],
        "late_ms": percentiles([sent for _, sent, *_ in requests], (99,))["p99"],
    }


def _tokens_by(moment: float, request: list[Any]) -> float:
    """Of an answered request the tokens by then, as if they came evenly from its first text to its end."""
    due, _, first, ended, tokens, _ = request
    begin, end = due + first, due + ended
    if end <= moment or begin > moment:
        return float(tokens) if end <= moment else 0.0
    return 1 + (tokens - 1) * (moment - begin) / (end - begin)


def markdown(results: Results) -> str:
    """The table of all runs, and what it is about."""
    rows = [figures(run, results) for run in results["runs"]]
    slo = f"{results['slo_ttft_ms']:g} ms"
    best = f"The best rate with the first token within {slo} was {results['best']:.2f}/s"
    shown = table(rows, NAMES, COLUMNS)
    rows_are = f"each row is one run of {results['seconds']:g} s, and tokens a second are those of that time"
    return f"{caption(results)}\n\n{best}; {rows_are}.\n\n{shown}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder of a language model")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON with every request")
    parser.add_argument("--slo-ttft-ms", type=float, default=2000.0, help="what counts as in time")
    parser.add_argument("--target-ttft-ms", type=float, help="of the second server (default: --slo-ttft-ms)")
    parser.add_argument("--factors", type=float, nargs="*", default=[1.3, 5.0], help="loads, of the best rate")
    parser.add_argument("--best", type=float, metavar="RATE", help="the best rate, if it is known already")
    parser.add_argument("--share", type=float, default=95.0, help="percent that must be inside at the best rate")
    parser.add_argument("--start-rate", type=float, default=4.0, help="where the search begins")
    parser.add_argument("--search-seconds", type=float, default=40.0, help="of each rate that is tried")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run that is shown")
    parser.add_argument("--drain", type=float, default=120.0, help="seconds that the last answers may take after that")
    parser.add_argument("--vocab", type=int, default=1500, help="prompts use the token ids below")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra", default="{}", metavar="JSON", help="fields to add to every request")
    return parser


if __name__ == "__main__":
    main()

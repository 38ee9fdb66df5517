"""Servers side by side: python benchmarks/compare_serving.py MODEL_DIR --out benchmarks/results/NAME.json ENGINES

Starts each server in turn, alone on the machine, takes the seconds until it is ready, and lets the open-loop client
(benchmarks/serving.py) search for the highest rate with 95% of the requests inside the target; then ends it. `--fixed`
measures the given rates instead. `--render-only FILE...` writes the table of saved results again. A model with random
weights makes tokens that are parts of characters, whose text and so whose first event comes late or never: give every
request one token that is a word, as in `--extra '{"logit_bias": {"1000": 100}}'`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import comparison
import serving
from compare import DOCS, save, start_results
from completion_stream import Target
from engines import SERVED_NAME, Engine, add_options, chosen
from latency import COLUMNS, Slo, table
from server_process import free_port, running

MARKER = "compare-serving"
ABOUT = (("name", "server", "{}"), ("precision", "", "{}"), ("ready_s", "ready, s", "{:.1f}"))
SHOWN = ("rate", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "output_tok_s", "goodput", "inside_percent")


def main() -> None:
    args = _parser().parse_args()
    files = [Path(name) for name in args.render_only]
    if not files:
        if not (args.model and args.out):
            raise SystemExit("MODEL_DIR and --out are needed, or --render-only")
        measure(args)
        files = [args.out]
    text = "\n\n".join(markdown(json.loads(file.read_text())) for file in files)
    print(text)
    if args.docs:
        comparison.replace_between(args.docs / "benchmarks.md", MARKER, text)


def measure(args: argparse.Namespace) -> None:
    """Serve and measure with every engine that has a server, saving as they end."""
    results = start_results(args.model, rounds=1)
    results |= {"slo": [args.slo_ttft_ms, args.slo_tpot_ms], "share": args.share, "seconds": args.seconds}
    for engine in chosen(args):
        if not engine.server:
            continue
        about = {"name": engine.name, "precision": engine.precision}
        print(f"{engine.name} {engine.precision}", file=sys.stderr)
        try:
            ready, best, rows = trial(engine, args)
        except (RuntimeError, OSError, SystemExit) as error:
            results["failures"].append(about | {"round": 1, "error": str(error)})
            print(f"{engine.name} {engine.precision} failed: {error}", file=sys.stderr)
        else:
            results["runs"].append(about | {"ready_s": ready, "best_rate": best, "rows": rows})
        save(results, args.out)


def trial(engine: Engine, args: argparse.Namespace) -> tuple[float, float | None, list[dict[str, Any]]]:
    """Seconds to ready, the highest rate that held (None: not searched, or none did), and the figures of all rates."""
    port = free_port()
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    with running([*engine.server, "--port", str(port)], port, engine.ready, engine.env) as ready:
        target = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))
        serving.warm_up(target, args.vocab, args.seed)
        if args.fixed:
            return ready, None, [serving.at_rate(target, rate, args, slo) for rate in args.rates]
        best, rows = serving.find(target, args, slo)
        return ready, best, rows


def markdown(results: dict[str, Any]) -> str:
    """A row for the best rate of each server, or for each rate where none was searched for."""
    rows = []
    for run in results["runs"]:
        best = [row for row in run["rows"] if run["best_rate"] in (None, row["rate"])]
        rows += [run | row for row in best]
    ttft, tpot = results["slo"]
    about = (
        f"{results['model']}, {results['machine']}, {results['date']}, {results['seconds']:g} s a rate; inside: TTFT "
        f"below {ttft:g} ms and TPOT below {tpot:g} ms"
    )
    if any(run["best_rate"] for run in results["runs"]):
        about += f"; the highest rate with {results['share']:g}% inside"
    columns = ABOUT + tuple(column for column in COLUMNS if column[0] in SHOWN)
    lines = [f"{about}:", "", table(rows, columns)]
    for failure in results["failures"]:
        lines += ["", f"{failure['name']}, {failure['precision']}, failed."]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    serving.add_open_loop_options(parser)
    parser.add_argument("--fixed", action="store_true", help="measure --rates, search nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("--render-only", nargs="+", default=[], metavar="FILE", help="saved results, one a model")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of benchmarks.md")
    parser.add_argument("--no-docs", dest="docs", action="store_const", const=None, help="print the table only")
    return parser


if __name__ == "__main__":
    main()

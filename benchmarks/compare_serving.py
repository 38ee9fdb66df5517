"""Servers side by side: python benchmarks/compare_serving.py MODEL_DIR --out benchmarks/results/NAME.json ENGINES

Starts each server in turn, every second round backwards, alone on the machine, takes the seconds until it is ready, and
lets the open-loop client (benchmarks/serving.py) search for the highest rate with 95% of the requests inside the
target; then ends it. The first rate is sent once before, and not counted. `--fixed` measures the given rates instead.
A model with random weights makes tokens that are parts of characters, whose text and so whose first event comes late or
never: give every request one token that is a word, as in `--extra '{"logit_bias": {"1000": 100}}'`.

`--sweep` searches, coarsely, with every variant of each engine's settings (benchmarks/engines.py); a later run with
`--settings-of` that file takes for each engine the variant that held the highest rate.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import serving
from engines import SERVED_NAME, Engine, add_options, chosen, versions
from server_process import free_port, running

from chairlift.bench.completion_stream import Target
from chairlift.bench.latency import COLUMNS, RATE, Slo
from chairlift.bench.raw_results import Column, Recording, Results, caption, failures, start, table

NAMES = (Column("name", "server"), Column("precision", ""), Column("variant", "settings"))
READY = Column("ready_s", "ready, s", "{:.1f}")
REQUESTS = Column("requests", "requests at it")
SHOWN = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "output_tok_s", "goodput", "inside_percent")
# Between the rates of a sweep, which is to tell settings apart, and those of a search.
SWEEP_PRECISION, PRECISION = 1.25, 1.05
DEFAULT = "its defaults"


def main() -> None:
    args = _parser().parse_args()
    print(markdown(measure(args)))


def measure(args: argparse.Namespace) -> Results:
    """Serve and measure with every engine that has a server, saving as they end."""
    recording = Recording(start("compare_serving", vars(args), args.model, peers=versions(args)), args.out)
    swept = json.loads(args.settings_of.read_text()) if args.settings_of else None
    engines = chosen(args)
    for number in range(1, args.rounds + 1):
        for engine in engines if number % 2 else reversed(engines):
            if not engine.server:
                continue
            for variant in [(), *engine.variants] if args.sweep else [best_variant(engine, swept)]:
                about = {"name": engine.name, "precision": engine.precision, "round": number}
                about["variant"] = " ".join(variant) or DEFAULT
                print(*about.values(), file=sys.stderr)
                try:
                    ready, best, rows = trial(engine, variant, args)
                except (RuntimeError, OSError, SystemExit) as error:
                    recording.fail(about, str(error))
                    print(f"failed: {error}", file=sys.stderr)
                else:
                    recording.add(about | {"ready_s": ready, "best_rate": best, "rows": rows})
    return recording.results


def best_variant(engine: Engine, swept: Results | None) -> tuple[str, ...]:
    """The settings with which the engine held the highest rate of a sweep; none without one."""
    if swept is None:
        return ()
    held = {
        run["variant"]: run["best_rate"] or 0.0
        for run in swept["runs"]
        if (run["name"], run["precision"]) == (engine.name, engine.precision)
    }
    by_name = {" ".join(variant): variant for variant in engine.variants}
    return by_name.get(max(held, key=lambda name: held[name], default=DEFAULT), ())


def trial(
    engine: Engine, variant: tuple[str, ...], args: argparse.Namespace
) -> tuple[float, float | None, list[dict[str, Any]]]:
    """Seconds to ready, the highest rate that held (None: not searched, or none did), and the figures of all rates."""
    port = free_port()
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    command = [*engine.server, *variant, "--port", str(port)]
    with running(command, port, engine.ready, engine.env) as ready:
        target = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))
        serving.warm_up(target, args.vocab, args.seed)
        # Some make a product for each number of rows when that first comes, which is slow in the first half minute.
        serving.at_rate(target, args.rates[0], argparse.Namespace(**vars(args) | {"seed": args.seed - 1}), slo)
        if args.fixed:
            return ready, None, [serving.at_rate(target, rate, args, slo) for rate in args.rates]
        best, rows = serving.find(target, args, slo, SWEEP_PRECISION if args.sweep else PRECISION)
        return ready, best, rows


def markdown(results: Results) -> str:
    """A row for the best rate of each server, or for each rate where none was searched for."""
    settings = results["settings"]
    runs = [run | row for run in results["runs"] for row in _shown(run, settings["fixed"])]
    about = (
        f"{_seconds_in_words(results)} a rate; inside: TTFT below {settings['slo_ttft_ms']:g} ms and TPOT below "
        f"{settings['slo_tpot_ms']:g} ms"
    )
    shown = [column for column in COLUMNS if column.key.partition(".")[0] in SHOWN]
    if settings["fixed"]:
        text = table(runs, [*NAMES, RATE], [READY, *shown])
    else:
        about += f"; the highest rate with {settings['share']:g}% inside; one that can't reach it any more is given up"
        text = table(runs, NAMES, [READY, RATE, REQUESTS, *shown])
    notes = [*_none_held(results), *_build(results), *failures(results)]
    return "\n\n".join([f"{caption(results)}; {about}:", text, *notes])


def _build(results: Results) -> list[str]:
    """How llama.cpp was built, which decides what it multiplies by."""
    if all(run["name"] != "llama.cpp" for run in results["runs"]):
        return []
    said = results["settings"].get("llama_build")
    return [f"llama.cpp: {f'built {said}' if said else 'how it was built was not saved'}."]


def _shown(run: dict[str, Any], fixed: bool) -> list[dict[str, Any]]:
    """The figures of all rates, or of the highest that held, which are none where none held."""
    if fixed:
        return list(run["rows"])
    return [row for row in run["rows"] if row["rate"] == run["best_rate"]] or [{}]


def _none_held(results: Results) -> list[str]:
    """A sentence for each search that found no rate."""
    if results["settings"]["fixed"]:
        return []
    return [
        f"{run['name']}, {run['precision']}, {run['variant']}: none held in round {run['round']}."
        for run in results["runs"]
        if run["best_rate"] is None
    ]


def _seconds_in_words(results: Results) -> str:
    """How long requests were sent at each rate: results from before slow rates took longer don't say it of each."""
    seconds = {
        row.get("sent_seconds", results["settings"]["seconds"]) for run in results["runs"] for row in run["rows"]
    }
    low, high = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{low} s" if low == high else f"{low} to {high} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    serving.add_open_loop_options(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--fixed", action="store_true", help="measure --rates, search nothing")
    mode.add_argument("--sweep", action="store_true", help="search with every variant of each engine's settings")
    parser.add_argument("--settings-of", type=Path, metavar="FILE", help="a saved sweep to take the settings from")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()

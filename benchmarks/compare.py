"""Chairlift beside its peers, in process: python benchmarks/compare.py MODEL_DIR --out benchmarks/results/NAME.json
ENGINES

Each round starts every engine in turn, alone on the machine, so that a slow quarter of an hour hits all alike; every
second round goes backwards. `--before CHECKOUT` measures an older Chairlift in the same rounds. Results
are saved after every engine; `--render-only FILE...` writes the table and the picture of saved ones again.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import comparison
import workloads
from engines import Engine, add_options, chosen
from server_process import end
from tqdm import tqdm

DOCS = Path(__file__).parents[1] / "docs"
MARKER = "compare"
PICTURE = "compare.png"


def main() -> None:
    args = _parser().parse_args()
    files = [Path(name) for name in args.render_only]
    if not files:
        if not (args.model and args.out):
            raise SystemExit("MODEL_DIR and --out are needed, or --render-only")
        measure(args)
        files = [args.out]
    every = [json.loads(file.read_text()) for file in files]
    text = "\n\n".join(comparison.markdown(results) for results in every)
    print(text)
    if args.docs:
        comparison.draw(every, args.docs / PICTURE)
        picture = f"![Output tokens a second of each engine]({PICTURE})"
        comparison.replace_between(args.docs / "benchmarks.md", MARKER, f"{text}\n\n{picture}")


def measure(args: argparse.Namespace) -> None:
    """Run all rounds, saving as they go."""
    engines = chosen(args)
    results = start_results(args.model, args.rounds)
    with tqdm(total=args.rounds * len(engines), unit="engine", dynamic_ncols=True) as bar:
        for number in range(1, args.rounds + 1):
            for engine in engines if number % 2 else reversed(engines):
                bar.set_description(f"round {number}: {engine.name} {engine.precision}")
                about = {"name": engine.name, "precision": engine.precision, "round": number}
                lines, error = run(engine, args.workloads, args.repeat, args.timeout)
                results["runs"] += [about | line for line in lines]
                if error:
                    results["failures"].append(about | {"error": error})
                    bar.write(f"{engine.name} {engine.precision} failed: {error}", file=sys.stderr)
                save(results, args.out)
                bar.update()


def run(engine: Engine, names: list[str], repeat: int, timeout: float) -> tuple[list[dict[str, Any]], str | None]:
    """Measure one engine; returns the lines that it printed, and why there are not more of them."""
    try:
        process = subprocess.Popen(
            engine.offline(names, repeat),
            env=os.environ | engine.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as missing:
        return [], str(missing)
    try:
        output, said = process.communicate(timeout=timeout)
        error = said if process.returncode else None
    except subprocess.TimeoutExpired:
        end(process)
        output, error = process.communicate()[0], f"not done after {timeout:g} s"
    finally:
        end(process)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"engine"')]
    if error is None and len(lines) < len(names):
        error = f"printed {len(lines)} of {len(names)} results"
    return lines, error and (error.strip()[-500:] or "it ended without a word")


def start_results(model: str, rounds: int) -> dict[str, Any]:
    """Results without runs: what is measured, where and when."""
    return {
        "model": Path(model).name,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "machine": f"{os.cpu_count()} cores of {_processor()}",
        "date": datetime.date.today().isoformat(),
        "started": time.strftime("%H:%M"),
        "rounds": rounds,
        "runs": [],
        "failures": [],
    }


def save(results: dict[str, Any], path: Path) -> None:
    """Write results as JSON, with the time of the last."""
    results["ended"] = time.strftime("%H:%M")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def _commit() -> str:
    """The commit of this checkout, marked where files differ from it."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="runs of a workload in a round, after one load")
    parser.add_argument("--workloads", nargs="+", choices=workloads.NAMES, default=list(workloads.NAMES))
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one engine in one round")
    parser.add_argument("--render-only", nargs="+", default=[], metavar="FILE", help="saved results, one a model")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of benchmarks.md and compare.png")
    parser.add_argument("--no-docs", dest="docs", action="store_const", const=None, help="print the table only")
    return parser


if __name__ == "__main__":
    main()

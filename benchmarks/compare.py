"""Chairlift beside its peers, in process: python benchmarks/compare.py MODEL_DIR --out benchmarks/results/NAME.json
ENGINES

Each round starts every engine in turn, alone on the machine, so that a slow quarter of an hour hits all alike; every
second round goes backwards. `--before CHECKOUT` measures an older Chairlift in the same rounds. Results are saved after
every engine; `python benchmarks/render.py` puts the table and the picture of saved ones into the documentation.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import workloads
from comparison import markdown as markdown
from engines import Engine, add_options, chosen, versions
from server_process import end
from tqdm import tqdm

from chairlift.bench.raw_results import Recording, Results, start


def main() -> None:
    args = _parser().parse_args()
    print(markdown(measure(args)))


def measure(args: argparse.Namespace) -> Results:
    """Run all rounds, saving as they go."""
    engines = chosen(args)
    recording = Recording(start("compare", vars(args), args.model, peers=versions(args)), args.out)
    with tqdm(total=args.rounds * len(engines), unit="engine", dynamic_ncols=True) as bar:
        for number in range(1, args.rounds + 1):
            for engine in engines if number % 2 else reversed(engines):
                bar.set_description(f"round {number}: {engine.name} {engine.precision}")
                about = {"name": engine.name, "precision": engine.precision, "round": number}
                lines, error = run(engine, args.workloads, args.repeat, args.timeout)
                for line in lines:
                    recording.add(about | line)
                if error:
                    recording.fail(about, error)
                    bar.write(f"{engine.name} {engine.precision} failed: {error}", file=sys.stderr)
                bar.update()
    return recording.results


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the results are saved")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="runs of a workload in a round, after one load")
    parser.add_argument("--workloads", nargs="+", choices=workloads.NAMES, default=list(workloads.NAMES))
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one engine in one round")
    return parser


if __name__ == "__main__":
    main()

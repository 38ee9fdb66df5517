"""What every engine's offline program does the same: options, timing, the printed line. Standard library only."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import workloads

Jobs = list[tuple[list[int], int]]
# A workload is repeated until its runs took this long: a short one would be a coin's toss.
MEASURED_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, WORKLOADS and --repeat."""
    parser.add_argument("model")
    parser.add_argument("workloads", type=_names, help="single, uniform, varied; several joined by commas")
    parser.add_argument(
        "--repeat", type=int, default=3, help=f"timed runs of each workload at least; more until {MEASURED_SECONDS:g} s"
    )


def arguments() -> argparse.Namespace:
    """The arguments of a program that has no others."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args()


def report(
    engine: str,
    args: argparse.Namespace,
    load: float,
    prepare: Callable[[Jobs], Callable[[], int]],
    limit: Callable[[str], float] | None = None,
    **about: str,
) -> None:
    """Print a line for each workload: the median of the runs after a short warm-up.

    `prepare` takes the jobs and returns what serves them all and counts the tokens made. `limit`, asked right after the
    runs, gives the rate that the machine allows a workload.
    """
    prepare([([11, 12, 13], 4)])()
    for name in args.workloads:
        jobs = workloads.requests(name)
        run = prepare(jobs)
        seconds = []
        while len(seconds) < args.repeat or sum(seconds) < MEASURED_SECONDS:
            start = time.perf_counter()
            made = run()
            seconds.append(time.perf_counter() - start)
            wanted = sum(length for _, length in jobs)
            if made != wanted:
                raise SystemExit(f"{engine} made {made} tokens of {wanted}")
        median = statistics.median(seconds)
        line: dict[str, str | float | list[float]] = {
            "engine": engine,
            **about,
            "workload": name,
            "load_s": round(load, 1),
            "seconds": round(median, 2),
            "output_tok_s": round(made / median, 1),
            "best_tok_s": round(made / min(seconds), 1),
            "runs_s": [round(each, 4) for each in seconds],
        }
        if limit is not None:
            most = limit(name)
            line |= {"limit_tok_s": round(most, 1), "share_percent": round(100 * made / median / most, 1)}
        print(json.dumps(line), flush=True)


def take_turns(prepare: Callable[[Jobs], Callable[[], int]], engine: Any) -> None:
    """Run the workload that each line of standard input names, one engine step for each empty line.

    Prints the seconds from one such line to the moment when the next step could begin, and `end` after the last.
    """
    runs: dict[str, Callable[[], int]] = {}
    step, began = engine.step, 0.0

    def paced() -> Any:
        nonlocal began
        if began:
            print(time.perf_counter() - began, flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        return step()

    engine.step = paced
    while name := sys.stdin.readline().strip():
        if name not in runs:
            runs[name] = prepare(workloads.requests(name))
        began = 0.0
        runs[name]()
        print(time.perf_counter() - began, "end", flush=True)


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in workloads.NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(workloads.NAMES)}")
    return names

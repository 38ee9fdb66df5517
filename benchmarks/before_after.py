"""An older Chairlift beside this one: python benchmarks/before_after.py MODEL --before CHECKOUT --out FILE.json

Both are loaded at once, each in a process of its own, and take turns step by step; every second pair of steps goes
backwards. So whatever else slows the machine down for a while hits both, and their ratio means something where a rate
alone does not. The older checkout needs its native library built.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import workloads
from tqdm import tqdm

from chairlift.bench.raw_results import Recording, Results, caption, layout, start

HERE = Path(__file__).resolve().parent
PRECISIONS = {
    "float32": ['dtype="float32"'],
    "bf16": [],
    "8 bit": ['quantization="int8"', 'kv_cache_dtype="int8"'],
    "4 bit": ['quantization="int4"', 'kv_cache_dtype="int8"'],
}


class Side:
    """One of the two, loaded and waiting for its turn."""

    def __init__(self, name: str, checkout: Path, model: str, settings: list[str]) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "offline.py"), model, ",".join(workloads.NAMES), *settings, "--turns"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(checkout)}, text=True, **pipes)

    def begin(self, workload: str) -> None:
        """Let it come to its first step."""
        self._say(workload)

    def step(self) -> tuple[float, bool]:
        """Seconds of one step, and whether it was the last."""
        self._say("")
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        return float(line[0]), len(line) == 2

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    args = _parser().parse_args()
    recording = Recording(start("before_after", vars(args), args.model), args.out)
    checkouts = {"before": args.before.resolve(), "after": HERE.parent}
    with tqdm(total=sum(args.seconds) * len(args.precisions), unit="s", dynamic_ncols=True) as bar:
        for precision in args.precisions:
            sides = [Side(name, checkout, args.model, PRECISIONS[precision]) for name, checkout in checkouts.items()]
            for workload, seconds in zip(workloads.NAMES, args.seconds, strict=True):
                bar.set_description(f"{precision} {workload}")
                spent, number = 0.0, 0
                while spent < seconds:
                    taken = together(sides, workload, bar)
                    if number:  # the first run warms up
                        about = {"precision": precision, "workload": workload, "run": number}
                        recording.add(about | taken)
                    number, spent = number + 1, spent + sum(map(sum, taken.values()))
            for side in sides:
                side.end()
    print(markdown(recording.results))


def together(sides: list[Side], workload: str, bar: Any) -> dict[str, list[float]]:
    """Run a workload on both, a step each in turn; returns the seconds of their steps."""
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.begin(workload)
    ended: set[str] = set()
    while not ended:
        order = sides if len(taken[sides[0].name]) % 2 else sides[::-1]
        for side in order:
            seconds, last = side.step()
            taken[side.name].append(round(seconds, 6))
            ended |= {side.name} if last else set()
        bar.update(sum(steps[-1] for steps in taken.values()))
    if len(ended) < len(sides):
        raise SystemExit(f"{workload}: the two take different numbers of steps")
    return taken


def markdown(results: Results) -> str:
    """Seconds of a run on both sides, and the ratio with its interval; above 1 means that it became faster."""
    cells = [["", "workload", "runs", "steps", "before, s", "after, s", "speed after / before", "95% of resamplings"]]
    keys = dict.fromkeys((run["precision"], run["workload"]) for run in results["runs"])
    for precision, workload in keys:
        runs = [run for run in results["runs"] if (run["precision"], run["workload"]) == (precision, workload)]
        pairs = [pair for run in runs for pair in zip(run["before"], run["after"], strict=True)]
        before, after = (statistics.median(sum(run[side]) for run in runs) for side in ("before", "after"))
        low, high = interval(pairs)
        about = [precision, workload, str(len(runs)), str(len(pairs)), f"{before:.3f}", f"{after:.3f}"]
        cells.append([*about, f"{ratio(pairs):.3f}", f"{low:.3f}-{high:.3f}"])
    return f"{caption(results)}:\n\n{layout(cells)}"


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Time before over time after."""
    return sum(before for before, _ in pairs) / sum(after for _, after in pairs)


def interval(pairs: list[tuple[float, float]], times: int = 1000) -> tuple[float, float]:
    """Where the ratio lies in 95 of 100 samples drawn from the pairs."""
    rng = random.Random(0)
    ratios = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(times))
    return ratios[times // 40], ratios[-1 - times // 40]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "8 bit"])
    parser.add_argument("--seconds", type=float, nargs=3, default=[60, 200, 300], help="of runs, for each workload")
    return parser


if __name__ == "__main__":
    main()

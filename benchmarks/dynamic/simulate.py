"""What the scheduler of items does, in virtual time, with the very code that serves.

    python benchmarks/dynamic/simulate.py [--seconds 10] [--seeds 2] [--out FILE] [table] [overload] [target]

`table`: the highest rate at which 99% of the requests are answered within the SLO, of Poisson arrivals, by bisection.
Beside it the same scheduler without deadlines, which is the greedy late-bound rule.
`overload`: goodput and what became of the rest, at up to ten times the capacity.
`target`: `target_latency` alone, the rate stepped 1x, 4x, 1x, against a sweep of fixed batch sizes and waits.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from virtual import Executor, Run, poisson, simulate

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.core.items.limits import BatchLimits

MOST = 32
CASES = [(Executor(0.008, 0.00025), 0.05), (Executor(0.008, 0.00025), 0.025), (Executor(0.001, 0.004), 0.06)]
SHARE = 0.99
Row = dict[str, Any]
STEPS = 3


def highest_rate(limits: BatchLimits, executor: Executor, slo: float, seconds: float, seeds: int) -> float:
    """Bisect for the rate at which `SHARE` of all are inside, to a quarter of a percent; mean over the seeds."""

    def share(rate: float) -> float:
        runs = [simulate(limits, executor, poisson(rate, seconds, seed)) for seed in range(1, seeds + 1)]
        return sum(run.inside(slo) / run.sent for run in runs) / seeds

    low, high = 0.0, 1.1 * executor.capacity(MOST)
    while high - low > 0.0025 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) >= SHARE else (low, middle)
    return low


def highest(seconds: float, seeds: int) -> Iterator[Row]:
    """The highest rates, with deadlines and without."""
    for executor, slo in CASES:
        # A longer run for the slow executor, so that all see as many requests.
        capacity = executor.capacity(MOST)
        length = seconds * 2000 / capacity
        greedy = BatchLimits(max_batch_size=MOST, max_waiting=10**6)
        ours = BatchLimits(max_batch_size=MOST, default_timeout=slo)
        rates = [highest_rate(limits, executor, slo, length, seeds) for limits in (greedy, ours)]
        good = simulate(ours, executor, poisson(1.3 * capacity, length, 1)).goodput(slo)
        yield {"executor": executor.name, "slo": slo * 1e3, "capacity": capacity, "greedy": rates[0],
               "ours": rates[1], "goodput": good, "of_capacity": good / capacity}  # fmt: skip


def overload(seconds: float, seeds: int) -> Iterator[Row]:
    """What becomes of everyone when more come than can be served; one seed."""
    del seeds
    for executor, slo in CASES:
        capacity = executor.capacity(MOST)
        for load in (0.5, 0.9, 1.0, 1.3, 2.0, 10.0):
            limits = BatchLimits(max_batch_size=MOST, default_timeout=slo)
            run = simulate(limits, executor, poisson(load * capacity, seconds * 2000 / capacity / max(load, 1), 1))
            late = len(run.lives) - run.inside(slo)
            yield {"executor": executor.name, "slo": slo * 1e3, "load": load, "goodput": run.goodput(slo),
                   "refused": run.refused, "dropped": run.dropped, "late": late,
                   "mean_batch": run.mean_batch}  # fmt: skip


def stepped(rate: float, seconds: float) -> Callable[[float], float]:
    """Return 1x, 4x, 1x of a rate, a third of the time each."""
    return lambda now: rate * (4 if seconds / STEPS <= now < 2 * seconds / STEPS else 1)


def p95_after(run: Run, begin: float, end: float, skipped: int) -> float:
    """The P95 of what arrived in a period, but for the first batches that left in it."""
    later = [batch.started for batch in run.batches if batch.started >= begin][skipped:]
    since = later[0] if later else end
    latencies = sorted(life.latency for life in run.lives if since <= life.arrival < end)
    return latencies[int(0.95 * (len(latencies) - 1))] if latencies else 0.0


def p95s(limits: BatchLimits, executor: Executor, rate: float, seconds: float) -> list[float]:
    """The P95 of each period, from 20 batches after its step."""
    run = simulate(limits, executor, poisson(stepped(rate / 4, seconds), seconds, 1))
    return [p95_after(run, i * seconds / STEPS, (i + 1) * seconds / STEPS, 20) for i in range(STEPS)]


def held(limits: BatchLimits, executor: Executor, slo: float, seconds: float) -> float:
    """The highest 4x rate at which the P95 of all periods is inside, to a percent."""
    low, high = 0.0, 1.1 * executor.capacity(MOST)
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if max(p95s(limits, executor, middle, seconds)) <= slo else (low, middle)
    return low


def target(seconds: float, seeds: int) -> Iterator[Row]:
    """The P95 of each period 20 batches after its step, and the rate that each setting holds; one seed."""
    del seeds
    for executor, slo in CASES:
        length = seconds * 2000 / executor.capacity(MOST)
        fixed = {
            f"batch {size}, wait {wait:g} ms": BatchLimits(max_batch_size=size, max_wait=wait / 1e3, max_waiting=10**6)
            for size in (4, 8, 16, 32)
            for wait in (0.0, 5.0)
        }
        rates = {name: held(limits, executor, slo, length) for name, limits in fixed.items()}
        best = max(rates, key=lambda name: rates[name])
        chosen = BatchLimits(max_batch_size=MOST, target_latency=slo, max_waiting=10**6)
        rate = 0.9 * rates[best]
        for name, limits in ((f"{best}, the best fixed one", fixed[best]), ("target alone", chosen)):
            first, second, third = (1e3 * each for each in p95s(limits, executor, rate, length))
            yield {"executor": executor.name, "slo": slo * 1e3, "setting": name, "rate": rate, "first": first,
                   "second": second, "third": third, "holds": held(limits, executor, slo, length)}  # fmt: skip


PARTS: dict[str, Callable[[float, int], Iterator[Row]]] = {"table": highest, "overload": overload, "target": target}
CASE = (Column("executor", "a batch of b takes"), Column("slo", "target, ms", "{:g}"))
NAMES = {
    "table": CASE,
    "overload": (*CASE, Column("load", "load", "{:.0%}")),
    "target": (*CASE, Column("setting", "setting")),
}
FIGURES = {
    "table": (
        Column("capacity", "capacity/s"),
        Column("ours", "99% inside up to, /s"),
        Column("greedy", "greedy batches without deadlines"),
        Column("goodput", "goodput at 130%, /s"),
        Column("of_capacity", "of capacity", "{:.0%}"),
    ),
    "overload": (
        Column("goodput", "goodput/s"),
        Column("refused", "refused"),
        Column("dropped", "dropped"),
        Column("late", "late"),
        Column("mean_batch", "mean batch", "{:.1f}"),
    ),
    "target": (
        Column("rate", "4x rate, /s"),
        Column("first", "P95 ms at 1x", "{:.1f}"),
        Column("second", "at 4x", "{:.1f}"),
        Column("third", "at 1x again", "{:.1f}"),
        Column("holds", "holds up to, /s"),
    ),
}


def markdown(results: Results) -> str:
    """A table for each part."""
    settings = results["settings"]
    about = f"virtual time, {settings['seconds']:g} s, {settings['seeds']} seeds, at most {MOST} a batch"
    lines = [f"{caption(results)}; {about}:"]
    for part in settings["parts"]:
        runs = [run for run in results["runs"] if run["part"] == part]
        lines.append(table(runs, NAMES[part], FIGURES[part]))
    return "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="table, overload, target; all if none is given")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="at 2,000 requests a second; longer for slower ones"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    args = parser.parse_args()
    recording = Recording(start("simulate", vars(args)), args.out)
    for part in args.parts:
        for row in PARTS[part](args.seconds, args.seeds):
            recording.add({"part": part} | row)
    print(markdown(recording.results))


if __name__ == "__main__":
    main()

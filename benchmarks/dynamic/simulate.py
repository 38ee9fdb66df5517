"""What the scheduler of items does, in virtual time, with the very code that serves.

    python benchmarks/dynamic/simulate.py [--seconds 10] [--seeds 2] [table] [overload] [target]

`table`: the highest rate at which 99% of the requests are answered within the SLO, of Poisson arrivals, by bisection.
Beside it the same scheduler without deadlines, which is the greedy late-bound rule.
`overload`: goodput and what became of the rest, at up to ten times the capacity.
`target`: `target_latency` alone, the rate stepped 1x, 4x, 1x, against a sweep of fixed batch sizes and waits.
"""

import argparse
from collections.abc import Callable

from virtual import Executor, Run, poisson, simulate

from chairlift.core.items.limits import BatchLimits

MOST = 32
CASES = [(Executor(0.008, 0.00025), 0.05), (Executor(0.008, 0.00025), 0.025), (Executor(0.001, 0.004), 0.06)]
SHARE = 0.99
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


def table(seconds: float, seeds: int) -> None:
    """Print the highest rates."""
    print(f"highest rate with {SHARE:.0%} inside the SLO, requests a second; at most {MOST} a batch, {seconds:g} s, "
          f"mean of {seeds} seeds")  # fmt: skip
    print(
        f"{'executor':16}{'SLO ms':>8}{'capacity':>10}{'greedy':>8}{'ours':>8}{'ours at 130%':>14}{'of capacity':>13}"
    )
    for executor, slo in CASES:
        # A longer run for the slow executor, so that all see as many requests.
        capacity = executor.capacity(MOST)
        length = seconds * 2000 / capacity
        greedy = BatchLimits(max_batch_size=MOST, max_waiting=10**6)
        ours = BatchLimits(max_batch_size=MOST, default_timeout=slo)
        rates = [highest_rate(limits, executor, slo, length, seeds) for limits in (greedy, ours)]
        good = simulate(ours, executor, poisson(1.3 * capacity, length, 1)).goodput(slo)
        print(f"{executor.name:16}{slo * 1e3:8.0f}{capacity:10.0f}{rates[0]:8.0f}{rates[1]:8.0f}{good:14.0f}"
              f"{good / capacity:13.1%}", flush=True)  # fmt: skip


def overload(seconds: float, seeds: int) -> None:
    """Print what becomes of everyone when more come than can be served; one seed."""
    del seeds
    print(
        f"{'executor':16}{'SLO ms':>8}{'load':>6}{'goodput':>9}{'refused':>9}{'dropped':>9}{'late':>6}"
        f"{'mean batch':>12}"
    )
    for executor, slo in CASES:
        capacity = executor.capacity(MOST)
        for load in (0.5, 0.9, 1.0, 1.3, 2.0, 10.0):
            limits = BatchLimits(max_batch_size=MOST, default_timeout=slo)
            run = simulate(limits, executor, poisson(load * capacity, seconds * 2000 / capacity / max(load, 1), 1))
            late = len(run.lives) - run.inside(slo)
            print(f"{executor.name:16}{slo * 1e3:8.0f}{load:6.0%}{run.goodput(slo):9.0f}{run.refused:9}{run.dropped:9}"
                  f"{late:6}{run.mean_batch:12.1f}", flush=True)  # fmt: skip


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


def target(seconds: float, seeds: int) -> None:
    """Print the P95 of each period 20 batches after its step, and the rate that each setting holds; one seed."""
    del seeds
    print("a target alone, rate stepped 1x, 4x, 1x: P95 in ms from 20 batches after each step, at 90% of the rate that")
    print("the best fixed setting holds; and the highest 4x rate at which all three periods are inside")
    print(f"{'executor':16}{'target ms':>10}{'setting':>24}{'4x rate':>9}{'P95 1x':>8}{'4x':>7}{'1x':>7}{'holds':>7}")
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
        for name, limits in ((best, fixed[best]), ("target alone", chosen)):
            first, second, third = (1e3 * each for each in p95s(limits, executor, rate, length))
            most = held(limits, executor, slo, length)
            print(f"{executor.name:16}{slo * 1e3:10.0f}{name:>24}{rate:9.0f}{first:8.1f}{second:7.1f}{third:7.1f}"
                  f"{most:7.0f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"table": table, "overload": overload, "target": target}
    parser.add_argument("parts", nargs="*", default=list(parts), help="table, overload, target; all if none is given")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="at 2,000 requests a second; longer for slower ones"
    )
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    for name in args.parts:
        parts[name](args.seconds, args.seeds)
        print()


if __name__ == "__main__":
    main()

"""The dispatcher in real time, with no HTTP: open-loop Poisson load on a thread that sleeps alpha + beta * b.

    python benchmarks/dynamic/inprocess.py [--alpha 8] [--beta 0.25] [--slo 50] [--rates 1000 1600 2000 2600] [--seconds
    10]

Latency counts from the intended arrival, so a slow dispatcher can not hide. `cpu` is the process's CPU time per
request, the load generator included; `generator` is what that takes with no dispatcher behind it.
"""

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from thread_executor import ThreadExecutor

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.items.dispatcher import Dispatcher
from chairlift.errors import ChairliftError
from chairlift.runners.items import ItemInfo


class Sleeper:
    """A runner that takes `alpha` + `beta` * b seconds a batch."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha = alpha
        self.beta = beta

    def load(self) -> ItemInfo:
        """Nothing to read."""
        return ItemInfo(task="python", device="cpu", dtype="")

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Nothing to pay for."""

    def run(self, payloads: Sequence[Any]) -> list[Any]:
        """Sleep, and give back what came."""
        time.sleep(self.alpha + self.beta * len(payloads))
        return list(payloads)

    def close(self) -> None:
        """Nothing to release."""


class Tally:
    """What became of the requests of one run."""

    def __init__(self, slo: float) -> None:
        self.slo = slo
        self.sent = self.inside = self.late = self.refused = 0
        self.latencies: list[float] = []

    def answered(self, arrival: float, future: "asyncio.Future[Any]") -> None:
        """Count one request's end."""
        if future.exception() is not None:
            self.refused += 1
            return
        latency = time.monotonic() - arrival
        self.latencies.append(latency)
        if latency <= self.slo:
            self.inside += 1
        else:
            self.late += 1

    def percentile(self, q: float) -> float:
        """Latency that this share of the answers kept."""
        self.latencies.sort()
        return self.latencies[int(q * (len(self.latencies) - 1))] if self.latencies else float("nan")


async def load(submit: Callable[[float], None], rate: float, seconds: float) -> int:
    """Call `submit` with the intended arrival of each request, as near to it as the loop can; return how many."""
    rng = random.Random(1)
    began = arrival = time.monotonic()
    sent = 0
    while True:
        arrival += rng.expovariate(rate)
        if arrival > began + seconds:
            return sent
        delay = arrival - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        submit(arrival)
        sent += 1


async def run(alpha: float, beta: float, slo: float, rate: float, seconds: float) -> tuple[Tally, float]:
    """One run at one rate; return its tally, and the CPU seconds of the whole."""
    runner = Sleeper(alpha, beta)
    executor = ThreadExecutor(runner, runner.load())
    dispatcher = Dispatcher(BatchLimits(max_batch_size=32, default_timeout=slo), [executor])
    # A few batches of different sizes, so that the first requests are not those that teach the cost model.
    for size in (1, 2, 8, 32):
        await asyncio.gather(*(dispatcher.submit(None, timeout=60.0) for _ in range(size)))
    tally = Tally(slo)

    def submit(arrival: float) -> None:
        tally.sent += 1
        try:
            future = dispatcher.submit(None)
        except ChairliftError:
            tally.refused += 1
        else:
            future.add_done_callback(lambda future: tally.answered(arrival, future))

    gc.collect()
    gc.freeze()
    cpu = time.process_time()
    await load(submit, rate, seconds)
    await dispatcher.drain(10)
    cpu = time.process_time() - cpu
    await dispatcher.close()
    await executor.stop()
    return tally, cpu


async def generator_cpu(rate: float, seconds: float) -> float:
    """CPU seconds per request of the load alone: a future that is there at once."""
    loop = asyncio.get_running_loop()
    tally = Tally(1.0)

    def submit(arrival: float) -> None:
        future = loop.create_future()
        future.add_done_callback(lambda future: tally.answered(arrival, future))
        future.set_result(None)

    cpu = time.process_time()
    sent = await load(submit, rate, seconds)
    return (time.process_time() - cpu) / sent


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=8.0, help="milliseconds a batch")
    parser.add_argument("--beta", type=float, default=0.25, help="milliseconds an item")
    parser.add_argument("--slo", type=float, default=50.0, help="milliseconds")
    parser.add_argument("--rates", type=float, nargs="+", default=[1000, 1600, 1800, 1900, 2000, 2600])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    args = parser.parse_args()
    recording = Recording(start("inprocess", vars(args)), args.out)
    for number in range(1, args.rounds + 1):
        for rate in args.rates:
            alone = await generator_cpu(rate, min(args.seconds, 3.0))
            tally, cpu = await run(args.alpha / 1e3, args.beta / 1e3, args.slo / 1e3, rate, args.seconds)
            recording.add(
                {
                    "round": number,
                    "rate": rate,
                    "inside": tally.inside / tally.sent,
                    "late": tally.late,
                    "refused": tally.refused,
                    "goodput": tally.inside / args.seconds,
                    "p50_ms": tally.percentile(0.5) * 1e3,
                    "p99_ms": tally.percentile(0.99) * 1e3,
                    "cpu_us": cpu / tally.sent * 1e6,
                    "generator_us": alone * 1e6,
                }
            )
    print(markdown(recording.results))


def markdown(results: Results) -> str:
    """A row for each rate."""
    settings = results["settings"]
    capacity = 32 / (settings["alpha"] + 32 * settings["beta"]) * 1e3
    about = (
        f"{settings['alpha']:g} + {settings['beta']:g} b ms, at most 32: capacity {capacity:.0f}/s; "
        f"target {settings['slo']:g} ms"
    )
    columns = (
        Column("inside", "inside", "{:.2%}"),
        Column("late", "late"),
        Column("refused", "refused"),
        Column("goodput", "goodput/s"),
        Column("p50_ms", "p50 ms", "{:.1f}"),
        Column("p99_ms", "p99 ms", "{:.1f}"),
        Column("cpu_us", "us CPU", "{:.1f}"),
        Column("generator_us", "of it the generator", "{:.1f}"),
    )
    return f"{caption(results)}; {about}:\n\n{table(results['runs'], [Column('rate', 'rate/s')], columns)}"


if __name__ == "__main__":
    uvloop.run(main())

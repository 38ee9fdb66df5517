"""Virtual time: the production scheduler, an executor that takes alpha + beta * b, and nobody who waits for it."""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chairlift.core.finished import Shed
from chairlift.core.items.item import Batch, BatchResult, Item
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.scheduler import ItemScheduler


@dataclass(frozen=True)
class Executor:
    """Takes `alpha` + `beta` * computed size seconds a batch."""

    alpha: float
    beta: float

    @property
    def name(self) -> str:
        """As a formula."""
        return f"{self.alpha * 1e3:g} + {self.beta * 1e3:g} b ms"

    def seconds(self, computed: float) -> float:
        """How long a batch takes."""
        return self.alpha + self.beta * computed

    def capacity(self, batch_size: int) -> float:
        """Items a second in full batches."""
        return batch_size / self.seconds(batch_size)


@dataclass
class Life:
    """One item that was answered, in seconds."""

    arrival: float
    done: float
    batch: int

    @property
    def latency(self) -> float:
        """From arrival to answer."""
        return self.done - self.arrival


@dataclass
class Run:
    """What became of everyone."""

    sent: int = 0
    refused: int = 0
    dropped: int = 0
    seconds: float = 0.0
    lives: list[Life] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def inside(self, slo: float) -> int:
        """How many were answered within `slo`."""
        return sum(life.latency <= slo + 1e-9 for life in self.lives)

    def goodput(self, slo: float) -> float:
        """Answers within `slo` for each second of arrivals."""
        return self.inside(slo) / self.seconds

    def percentile(self, q: float) -> float:
        """Latency that this share of the answers kept."""
        latencies = sorted(life.latency for life in self.lives)
        return latencies[min(int(q * len(latencies)), len(latencies) - 1)] if latencies else float("nan")

    @property
    def mean_batch(self) -> float:
        """Items in a batch, on average."""
        return sum(len(batch.items) for batch in self.batches) / max(len(self.batches), 1)


def poisson(rate: float | Callable[[float], float], seconds: float, seed: int) -> Iterator[Item]:
    """Yield items of size 1 as they arrive, at a steady rate or one that follows the time."""
    rng, now, number = random.Random(seed), 0.0, 0
    while True:
        now += rng.expovariate(rate(now) if callable(rate) else rate)
        if now > seconds:
            return
        number += 1
        yield Item(id=str(number), arrival=now)


def simulate(limits: BatchLimits, executor: Executor, arrivals: Iterator[Item], num_instances: int = 1) -> Run:
    """Serve everyone, in the order of events; the scheduler is asked only when the engine would ask it."""
    scheduler, run = ItemScheduler(limits, num_instances), Run()
    ends: list[tuple[float, int, Batch]] = []
    arrived: dict[str, float] = {}
    coming = next(arrivals, None)
    now = 0.0
    while coming is not None or ends or scheduler.num_waiting:
        moments = [coming.arrival] if coming is not None else []
        moments += [ends[0][0]] if ends else []
        moments += [scheduler.ask_again] if scheduler.ask_again is not None else []
        now = max(now, min(moments))
        while ends and ends[0][0] <= now:
            _, _, batch = heapq.heappop(ends)
            seconds = executor.seconds(batch.computed)
            for end in scheduler.update(batch, BatchResult(seconds=seconds), now):
                run.lives.append(Life(arrived.pop(end.id), now, batch.id))
        while coming is not None and coming.arrival <= now:
            run.sent += 1
            run.seconds = coming.arrival
            try:
                scheduler.add(coming)
                arrived[coming.id] = coming.arrival
            except Shed:
                run.refused += 1
            coming = next(arrivals, None)
        while (sent := scheduler.schedule(now)) is not None:
            run.batches.append(sent)
            heapq.heappush(ends, (now + executor.seconds(sent.computed), sent.id, sent))
        run.dropped += len(scheduler.take_dropped())
    return run

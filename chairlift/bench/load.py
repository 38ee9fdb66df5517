"""Load on a server: an open loop, whose requests come by themselves, or a closed one, whose clients wait."""

import asyncio
import gc
import time
from collections.abc import Coroutine, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvloop
from tqdm import tqdm

from chairlift.bench.completion_stream import Outcome, Target, stream

REDRAW_SECONDS = 0.5
# What the loop's timers count in, and may be early or late by.
_TIMER = 1e-3


class Arrival(NamedTuple):
    """A request, ready to send, and its moment in seconds after the start."""

    offset: float
    request: bytes


@dataclass(slots=True)
class Load:
    """All outcomes of a run; `seconds` is the time in which requests were sent, `cpu` what the client itself used."""

    began: float
    seconds: float
    outcomes: list[Outcome]
    cpu: float


def open_loop(target: Target, arrivals: Sequence[Arrival], seconds: float, drain: float, title: str = "") -> Load:
    """Send each request at its moment, whatever became of the others, and wait up to `drain` seconds for the last."""

    async def drive(bar: tqdm, outcomes: list[Outcome]) -> float:
        began = time.perf_counter()
        tasks = []
        for offset, request in arrivals:
            await _until(began + offset)
            tasks.append(asyncio.create_task(_follow(target, request, began + offset, bar, outcomes)))
        await asyncio.sleep(began + seconds - time.perf_counter())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return began

    return _measured(drive, len(arrivals), title, seconds)


def closed_loop(target: Target, requests: Sequence[bytes], concurrency: int, title: str = "") -> Load:
    """Let `concurrency` clients send a request each as soon as their last one is answered."""

    async def drive(bar: tqdm, outcomes: list[Outcome]) -> float:
        began = time.perf_counter()
        line = iter(requests)

        async def client() -> None:
            for request in line:
                await _follow(target, request, time.perf_counter(), bar, outcomes)

        await asyncio.gather(*(client() for _ in range(min(concurrency, len(requests)))))
        return began

    return _measured(drive, len(requests), title, None)


async def _until(moment: float) -> None:
    """Sleep, and for the last millisecond only let others go first: the loop's timers know no shorter time."""
    await asyncio.sleep(moment - time.perf_counter() - _TIMER)
    while time.perf_counter() < moment:
        await asyncio.sleep(0)


async def _follow(target: Target, request: bytes, due: float, bar: tqdm, outcomes: list[Outcome]) -> None:
    try:
        outcome = await stream(target, request, due)
    except asyncio.CancelledError:
        outcome = Outcome(due, due, time.perf_counter(), error="not answered in time")
    outcomes.append(outcome)
    bar.update()


def _measured(drive: Any, total: int, title: str, seconds: float | None) -> Load:
    outcomes: list[Outcome] = []
    with (
        tqdm(total=total, desc=title, unit="req", leave=False, dynamic_ncols=True, mininterval=REDRAW_SECONDS) as bar,
        _no_collection(),
    ):
        cpu = time.process_time()
        began = _run(drive(bar, outcomes))
        cpu = time.process_time() - cpu
    last = max((outcome.ended for outcome in outcomes), default=began)
    return Load(began, last - began if seconds is None else seconds, outcomes, cpu)


def _run(work: Coroutine[Any, Any, float]) -> float:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextmanager
def _no_collection() -> Any:
    """A collection in the middle of a run would look like a pause of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

"""Load on a server: an open loop, whose requests come by themselves, or a closed one, whose clients wait."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvloop
from tqdm import tqdm

from chairlift.bench.completion_stream import Outcome, Target, stream

REDRAW_SECONDS = 0.5
# What is said of a request that was given up.
LATE = "not answered in time"
# Between two looks at whether a run may end early.
_LOOK_SECONDS = 0.25


class Arrival(NamedTuple):
    """A request, ready to send, and its moment in seconds after the start."""

    offset: float
    request: bytes


class Phase(NamedTuple):
    """So many clients for so many seconds."""

    clients: int
    seconds: float


class _Driven(NamedTuple):
    """When sending began, how long it took (None: until the last answer), and whether it was given up."""

    began: float
    seconds: float | None
    given_up: bool = False


@dataclass(slots=True)
class Load:
    """All outcomes of a run; `seconds` is the time in which requests were sent, `cpu` what the client itself used.

    `given_up`: it ended before all were sent or answered, since they could not change its verdict any more.
    """

    began: float
    seconds: float
    outcomes: list[Outcome]
    cpu: float
    given_up: bool = False


def open_loop(
    target: Target,
    arrivals: Sequence[Arrival],
    seconds: float,
    drain: float,
    title: str = "",
    give_up: Callable[[list[Outcome]], bool] | None = None,
) -> Load:
    """Send each request at its moment, whatever became of the others, and wait up to `drain` seconds for the last.

    `give_up`, asked a few times a second with the outcomes so far, may end it early.
    """

    async def drive(bar: tqdm, outcomes: list[Outcome]) -> _Driven:
        began = time.perf_counter()
        tasks: list[asyncio.Task[Any]] = []

        async def send_and_wait() -> None:
            with _rung([began + each.offset for each in arrivals]) as passing:
                for offset, request in arrivals:
                    await passing.acquire()
                    tasks.append(asyncio.create_task(_follow(target, request, began + offset, bar, outcomes)))
            await asyncio.sleep(began + seconds - time.perf_counter())
            if tasks:
                await asyncio.wait(tasks, timeout=drain)

        sending = asyncio.create_task(send_and_wait())
        given_up = not await _done(sending, lambda: give_up is not None and give_up(outcomes))
        sent_for = min(seconds, time.perf_counter() - began) if given_up else seconds
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return _Driven(began, sent_for, given_up)

    return _measured(drive, len(arrivals), title)


def closed_loop(
    target: Target,
    requests: Sequence[bytes],
    concurrency: int,
    title: str | None = "",
    patience: float | None = None,
) -> Load:
    """Let `concurrency` clients send a request each as soon as their last one is answered. No bar without a title.

    After so many seconds of `patience` who has no answer is given up, and what was not sent is left.
    """

    async def drive(bar: tqdm, outcomes: list[Outcome]) -> _Driven:
        began = time.perf_counter()
        line = iter(requests)

        async def client() -> None:
            for request in line:
                if (await _follow(target, request, time.perf_counter(), bar, outcomes)).error == LATE:
                    break

        clients = [asyncio.create_task(client()) for _ in range(min(concurrency, len(requests)))]
        _, late = await asyncio.wait(clients, timeout=patience) if clients else ((), ())
        for task in late:
            task.cancel()
        await _ended(clients)
        return _Driven(began, None)

    return _measured(drive, len(requests), title)


def changing_loop(
    target: Target, requests: Iterator[bytes], phases: Sequence[Phase], after_each: Callable[[], object]
) -> Load:
    """A closed loop of as many clients as each phase has; a client that leaves, or joins, does so between requests.

    `after_each` phase is called in a thread. A client whose request fails sends no more. Who has no answer at the end
    is given up.
    """

    async def drive(bar: tqdm, outcomes: list[Outcome]) -> _Driven:
        began = time.perf_counter()
        wanted = present = 0
        tasks: list[asyncio.Task[None]] = []

        async def client() -> None:
            nonlocal present
            while present <= wanted:
                outcome = await _follow(target, next(requests), time.perf_counter(), bar, outcomes)
                if outcome.error is not None:
                    break
            present -= 1

        for phase in phases:
            wanted = phase.clients
            tasks += [asyncio.create_task(client()) for _ in range(wanted - present)]
            present = max(present, wanted)
            # Once all have failed there is nobody to wait for.
            await asyncio.wait(tasks, timeout=phase.seconds)
            if not present:
                break
            await asyncio.to_thread(after_each)
        seconds = time.perf_counter() - began
        for task in tasks:
            task.cancel()
        await _ended(tasks)
        return _Driven(began, seconds)

    return _measured(drive, None, None)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for tasks that end, or were cancelled, and raise what one of them did."""
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, Exception):
            raise found


async def _done(task: asyncio.Task[None], give_up: Callable[[], bool]) -> bool:
    """Wait until a task has ended, or end it once `give_up` says so; whether it ended by itself."""
    while not (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
        if give_up():
            task.cancel()
            await asyncio.wait([task])
            return False
    task.result()
    return True


@contextmanager
def _rung(moments: Sequence[float]) -> Iterator[asyncio.Semaphore]:
    """Let one more pass at each of these moments.

    The loop's own timers count whole milliseconds, and to look at the clock meanwhile takes a core from a server on the
    same machine: so a thread sleeps until then.
    """
    loop, passing, stopped = asyncio.get_running_loop(), asyncio.Semaphore(0), threading.Event()

    def ring() -> None:
        for moment in moments:
            if stopped.wait(max(moment - time.perf_counter(), 0.0)):
                return
            loop.call_soon_threadsafe(passing.release)

    thread = threading.Thread(target=ring, name="arrivals", daemon=True)
    thread.start()
    try:
        yield passing
    finally:
        stopped.set()
        thread.join()


async def _follow(target: Target, request: bytes, due: float, bar: tqdm, outcomes: list[Outcome]) -> Outcome:
    try:
        outcome = await stream(target, request, due)
    except asyncio.CancelledError:
        outcome = Outcome(due, due, time.perf_counter(), error=LATE)
    outcomes.append(outcome)
    bar.update()
    return outcome


def _measured(drive: Any, total: int | None, title: str | None) -> Load:
    outcomes: list[Outcome] = []
    with (
        tqdm(
            total=total,
            desc=title,
            unit="req",
            leave=False,
            dynamic_ncols=True,
            mininterval=REDRAW_SECONDS,
            disable=title is None,
        ) as bar,
        _no_collection(),
    ):
        cpu = time.process_time()
        driven = _run(drive(bar, outcomes))
        cpu = time.process_time() - cpu
    last = max((outcome.ended for outcome in outcomes), default=driven.began)
    seconds = last - driven.began if driven.seconds is None else driven.seconds
    return Load(driven.began, seconds, outcomes, cpu, driven.given_up)


def _run(work: Coroutine[Any, Any, _Driven]) -> _Driven:
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

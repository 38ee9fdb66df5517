"""A dispatcher in front of real worker processes: what one caller's item, or a kill, does to all the others."""

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.config.items import ItemConfig
from chairlift.core.items.item import Failure
from chairlift.core.items.limits import BatchLimits
from chairlift.engine import supervisor
from chairlift.engine.items.dispatcher import Dispatcher
from chairlift.engine.items.process_executor import ProcessExecutor
from chairlift.errors import BadItem, ChairliftError, RequestFailed

pytestmark = pytest.mark.processes
MODELS = Path(__file__).parents[1] / "support" / "worker_models.py"


class Served:
    """Executors and the dispatcher in front of them; counts calls, and how they failed."""

    def __init__(self, config: ItemConfig, limits: BatchLimits) -> None:
        self.executors = [ProcessExecutor(config, self._on_ready(n)) for n in range(config.instances)]
        self.dispatcher = Dispatcher(limits, self.executors, on_batch=lambda batch, outcome: self.seen(outcome.failure))
        self.calls: list[Failure | None] = []

    def _on_ready(self, number: int) -> Any:
        return lambda ready: (self.dispatcher.instance_back if ready else self.dispatcher.instance_lost)(number)

    def seen(self, failure: Failure | None) -> None:
        self.calls.append(failure)

    async def ask(self, payloads: list[Any]) -> list[Any]:
        """Results or exceptions, all asked for at once."""
        futures = [self.dispatcher.submit(payload) for payload in payloads]
        answers = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 60)
        return [answer if isinstance(answer, BaseException) else answer.value for answer in answers]


@contextlib.asynccontextmanager
async def serving(name: str, limits: BatchLimits, **settings: Any) -> AsyncIterator[Served]:
    served = Served(ItemConfig(model=f"{MODELS}:{name}", **settings), limits)
    try:
        async with asyncio.timeout(100):
            await asyncio.gather(*(executor.start() for executor in served.executors))
            await asyncio.gather(*(executor.wait_ready() for executor in served.executors))
            yield served
    finally:
        await served.dispatcher.close()
        await asyncio.gather(*(executor.stop() for executor in served.executors))


@pytest.fixture(autouse=True)
def _quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(MODELS.parents[2]))
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.02)


def test_one_poison_item_of_64_fails_alone() -> None:
    async def body() -> None:
        async with serving("Doubles", BatchLimits(max_batch_size=64)) as served:
            results = await served.ask([*range(37), "poison", *range(38, 64)])
            assert isinstance(results[37], RequestFailed)
            assert "RuntimeError: poisoned" in str(results[37])
            assert results[:37] + results[38:] == [2 * n for n in range(64) if n != 37]
            assert len(served.calls) - 1 <= 2 * math.log2(64)
            assert served.executors[0].restarts == 0

    asyncio.run(body())


def test_an_item_that_a_call_refuses_is_found_and_refused_alone() -> None:
    async def body() -> None:
        async with serving("Doubles", BatchLimits(max_batch_size=8)) as served:
            *others, refused = await served.ask([*range(7), "refused late"])
            assert others == [2 * i for i in range(7)]
            assert isinstance(refused, BadItem)
            assert str(refused) == "a number was wanted"

    asyncio.run(body())


def test_out_of_memory_at_32_is_served_at_16() -> None:
    async def body() -> None:
        async with serving("Doubles", BatchLimits(max_batch_size=32), options={"most": 16}) as served:
            assert await served.ask(list(range(32))) == [2 * n for n in range(32)]
            assert served.calls.count(Failure.OUT_OF_MEMORY) == 1
            # And remembered.
            assert await served.ask(list(range(64))) == [2 * n for n in range(64)]
            assert served.calls.count(Failure.OUT_OF_MEMORY) <= 2

    asyncio.run(body())


@pytest.mark.parametrize(("payload", "failure"), [("hang", Failure.TIMED_OUT), ("exit", Failure.DIED)])
def test_an_item_that_hangs_or_kills_takes_nobody_along(payload: str, failure: Failure) -> None:
    async def body() -> None:
        async with serving("Doubles", BatchLimits(max_batch_size=8), call_timeout_s=1.0) as served:
            results = await served.ask([0, 1, 2, payload, 4, 5, 6, 7])
            assert isinstance(results[3], RequestFailed)
            assert results[:3] + results[4:] == [2 * n for n in range(8) if n != 3]
            assert failure in served.calls

    asyncio.run(body())


@pytest.mark.parametrize(("instances", "kills"), [(1, 20), (2, 8)])
def test_killed_again_and_again_under_load(instances: int, kills: int) -> None:
    """Every request is answered or clearly refused, and none hangs."""

    async def body() -> None:
        async with serving("Slow", BatchLimits(max_batch_size=4), instances=instances) as served:
            outcomes: list[str] = []
            finished = asyncio.Event()

            async def caller(number: int) -> None:
                while not finished.is_set():
                    try:
                        answer = await served.dispatcher.submit(number)
                        outcomes.append("answered" if answer.value == number + 1 else "wrong")
                    except ChairliftError as error:
                        outcomes.append(type(error).__name__)
                        await asyncio.sleep(0.01)

            callers = [asyncio.create_task(caller(number)) for number in range(12)]
            for kill in range(kills):
                victim = served.executors[kill % instances]
                before = victim.restarts
                answered = len(outcomes)
                while victim.worker_pid is None or not victim.ready or len(outcomes) < answered + 5:
                    await asyncio.sleep(0.002)
                os.kill(victim.worker_pid, signal.SIGKILL)
                while victim.restarts == before:
                    await asyncio.sleep(0.002)
            finished.set()
            await asyncio.gather(*callers)
            assert sum(executor.restarts for executor in served.executors) == kills
            assert set(outcomes) <= {"answered", "RequestFailed", "Unavailable", "QueueFull"}
            assert outcomes.count("answered") >= 5 * kills
            assert outcomes.count("RequestFailed") <= outcomes.count("answered") // 10

    asyncio.run(body())


def test_streams_reach_their_callers_through_the_line() -> None:
    async def body() -> None:
        async with serving("Counts", BatchLimits(max_batch_size=4)) as served:
            parts: dict[int, list[int]] = {2: [], 3: []}
            futures = [
                served.dispatcher.submit(2, on_part=lambda part: parts[2].append(int(part[0]))),
                served.dispatcher.submit(3, on_part=lambda part: parts[3].append(int(part[0]))),
                served.dispatcher.submit(1),
            ]
            answers = await asyncio.gather(*futures)
            assert parts == {2: [0, 1], 3: [0, 1, 2]}
            assert [len(answer.value) for answer in answers] == [0, 0, 1], "a part is kept for nobody who has had it"

    asyncio.run(body())


def test_a_stream_that_nobody_waits_for_is_stopped_and_its_instance_is_free_for_others() -> None:
    async def body() -> None:
        async with serving("Endless", BatchLimits(max_batch_size=2), call_timeout_s=1000.0) as served:
            for stopped in range(3):
                heard: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]
                futures = [served.dispatcher.submit("on", on_part=each.put_nowait) for each in heard]
                first = await heard[0].get()
                assert first == stopped, "how many were closed before it"
                futures[1].cancel()
                while not heard[1].empty():
                    heard[1].get_nowait()
                for _ in range(10):
                    await heard[0].get()
                assert heard[1].empty()
                (call,) = served.executors[0]._calls
                assert call.streamed == [[], []]
                futures[0].cancel()
            last = await asyncio.wait_for(served.dispatcher.submit("once", on_part=heard[0].put_nowait), 60)
            assert last.batch_size == 1
            assert served.executors[0].restarts == 0
            assert served.calls == [Failure.RAISED] * 3 + [None]
            assert served.dispatcher.scheduler.instances[0].time.num_observed <= 1, "how long it went on tells nothing"

    asyncio.run(body())


def test_a_part_that_can_not_be_sent_ends_its_own_item_only() -> None:
    async def body() -> None:
        async with serving("Endless", BatchLimits(max_batch_size=4)) as served:
            heard: list[list[Any]] = [[], [], []]
            payloads = ["odd", "twice", "twice"]
            futures = [
                served.dispatcher.submit(payload, on_part=parts.append)
                for payload, parts in zip(payloads, heard, strict=True)
            ]
            odd, *others = await asyncio.gather(*futures, return_exceptions=True)
            assert isinstance(odd, RequestFailed)
            assert str(odd).startswith("the part can't be sent: TypeError: builtins.complex can't be sent")
            assert [other.batch_size for other in others] == [3, 3]
            assert heard == [[0], [0, 1], [0, 1]]
            assert served.calls == [None]

    asyncio.run(body())

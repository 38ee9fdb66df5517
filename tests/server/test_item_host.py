"""A model of items with its workers: what an item that ends or hangs them costs everybody else."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.config.items import ItemConfig
from chairlift.config.settings import ServedModel
from chairlift.core.items.item import Failure
from chairlift.engine import supervisor
from chairlift.engine.items import standby
from chairlift.errors import RequestFailed
from chairlift.server.http.exchange import Terms
from chairlift.server.models import item_host
from chairlift.server.models.item_host import ItemHost

pytestmark = pytest.mark.processes
MODELS = Path(__file__).parents[1] / "support" / "worker_models.py"
LONG_S = 1000.0


class Hosted:
    """A host, and how each call of its workers failed, if it did."""

    def __init__(self, config: ItemConfig) -> None:
        self.config = config
        self.host = ItemHost(ServedModel("doubles", config), config, None)
        self.service = self.host.prepare()
        self.dispatcher = self.service.dispatcher
        self.calls: list[Failure | None] = []
        self.dispatcher.on_batch = lambda batch, outcome: self.calls.append(outcome.failure)

    @property
    def failures(self) -> list[Failure]:
        return [failure for failure in self.calls if failure is not None]

    @property
    def standby(self) -> Any:
        return self.host._standby

    @property
    def workers(self) -> list[Any]:
        return [*self.host._executors, *([] if self.standby is None else [self.standby._executor])]

    def submit(self, *payloads: Any) -> list[asyncio.Future[Any]]:
        return self.service.submit(payloads, Terms())

    async def ask(self, *payloads: Any) -> list[Any]:
        """Results or exceptions, all asked for at once."""
        answers = await asyncio.gather(*self.submit(*payloads), return_exceptions=True)
        return [answer if isinstance(answer, BaseException) else answer.value for answer in answers]

    async def until(self, is_so: Callable[[], Any]) -> None:
        while not is_so():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def hosted(**settings: Any) -> AsyncIterator[Hosted]:
    config = ItemConfig(model=f"{MODELS}:Doubles", **({"max_batch_size": 64, "warm_up_sizes": ()} | settings))
    it = Hosted(config)
    try:
        async with asyncio.timeout(100):
            await it.host.start()
            await it.host.wait_ready()
            yield it
    finally:
        for each in it.workers:
            if each is not None and each.worker_pid is not None and config.call_timeout_s == LONG_S:
                os.kill(each.worker_pid, signal.SIGKILL)
        await it.host.stop()


@pytest.fixture(autouse=True)
def _slow_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a back-off here waits for longer than any test."""
    monkeypatch.setenv("PYTHONPATH", str(MODELS.parents[2]))
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", LONG_S)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", LONG_S)


def with_culprit(payload: str) -> list[Any]:
    return [*range(37), payload, *range(38, 64)]


@pytest.mark.parametrize("standby_setting", ["auto", "always", "never"])
@pytest.mark.parametrize(("payload", "failure"), [("hang", Failure.TIMED_OUT), ("exit", Failure.DIED)])
def test_one_of_64_items_ends_or_hangs_workers(payload: str, failure: Failure, standby_setting: str) -> None:
    async def body() -> None:
        async with hosted(call_timeout_s=1.0, standby=standby_setting) as it:
            futures = it.submit(*with_culprit(payload))
            culprit = futures.pop(37)
            answers = await asyncio.gather(*futures)
            assert [answer.value for answer in answers] == [2 * n for n in range(64) if n != 37]
            with pytest.raises(RequestFailed, match=r"\(in each of 3 calls\)"):
                await culprit
            assert it.failures == [failure] * 3
            last = len(it.calls) - it.calls[::-1].index(failure)
            assert len(it.calls) - last <= 1, "nobody else waits for the last try, but who ran beside it"
            assert await it.ask(1) == [2]

    asyncio.run(body())


def test_new_items_are_answered_while_a_suspect_hangs() -> None:
    async def body() -> None:
        async with hosted(call_timeout_s=1.0) as it:
            futures = it.submit(*with_culprit("hang"))
            await it.until(lambda: it.failures)
            it.config.call_timeout_s = LONG_S
            await asyncio.gather(*futures[:37], *futures[38:])
            assert await it.ask(*range(100)) == [2 * n for n in range(100)]
            assert not futures[37].done()
            assert it.failures == [Failure.TIMED_OUT]
            assert it.service.ready

    asyncio.run(body())


def test_requests_are_taken_in_while_a_worker_returns() -> None:
    async def body() -> None:
        async with hosted(standby="never") as it:
            futures = it.submit(*with_culprit("exit"))
            await it.until(lambda: it.failures)
            assert not it.host._executors[0].ready
            assert it.service.ready
            assert await it.ask(7) == [14]
            await asyncio.wait(futures)

    asyncio.run(body())


def test_the_standby_worker_goes_when_it_is_of_no_more_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "LINGER_S", 0.0)

    async def body() -> None:
        async with hosted() as it:
            assert it.standby._executor is None
            futures = it.submit(*with_culprit("exit"))
            await it.until(lambda: it.standby._executor is not None)
            await asyncio.wait(futures)
            await it.until(lambda: it.standby._executor is None and not it.standby._leaving)
            assert await it.ask(1) == [2]
            assert (await it.ask(*with_culprit("exit")))[0] == 0, "and another comes the next time"

    asyncio.run(body())


@pytest.mark.parametrize("why", ["memory", "instances"])
def test_no_standby_worker(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {}
    if why == "memory":
        monkeypatch.setattr(item_host, "host_available_bytes", lambda: 10 * 2**20)
    else:
        settings["instances"] = 2

    async def body() -> None:
        async with hosted(**settings) as it:
            answers = await it.ask(*with_culprit("exit"))
            assert sum(isinstance(answer, RequestFailed) for answer in answers) == 1
            assert it.standby is None or it.standby._starting is None
            assert it.host.restarts >= 2

    asyncio.run(body())


def test_a_standby_worker_that_is_always_there_takes_over() -> None:
    async def body() -> None:
        async with hosted(standby="always") as it:
            await it.until(lambda: it.standby.ready)
            (before,) = await it.ask("pid")
            assert before == it.host._executors[0].worker_pid, "until then it computes nothing"
            os.kill(before, signal.SIGKILL)
            await it.until(lambda: not it.host._executors[0].ready)
            assert it.service.ready
            assert await it.ask("pid") == [it.standby._executor.worker_pid]

    asyncio.run(body())


def test_a_standby_worker_that_cannot_be_loaded_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with hosted() as it:
            made = it.standby._make

            def broken(on_ready: Callable[[bool], None]) -> Any:
                executor = made(on_ready)
                executor._worker._command = ("chairlift.engine.items.worker", ('{"model": "no.such:Class"}',))
                return executor

            it.standby._make = broken
            answers = await it.ask(*with_culprit("exit"))
            assert sum(isinstance(answer, RequestFailed) for answer in answers) == 1
            assert it.service.ready
            await it.until(lambda: "standby worker can't be started" in caplog.text)

    asyncio.run(body())


def test_a_standby_worker_that_could_not_be_loaded_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "AGAIN_S", 0.0)
    prepared = ItemHost.prepare
    made: list[Any] = []

    def breaking(host: ItemHost) -> Any:
        assert host._standby is not None
        make = host._standby._make

        def broken(on_ready: Callable[[bool], None]) -> Any:
            made.append(executor := make(on_ready))
            if len(made) < 3:
                executor._worker._command = ("chairlift.engine.items.worker", ('{"model": "no.such:Class"}',))
            return executor

        host._standby._make = broken
        return prepared(host)

    monkeypatch.setattr(ItemHost, "prepare", breaking)

    async def body() -> None:
        async with hosted(standby="always") as it:
            await it.until(lambda: it.standby.ready)
            assert len(made) == 3
            os.kill(it.host._executors[0].worker_pid, signal.SIGKILL)
            await it.until(lambda: not it.host._executors[0].ready)
            assert await it.ask("pid") == [made[2].worker_pid]

    asyncio.run(body())

"""Models as running things: whether the front still minds their workers, and how often those were started anew."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.items_harness import function

from chairlift.config.items import ItemConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel, Settings
from chairlift.engine import supervisor
from chairlift.engine.supervisor import Supervisor
from chairlift.errors import Unavailable
from chairlift.server import front
from chairlift.server.app import create_app
from chairlift.server.models.item_host import ItemHost
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.loader import HostLoader
from chairlift.server.models.registry import Models

pytestmark = pytest.mark.processes
MODELS = Path(__file__).parents[1] / "support" / "worker_models.py"


class Hosted:
    """A model in a worker of its own, and the application in front of it."""

    def __init__(self) -> None:
        served = ServedModel("doubles", ItemConfig(model=f"{MODELS}:Doubles"))
        settings = Settings((served,), ServerConfig(data_dir=""))
        loader = HostLoader(settings, lambda served: ItemHost(served, ItemConfig(model=served.config.model), None))
        (host,) = loader.begin()
        assert isinstance(host, ItemHost)
        self.host = host
        self.supervisor: Supervisor = host._executors[0]._worker
        app = create_app(Models([loader.prepare(host)], loader), settings.server)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1")

    async def live(self) -> tuple[int, int, str]:
        """The answers of both protocols' probes, and what is said to be wrong."""
        ours, theirs = await self.http.get("/health/live"), await self.http.get("/v2/health/live")
        return ours.status_code, theirs.status_code, ours.json().get("problem", "")

    async def until_stuck(self) -> str:
        # It may become stuck between the two questions, so only what is asked second tells of both.
        while (found := await self.live())[1] == 200:
            assert found[0] == 200
            await asyncio.sleep(0.02)
        found = await self.live()
        assert found[:2] == (503, 503)
        return found[2]


def hosting(monkeypatch: pytest.MonkeyPatch, test: Callable[[Hosted], Awaitable[None]]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(MODELS.parents[2]))

    async def main() -> None:
        hosted = Hosted()
        assert await hosted.live() == (200, 200, "")
        await hosted.host.start()
        try:
            await test(hosted)
        finally:
            await hosted.http.aclose()
            await hosted.host.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_whose_workers_die_is_alive_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(hosted: Hosted) -> None:
        await hosted.host.wait_ready()
        pid = hosted.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while hosted.supervisor.restarts < 1 or hosted.supervisor.state != "ready":
            assert (await hosted.live())[:2] == (200, 200)
            await asyncio.sleep(0.02)
        families = text_string_to_metric_families((await hosted.http.get("/metrics")).text)
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        assert samples["chairlift_worker_restarts_total"] == 1
        assert samples["chairlift_ready"] == 1

    hosting(monkeypatch, body)


def test_a_front_that_keeps_no_worker_alive_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(hosted: Hosted) -> None:
        await hosted.host.wait_ready()
        assert hosted.supervisor._task is not None
        hosted.supervisor._task.cancel()
        assert await hosted.until_stuck() == "doubles: nobody keeps its worker alive any more"

    hosting(monkeypatch, body)


def test_a_supervisor_that_fails_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Supervisor) -> str:
        raise ZeroDivisionError

    async def body(hosted: Hosted) -> None:
        assert await hosted.until_stuck() == "doubles: nobody keeps its worker alive any more"
        assert (await hosted.http.get("/health/ready")).status_code == 503

    monkeypatch.setattr(Supervisor, "_run_worker", broken)
    hosting(monkeypatch, body)


@pytest.mark.parametrize(
    ("task", "problem"), [("_receive", "nobody has read what"), ("_mind", "nobody has looked after")]
)
def test_a_front_that_does_not_hear_its_workers_is_not_alive(
    task: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(self: Supervisor, *_: Any) -> None:
        await asyncio.Event().wait()

    async def body(hosted: Hosted) -> None:
        assert f"doubles: {problem} its worker" in await hosted.until_stuck()

    monkeypatch.setattr(Supervisor, task, stuck)
    # Longer than a busy machine keeps the one from running that is not stuck.
    monkeypatch.setattr(supervisor, "DEAF_S", 2.0)
    hosting(monkeypatch, body)


def test_an_unload_goes_on_when_whoever_asked_for_it_is_gone() -> None:
    """A client of gRPC that hangs up, say, ends the call that it made."""

    async def main() -> None:
        go, gone = asyncio.Event(), []

        class Slow:
            def available(self) -> list[str]:
                return ["function"]

            def problem(self) -> None:
                return None

            async def load(self, name: str, changes: Any) -> list[Any]:
                raise NotImplementedError

            async def unload(self, model: Any) -> None:
                await go.wait()
                gone.append(model)

        service, _ = function()
        models = Models([service], Slow())
        asking = asyncio.create_task(models.unload("function"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert models.all() == []
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        go.set()
        while not gone:
            await asyncio.sleep(0)
        assert gone == [service]

    asyncio.run(asyncio.wait_for(main(), 10))


class FakeHost:
    """A model as a running thing that does nothing. Its tokenizer takes as long to read as the test says."""

    problem, restarts, about = None, 0, "fake"

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.service, _ = function(served.name)
        self.reads, self.read = threading.Event(), threading.Event()
        self.read.set()
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopped = False

    async def start(self) -> None:
        pass

    def prepare(self) -> ItemService:
        self.reads.set()
        self.read.wait(10)
        return self.service

    async def wait_ready(self) -> None:
        await self.loaded

    def fail(self) -> None:
        """Have it fail to load."""
        self.service.state = "failed"
        self.loaded.set_exception(Unavailable("it can't be loaded"))

    def give_up(self, reason: str) -> None:
        self.service.state, self.service.failure = "failed", reason

    async def drain(self, timeout: float) -> None:
        self.service.state = "draining"
        if not self.loaded.done():
            self.loaded.set_exception(Unavailable("the server is shutting down"))

    async def stop(self) -> None:
        self.stopped = True


def settings_of(*names: str) -> Settings:
    return Settings(tuple(ServedModel(each, ItemConfig(model=f"{MODELS}:Doubles")) for each in names), ServerConfig())


def test_a_load_that_is_cancelled_while_files_are_read_leaves_nothing() -> None:
    async def main() -> None:
        made: list[FakeHost] = []

        def host(served: ServedModel) -> Any:
            made.append(FakeHost(served))
            made[-1].read.clear()
            return made[-1]

        loader = HostLoader(settings_of("a"), host)
        loading = asyncio.create_task(loader.load("a", {}))
        while not made or not made[0].reads.is_set():
            await asyncio.sleep(0.001)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        made[0].read.set()
        # In this thread, or one that is free: behind all that the other had to do.
        await asyncio.get_running_loop().shutdown_default_executor()
        assert made[0].stopped
        assert loader.hosts == []
        assert loader._by_service == {}

    asyncio.run(asyncio.wait_for(main(), 30))


class Announcing:
    """A front that says what becomes of models, which load when the test says so; it neither listens nor serves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        monkeypatch.setattr(front, "host", lambda served, server, machine: FakeHost(served))
        monkeypatch.setattr("chairlift.server.models.loader._GRACE_SECONDS", 0.0)
        self.said: list[str] = []
        monkeypatch.setattr(front, "_say", lambda line, to=None: self.said.append(line))
        self.front = made = front._Front(settings_of(*names), socket.socket(), 0.0, None)
        made._services = [made._loader.prepare(each) for each in made._first]
        made._models = self.models = Models(made._services, made._loader)
        config = SimpleNamespace(timeout_graceful_shutdown=5)
        made._server = self.server = SimpleNamespace(should_exit=False, config=config)  # type: ignore[assignment]
        self.hosts: list[Any] = made._first
        self.telling = [
            asyncio.create_task(made._announce_model(*each)) for each in zip(made._first, made._services, strict=True)
        ]
        made._listener.close()

    async def fail(self, place: int) -> None:
        self.hosts[place].fail()
        assert await self.telling[place] is None


def announcing(
    monkeypatch: pytest.MonkeyPatch, names: str, test: Callable[[Announcing], Awaitable[None]]
) -> tuple[bool, list[str]]:
    """Whether the server leaves after all that, and what it has said."""

    async def main() -> tuple[bool, list[str]]:
        it = Announcing(monkeypatch, *names)
        await test(it)
        for task in it.telling:
            task.cancel()
        assert it.front._status == it.server.should_exit
        return it.server.should_exit, it.said

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_a_server_leaves_when_all_that_it_has_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one(it: Announcing) -> None:
        await it.fail(0)

    async def both(it: Announcing) -> None:
        await it.fail(0)
        await it.fail(1)

    said = [f"chairlift: {name}: it can't be loaded" for name in "ab"]
    assert announcing(monkeypatch, "a", one) == (True, said[:1])
    assert announcing(monkeypatch, "ab", one) == (False, said[:1])
    assert announcing(monkeypatch, "ab", both) == (True, said)


def test_whoever_waits_for_a_model_hears_that_it_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_STILL_S", 1e-3)

    async def test(it: Announcing) -> None:
        it.front._listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 8000))  # type: ignore[assignment]
        announced = asyncio.create_task(it.front._announce(None))
        while not it.said or not it.said[-1].startswith("still loading, "):
            await asyncio.sleep(1e-3)
        await it.fail(0)
        await announced
        said = len(it.said)
        await asyncio.sleep(0.02)
        assert len(it.said) == said, "it goes on after the end"

    assert announcing(monkeypatch, "a", test)[0]


def test_a_model_that_cannot_be_served_for_any_other_reason_has_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(it: Announcing) -> None:
        it.hosts[0].loaded.set_exception(OverflowError("too large"))
        assert await it.telling[0] is None
        (service,) = it.models.all()
        assert service.state == "failed"
        assert "OverflowError: too large" in (service.failure or "")

    assert announcing(monkeypatch, "a", test) == (True, ["chairlift: a: too large"])


def test_a_server_stays_when_a_model_is_unloaded_as_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(it: Announcing) -> None:
        await it.models.unload("a")
        assert await it.telling[0] is None

    assert announcing(monkeypatch, "a", test) == (False, [])


def test_what_has_nothing_to_do_with_a_model_has_the_rest_of_the_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        it = Announcing(monkeypatch, "a")
        await it.front._leave("SIGTERM")
        assert it.hosts[0].stopped
        assert it.server.should_exit
        assert 5 < it.server.config.timeout_graceful_shutdown <= it.front._config.drain_timeout_s == 30
        it.telling[0].cancel()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_server_stays_while_one_that_had_failed_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(it: Announcing) -> None:
        await it.fail(0)
        loading = asyncio.create_task(it.models.load("a"))
        while len(it.front._loader.hosts) < 3:
            await asyncio.sleep(0)
        it.front._loader.hosts[-1].loaded.set_result(None)  # type: ignore[attr-defined]
        await loading
        await it.fail(1)

    assert announcing(monkeypatch, "ab", test)[0] is False

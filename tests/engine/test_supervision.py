"""Workers that stand still: who notices, by what, and what is left alone."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from support.model_factory import model_folder
from support.streams import num_tokens, updates_of
from support.stub_runner import spare_workers_torch

from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.engine.lifeline import HEARTBEAT_S
from chairlift.engine.sequences import messages
from chairlift.engine.sequences.client import SequenceClient
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import Add, EngineStats, SequenceUpdate, StepOutput
from chairlift.engine.sequences.updates import Updates
from chairlift.engine.sequences.worker import SequenceWorker
from chairlift.engine.supervisor import Supervisor
from chairlift.engine.watch import Watch
from chairlift.engine.worker_messages import Heartbeat, load_failed
from chairlift.errors import ConfigError, QueueFull, Unavailable, WorkerLost
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.sequences import SequenceInfo

ROOT = Path(__file__).parents[2]


# What the front makes of heartbeats


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


class Told(Watch):
    """A watch over a process of which the system says what the test wants."""

    process = ("S", 0)

    def _ask_system(self) -> tuple[str, int]:
        return self.process


def looks(watch: Watch, most_silence: float | None, limit: int = 100) -> tuple[str | None, float]:
    """What a watch finds, and after how many seconds."""
    for count in range(1, limit + 1):
        if found := watch.look(0, most_silence):
            return found, count * HEARTBEAT_S
    return None, limit * HEARTBEAT_S


def test_a_stopped_process_is_found_early_and_a_silent_one_late(ends: tuple[socket.socket, socket.socket]) -> None:
    watch = Told(ends[0], 1, 3.0)
    assert looks(watch, None) == (None, 50)
    watch = Told(ends[0], 1, 3.0)
    found, seconds = looks(watch, 30.0)
    assert ("no sign of life" in str(found), seconds) == (True, 30)
    watch = Told(ends[0], 1, 3.0)
    watch.process = ("T", 0)
    found, seconds = looks(watch, None)
    assert ("stopped for 3 s" in str(found), seconds) == (True, 3)


def test_a_heartbeat_ends_the_silence(ends: tuple[socket.socket, socket.socket]) -> None:
    watch = Told(ends[0], 1, 3.0)
    watch.process = ("T", 0)
    for _ in range(3):
        assert looks(watch, None, limit=5) == (None, 2.5)
        ends[1].send(msgspec.json.encode(Heartbeat(0)) + b"\n")
        assert watch.look(0, None) is None
    ends[1].send(b'[0]\n[0,"late"]\n[0,"la')
    assert watch.look(0, None) == "late"


def test_a_process_that_swaps_is_slow_and_not_stuck(ends: tuple[socket.socket, socket.socket]) -> None:
    watch = Told(ends[0], 1, 3.0)
    for count in range(100):
        watch.process = ("D", 1000 * count)
        assert watch.look(0, 2.0) is None
    assert looks(watch, 2.0)[0] is not None


def test_the_system_is_asked_about_the_process(ends: tuple[socket.socket, socket.socket]) -> None:
    state, faults = Watch(ends[0], os.getpid(), 3.0)._ask_system()
    assert (state, faults >= 0) == ("R", True)
    assert Watch(ends[0], 2**30, 3.0)._ask_system() == ("", 0)


def test_messages_that_nobody_reads_are_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    watch = Told(ends[0], 1, 3.0)

    def look(sent: int, taken: int) -> float:
        ends[1].send(msgspec.json.encode(Heartbeat(sent)) + b"\n")
        watch.look(taken, None)
        return watch.unread

    assert [look(5, 3), look(5, 4), look(5, 5), look(5, 5)] == [0, 0, 0, 0]
    assert [look(9, 5), look(9, 5), look(9, 5)] == [0, HEARTBEAT_S, 2 * HEARTBEAT_S]
    assert look(9, 6) == 0


# How long a step may take


def test_a_step_is_overdue_after_the_timeout_and_many_times_what_it_should_take() -> None:
    engine, line = SimpleNamespace(longest_step=2.0), SimpleNamespace(overdue=None)
    with zmq.Context() as context, context.socket(zmq.PAIR) as messages:
        SequenceWorker(engine, messages, line, 30.0, shares_machine=False)  # type: ignore[arg-type]
        assert line.overdue(39.5) is None
        assert line.overdue(40.0) == "one step took longer than 40 s, see step_timeout_s"
        engine.longest_step = 0.1
        assert line.overdue(29.5) is None
        assert line.overdue(30.0) == "one step took longer than 30 s, see step_timeout_s"


def test_a_grammar_that_nobody_waits_for_any_more_wakes_the_worker_once() -> None:
    engine = SimpleNamespace(longest_step=0.1, take_prepared=list, clock=time.monotonic)
    line = SimpleNamespace(overdue=None, phase=0)
    with zmq.Context() as context, context.socket(zmq.PAIR) as messages:
        worker = SequenceWorker(engine, messages, line, 30.0, shares_machine=False)  # type: ignore[arg-type]
        engine.on_prepared()
        assert worker._poller.poll(1000)
        assert worker._listen(0)
        assert not worker._poller.poll(0), "it would never sleep again"


def test_however_many_messages_come_the_next_step_does_not_wait_for_all_of_them() -> None:
    added: list[str] = []
    # To take one in takes 4 ms here.
    engine = SimpleNamespace(longest_step=0.1, clock=lambda: 0.004 * len(added), add=lambda each: added.append(each.id))
    line = SimpleNamespace(overdue=None, phase=0)
    with zmq.Context() as context, context.socket(zmq.PAIR) as messages, context.socket(zmq.PAIR) as front:
        messages.bind("inproc://messages")
        front.connect("inproc://messages")
        worker = SequenceWorker(engine, messages, line, 30.0, shares_machine=False)  # type: ignore[arg-type]
        sent = [request(5) for _ in range(7)]
        for each in sent:
            front.send(msgspec.msgpack.encode(Add(each)))
        for taken in (3, 6, 7):
            assert worker._listen(1)
            assert added == [each.id for each in sent[:taken]]


def test_a_worker_that_talks_without_end_leaves_the_event_loop_to_others() -> None:
    class Talking:
        num_heard = 0

        def get(self, option: int) -> int:
            return zmq.POLLIN

        def recv_multipart(self, copy: bool) -> list[bytes]:
            assert self.num_heard < 2_000_000, "nobody else has had a turn"
            self.num_heard += 1
            return []

    async def body() -> None:
        heard, others = Talking(), 0
        supervisor = Supervisor("none", take=lambda frames: None, lost=lambda reason: None)
        supervisor._take = lambda frames: None  # type: ignore[method-assign]
        task = asyncio.create_task(supervisor._receive(heard))  # type: ignore[arg-type]
        while others < 5 and not task.done():
            before = heard.num_heard
            await asyncio.sleep(0)
            others += heard.num_heard > before
        assert not task.done() or task.exception() is None
        task.cancel()

    asyncio.run(body())


def test_who_comes_and_goes_while_another_model_computes_is_told_once() -> None:
    class Waiting:
        """An engine whose turn never comes."""

        longest_step, only_background = 0.1, False

        def __init__(self) -> None:
            self.here: list[str] = []

        @property
        def num_unfinished(self) -> int:
            return len(self.here)

        def clock(self) -> float:
            return time.monotonic()

        def add(self, added: Request) -> None:
            self.here.append(added.id)

        def abort(self, ids: list[str]) -> None:
            self.here = [each for each in self.here if each not in ids]

        def stats(self) -> EngineStats:
            return EngineStats(waiting=len(self.here))

    line = SimpleNamespace(overdue=None, phase=0, sent=0)
    decoder = msgspec.msgpack.Decoder(messages.SequencesToFront)
    first, second = request(5), request(5)
    with zmq.Context() as context, context.socket(zmq.PAIR) as far, context.socket(zmq.PAIR) as front:
        far.bind("inproc://messages")
        front.connect("inproc://messages")
        front.setsockopt(zmq.RCVTIMEO, 20_000)
        worker = SequenceWorker(Waiting(), far, line, 30.0, shares_machine=True)  # type: ignore[arg-type]
        running = threading.Thread(target=worker.run)
        running.start()

        def said() -> Any:
            return decoder.decode(front.recv())

        def send(message: messages.SequencesToWorker) -> None:
            front.send(msgspec.msgpack.encode(message))

        send(Add(first))
        assert isinstance(said(), messages.TurnWanted)
        assert said().stats.waiting == 1
        # This is no news.
        send(messages.TurnAsked(live=True))
        send(Add(second))
        assert said().stats.waiting == 2
        send(messages.Abort([first.id]))
        assert said().stats.waiting == 1
        send(messages.Shutdown())
        running.join(20)
        assert line.sent == 4


def test_what_a_step_should_take_follows_from_loading_and_from_who_runs() -> None:
    class Slow(DecoderRunner):
        def warm_up(self) -> None:
            ticks.append(ticks[-1] + 7.0)

    ticks = [0.0]
    config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)
    engine = Engine(config, Slow(config), clock=lambda: ticks[-1])
    alone = engine.longest_step
    assert alone == pytest.approx(7.0, rel=0.1)
    for _ in range(8):
        engine.add(request(5))
    engine.step()
    assert engine.longest_step > alone


def test_on_a_gpu_what_is_set_up_first_is_not_what_a_step_takes() -> None:
    class OnGpu(DecoderRunner):
        def load(self) -> SequenceInfo:
            info = super().load()
            info.device = "cuda"
            return info

        def warm_up(self) -> None:
            ticks.append(ticks[-1] + seconds.pop(0))

    ticks, seconds = [0.0], [100.0, 10.0, 1.0]
    config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)
    engine = Engine(config, OnGpu(config), clock=lambda: ticks[-1])
    assert engine.longest_step == pytest.approx(1.0, rel=0.1)


# Why a model could not be loaded


def failure_of(error: BaseException) -> tuple[str, bool]:
    try:
        raise error
    except BaseException as raised:
        failed = load_failed(raised)
        return failed.message, failed.final


def test_why_a_model_could_not_be_loaded_is_said_in_a_line() -> None:
    assert failure_of(ConfigError("dtype is wrong\nleave it out")) == ("dtype is wrong\nleave it out", True)
    message, final = failure_of(TypeError("'int' object is not iterable"))
    assert re.fullmatch(r"TypeError: 'int' object is not iterable \(test_supervision\.py, line \d+\)", message)
    assert not final
    many = "[enforce fail] DefaultCPUAllocator: can't allocate memory: 4398046511104 bytes" + "\nframe #0: c10" * 50
    assert failure_of(RuntimeError(many)) == (f"out of memory: RuntimeError: {many.splitlines()[0]}", False)
    assert failure_of(MemoryError()) == ("out of memory: MemoryError", False)
    assert len(failure_of(ValueError("x" * 10_000))[0]) < 400
    # As Python reads the name of a file that is no UTF-8.
    assert failure_of(ConfigError("shard \udcff is missing")) == (r"shard \udcff is missing", True)


# What the front makes of a worker's end. What is sent to it is noted here


class Ready(SequenceClient):
    """A client whose worker is ready, as far as it knows."""

    def __init__(self, max_waiting: int = 1024) -> None:
        super().__init__(SequenceConfig(model="none"), max_waiting)
        self.sent: list[Any] = []
        self._worker.send = lambda frames: self.sent.append(frames)  # type: ignore[method-assign]
        self._worker.state, self._worker._socket = "ready", object()  # type: ignore[assignment]

    def take(self, **stats: int) -> None:
        """Hear of a step."""
        self._take_step(StepOutput([], EngineStats(**stats)))


def test_whom_nobody_wants_any_more_waits_until_the_worker_has_taken_it_in() -> None:
    client = Ready(max_waiting=3)
    streams = client.submit(*(request(number) for number in range(5, 8)))
    for stream in reversed(streams):
        stream.cancel()
    with pytest.raises(QueueFull, match="3 requests wait already"):
        client.submit(request(8))
    client.take(added=2)
    with pytest.raises(QueueFull, match="3 requests wait already"):
        client.submit(request(8))
    client.take(added=3)
    again = client.submit(*(request(number) for number in range(5, 8)))
    client.take(added=6)
    again[0].cancel()
    client.submit(request(8))
    with pytest.raises(QueueFull):
        client.submit(request(9))


def test_the_engine_counts_whom_it_takes_in() -> None:
    config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)
    engine = Engine(config, DecoderRunner(config))
    engine.add(request(5))
    with pytest.raises(ValueError, match="maximum context length"):
        engine.add(request(500))
    assert engine.stats().added == 2


def test_a_step_with_too_much_for_one_reader_is_taken_in_for_all_others() -> None:
    client = Ready()
    streams = client.submit(*(request(number) for number in range(5, 8)))
    other = client.submit(request(8))[0]
    updates = Updates(streams, most_unread=1000)

    def step(*ended: FinishReason | None) -> None:
        everybody = zip((*streams, other), (*ended, None), strict=True)
        found = [SequenceUpdate(stream.request.id, [1], reason) for stream, reason in everybody]
        client._take_step(StepOutput(found, EngineStats(added=4)))

    async def go() -> None:
        reading = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        step(None, None, None)
        assert len(await reading) == 3
        # The third is too much for the first, and ends with that very update.
        step(None, None, FinishReason.LENGTH)
        assert client.num_unfinished == 1
        aborted = [msgspec.msgpack.decode(frames[0], type=messages.SequencesToWorker) for frames in client.sent[4:]]
        assert aborted == [messages.Abort([stream.request.id]) for stream in streams[:2]]
        step(None, None, None)
        assert [len(stream.updates) for stream in (*streams, other)] == [0, 0, 0, 3]
        with pytest.raises(QueueFull, match="unread"):
            await anext(updates)

    asyncio.run(go())


@pytest.mark.parametrize(("parties", "alone"), [([3], True), ([1, 1], False)])
def test_who_was_alone_in_a_worker_that_died_is_told(parties: list[int], alone: bool) -> None:
    client = Ready()
    streams = [each for count in parties for each in client.submit(*(request(5 + i) for i in range(count)))]
    client._worker._has_loaded = True
    client._worker._end_with("the worker died")
    for stream in streams:
        assert isinstance(stream.error, WorkerLost)
        assert stream.error.alone is alone


def test_who_has_not_ended_as_the_server_ends_the_worker_has_not_ended_it() -> None:
    async def main() -> None:
        client = Ready()
        (stream,) = client.submit(request(5))
        await client.drain(0.001)
        await client.stop()
        assert type(stream.error) is Unavailable

    asyncio.run(main())


def test_a_worker_that_is_being_ended_is_asked_nothing() -> None:
    async def main() -> None:
        client = Ready()
        client._worker._has_loaded = True
        client._worker._end_with("the worker hung")
        assert client._worker.connected, "large processes take their time to end"
        assert await client.explain(["a"]) == {}
        assert client.sent == []
        client._worker.state = "ready"  # the next one
        asking = asyncio.ensure_future(client.explain(["a"]))
        await asyncio.sleep(0)
        assert len(client.sent) == 1
        client._inquiry.answered([])
        assert await asking == {}

    asyncio.run(main())


def test_a_worker_after_the_last_request_is_told_that_no_other_comes() -> None:
    client = Ready()
    sizes = {"max_model_len": 64, "num_blocks": 8, "block_size": 16, "weight_bytes": 1, "kv_bytes": 1}
    info = SequenceInfo(vocab_size=9, dtype="float32", device="cpu", ops="native", **sizes)
    ready = zmq.Frame(msgspec.msgpack.encode(messages.Ready(info)))
    client._take([ready])
    assert client.sent == []
    client.close_queue()
    client._take([ready])
    assert client.sent == [[msgspec.msgpack.encode(messages.CloseQueue())]] * 2


def test_only_steps_are_work() -> None:
    client = Ready()
    for _ in range(5):
        client.take()
    assert client._worker._done == 0
    client.take(step_requests=1)
    assert client._worker._done == 1


@pytest.mark.parametrize(("done", "waited"), [(0, [0.25, 0.5, 1.0]), (1, [0.25, 0.5, 1.0]), (2, [0.0, 0.0, 0.0])])
def test_workers_that_die_of_their_first_step_come_back_ever_later(
    done: int, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def run_worker(self: Supervisor) -> str:
        if len(pauses) == 3:
            self.drain()
            return "is drained"
        self.loaded()
        self._taken = 10
        for _ in range(done):
            self.worked()
        return "died"

    async def pause(self: Supervisor, seconds: float, may_hurry: bool) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(Supervisor, "_run_worker", run_worker)
    monkeypatch.setattr(Supervisor, "_pause", pause)
    asyncio.run(Supervisor("none", take=lambda frames: None, lost=lambda reason: None)._supervise())
    assert pauses == waited


# Real workers, some of them made to fail: SABOTAGE is run in each before anything else

SITE = 'import os\nexec(os.environ.get("SABOTAGE", ""))\n'
STUCK = """
from chairlift.engine.sequences.engine import Engine
add = Engine.add
def stuck(self, request):
    if request.max_tokens == 13:
        {what}
    add(self, request)
Engine.add = stuck
"""
STAND_STILL = {
    "loops": "while True: pass",
    "waits": "import time; time.sleep(1000)",
    "keeps the interpreter": 'import re; re.match("(a+)+$", "a" * 60 + "b")',
}
BROKEN = """
from chairlift.runners.decoder.runner import DecoderRunner
def load(self):
    {what}
DecoderRunner.load = load
"""


LOST = """
from chairlift.runners.decoder.runner import DecoderRunner
execute = DecoderRunner.execute
def lost(self, step):
    if any(start.request.max_tokens == 13 for start in step.started):
        raise RuntimeError("CUDA error: device-side assert triggered")
    return execute(self, step)
DecoderRunner.execute = lost
"""


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Of workers that compute nothing."""
    spare_workers_torch(monkeypatch)
    return lambda code: monkeypatch.setenv("SABOTAGE", code)


@pytest.fixture
def real_sabotage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    return lambda code: monkeypatch.setenv("SABOTAGE", code)


def request(max_tokens: int) -> Request:
    return Request(
        id=f"r{max_tokens}-{time.monotonic_ns()}",
        prompt_ids=[1, 2, 3],
        params=SamplingParams(temperature=0, max_tokens=None),
        max_tokens=max_tokens,
        arrival=time.monotonic(),
    )


async def generate(client: SequenceClient, max_tokens: int = 5) -> int:
    (stream,) = client.submit(request(max_tokens))
    return await num_tokens(stream)


def with_client(test: Callable[[SequenceClient], Awaitable[None]], load_attempts: int = 1, **settings: float) -> None:
    async def main() -> None:
        config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)
        for name, value in settings.items():
            setattr(config, name, value)
        client = SequenceClient(config, load_attempts=load_attempts)
        await client.start()
        try:
            await test(client)
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.processes
@pytest.mark.parametrize("how", STAND_STILL)
def test_a_worker_that_is_stuck_is_replaced(how: str, sabotage: Callable[[str], None]) -> None:
    sabotage(STUCK.format(what=STAND_STILL[how]))

    async def body(client: SequenceClient) -> None:
        await client.wait_ready()
        with pytest.raises(WorkerLost, match=r"hung .*and is being restarted"):
            await generate(client, 13)
        assert not client.ready
        assert await generate_when_ready(client) == 5
        assert client.restarts == 1

    with_client(body, step_timeout_s=1.0)


@pytest.mark.processes
def test_a_worker_whose_device_is_lost_is_replaced(real_sabotage: Callable[[str], None]) -> None:
    real_sabotage(LOST)

    async def body(client: SequenceClient) -> None:
        await client.wait_ready()
        with pytest.raises(WorkerLost, match=r"died \(exit status 1\) and is being restarted"):
            await generate(client, 13)
        assert await generate_when_ready(client) == 5
        assert client.restarts == 1

    with_client(body)


async def generate_when_ready(client: SequenceClient) -> int:
    await client.wait_ready()
    return await generate(client)


@pytest.mark.processes
def test_gauges_are_those_of_the_worker_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_workers_torch(monkeypatch)

    async def body(client: SequenceClient) -> None:
        await client.wait_ready()
        assert client.info is not None
        seen: list[EngineStats] = []
        client.on_step = seen.append
        (stream,) = client.submit(request(390))
        updates = updates_of(stream)
        await anext(updates)
        assert (client.stats.running, client.stats.kv_blocks_used > 0) == (1, True)
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"died \(killed by SIGKILL\)"):
            async for _ in updates:
                pass
        assert client.stats == seen[-1] == EngineStats()
        await client.wait_ready()
        assert client.stats == EngineStats(kv_blocks_total=client.info.num_blocks)

    with_client(body)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "reason", "attempts"),
    [
        ("raise RuntimeError('no such tensor')", r"RuntimeError: no such tensor \(<string>, line \d+\)", 2),
        ("raise MemoryError", "out of memory: MemoryError", 2),
        ("import os; os.kill(os.getpid(), 9)", r"its worker died \(killed by SIGKILL\) while it loaded", 2),
        ("import os; os.kill(os.getpid(), 19)", r"its worker hung \(its process was stopped .*while it loaded", 1),
    ],
)
def test_whatever_keeps_a_model_from_loading_ends_in_a_reason(
    what: str, reason: str, attempts: int, sabotage: Callable[[str], None]
) -> None:
    sabotage(BROKEN.format(what=what))

    async def body(client: SequenceClient) -> None:
        with pytest.raises(Unavailable, match=reason):
            await client.wait_ready()
        assert (client.state, client.restarts) == ("failed", attempts - 1)

    with_client(body, load_attempts=attempts, heartbeat_timeout_s=1.0)


FRONT = """
import asyncio, sys
from chairlift.config.sequences import SequenceConfig
from chairlift.engine.sequences.client import SequenceClient
async def main():
    client = SequenceClient(SequenceConfig(model=sys.argv[1], max_model_len=400, kv_cache_gb=0.01, num_threads=1))
    await client.start()
    if sys.argv[2] == "ready":
        await client.wait_ready()
    while client.worker_pid is None:
        await asyncio.sleep(0.01)
    print(client.worker_pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.processes
@pytest.mark.parametrize("state", ["loading", "ready"])
def test_no_worker_of_a_language_model_outlives_its_front(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if state == "ready":
        spare_workers_torch(monkeypatch)
    else:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", FRONT, str(model_folder()), state]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    worker = int(front.stdout.readline())
    if state == "ready":
        os.kill(worker, signal.SIGSTOP)
    front.kill()
    front.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}/stat").exists() and _state(worker) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


ECHO = """
import sys, time, zmq
time.sleep(0.5)
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(sys.argv[1])
while True:
    socket.send_multipart(socket.recv_multipart())
"""


@pytest.mark.processes
def test_what_is_said_before_the_worker_listens_comes_to_it_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heard: list[list[bytes]] = []

    async def main() -> None:
        supervisor = Supervisor("echo", take=lambda frames: heard.append([frame.bytes for frame in frames]), lost=print)
        await supervisor.start()
        while not supervisor.connected:
            await asyncio.sleep(0)
        early = [[b"first", b"of two parts"], [b"second"]]
        for frames in early:
            supervisor.send(frames)
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        many = [[b"%d" % number] for number in range(100)]
        for frames in many:
            supervisor.send(frames)
        while len(heard) < 102:
            await asyncio.sleep(0.01)
        assert heard == early + many
        supervisor.drain()
        supervisor.kill()
        await supervisor.stop(b"")

    asyncio.run(main())


def test_without_a_folder_for_temporary_files_a_worker_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failure() -> str:
        supervisor = Supervisor("echo", take=lambda frames: None, lost=lambda reason: None)
        await supervisor.start()
        try:
            with pytest.raises(Unavailable) as error:
                await supervisor.wait_ready()
            return str(error.value)
        finally:
            await supervisor.stop(b"")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert "there is no folder for its socket: No such file or directory; set TMPDIR" in asyncio.run(failure())


@pytest.mark.processes
def test_a_worker_starts_again_where_its_folder_was_cleaned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    places = tmp_path / "t"
    places.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(places))
    monkeypatch.setattr("chairlift.engine.supervisor.FIRST_BACKOFF_S", 0.01)

    async def main() -> None:
        supervisor = Supervisor("echo", take=lambda frames: None, lost=lambda reason: None, load_attempts=2)
        await supervisor.start()
        while not supervisor.connected:
            await asyncio.sleep(0.001)
        (folder,) = places.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(folder)
        supervisor.kill()
        while not (supervisor.restarts and supervisor.connected):
            assert supervisor.state != "failed", supervisor.failure
            await asyncio.sleep(0.001)
        supervisor.drain()
        supervisor.kill()
        await supervisor.stop(b"")
        assert list(places.iterdir()) == []

    asyncio.run(main())

"""Executors with real worker processes: results, and everything that a model's code can do wrong."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.encoder_factory import encoder_folder

from chairlift.config.items import ItemConfig
from chairlift.core.items.item import Failure
from chairlift.engine import supervisor
from chairlift.engine.items import arrays, process_executor, worker_answers
from chairlift.engine.items.call import CallFailed
from chairlift.engine.items.process_executor import ProcessExecutor
from chairlift.engine.items.worker import compute
from chairlift.errors import BadItem, Unavailable
from chairlift.runners.items import Encoding
from chairlift.runners.make_runner import make_runner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "dynamic"))
from thread_executor import ThreadExecutor

pytestmark = pytest.mark.processes
MODELS = Path(__file__).parents[1] / "support" / "worker_models.py"


@pytest.fixture(autouse=True)
def _workers_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(MODELS.parents[2]))


def config(name: str, **settings: Any) -> ItemConfig:
    return ItemConfig(model=f"{MODELS}:{name}", **settings)


@contextlib.asynccontextmanager
async def started(given: ItemConfig) -> AsyncIterator[ProcessExecutor]:
    executor = ProcessExecutor(given)
    await executor.start()
    try:
        async with asyncio.timeout(60):
            await executor.wait_ready()
            yield executor
    finally:
        await executor.stop()


def shown(results: list[Any]) -> list[Any]:
    return [f"{type(r).__name__}: {r}" if isinstance(r, Exception) else r for r in results]


async def failure_of(executor: ProcessExecutor | ThreadExecutor, *payloads: Any) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await executor.run(payloads)
    return failed.value


def test_results_errors_and_arrays() -> None:
    async def body() -> None:
        async with started(config("Doubles", num_threads=1)) as executor:
            assert executor.info is not None
            assert executor.info.task == "python"
            made = await executor.run([1, "own error", {"x": np.arange(3000.0)}, "threads", "odd", "a", "deep"])
            assert made.seconds > 0
            assert shown(made.results[:2]) == [2, "RequestFailed: ValueError: mine alone"]
            np.testing.assert_array_equal(made.results[2]["x"], np.arange(3000.0) * 2)
            assert made.results[3] == "1"
            assert str(made.results[4]).startswith("the result can't be sent: TypeError: builtins.complex")
            assert made.results[5] == "aa"
            refused = await executor.run(["refused", 2])
            assert shown(refused.results) == ["BadItem: a number is wanted", 4]
            assert str(made.results[6]).startswith(
                "the result can't be sent: ValueError: the value is nested more than"
            )
            raised = await failure_of(executor, 1, "poison")
            assert (raised.failure, raised.detail) == (Failure.RAISED, "RuntimeError: poisoned")
            unsent = await failure_of(executor, 1, object())
            assert unsent.failure is Failure.RAISED
            assert "can't be sent" in unsent.detail
            # The pipe that tells the worker of the front's end is not the model's to read.
            assert (await failure_of(executor, "stdin")).detail.startswith("EOFError")
            assert executor.restarts == 0

    asyncio.run(body())


def test_errors_whose_text_can_not_be_sent_as_it_is_cost_no_worker() -> None:
    async def body() -> None:
        async with started(config("Doubles")) as executor:
            made = await executor.run(["no utf-8", "refused in no utf-8", "no text", 1])
            assert shown(made.results) == [
                "RequestFailed: FileNotFoundError: a\\udc80b",
                "BadItem: a\\udc80b",
                "RequestFailed: HasNoText: (its text can't be had: ValueError)",
                2,
            ]
            failed = await failure_of(executor, "no utf-8 late", 1)
            assert (failed.failure, failed.detail) == (Failure.RAISED, "FileNotFoundError: a\\udc80b")
            failed = await failure_of(executor, "no text late", 1)
            assert failed.detail == "HasNoText: (its text can't be had: ValueError)"
            assert executor.restarts == 0

    asyncio.run(body())


def test_results_that_fit_alone_fit_together() -> None:
    async def body() -> None:
        async with started(config("Doubles")) as executor:
            made = await executor.run(["as deep as may be", 1])
            assert str(made.results[0]).count("[") == 96
            assert made.results[1] == 2
            assert executor.restarts == 0

    asyncio.run(body())


def test_items_may_have_any_number_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of JSON was held to its depth before, and the front has no time to count what is in it."""
    monkeypatch.setattr(arrays, "_MAX_LISTS", 10)

    async def body() -> None:
        async with started(config("Doubles")) as executor:
            assert (await executor.run([[[]] * 20])).results == [[[]] * 40]
            endless: list[Any] = []
            endless.append(endless)
            unsent = await failure_of(executor, endless)
            assert (unsent.failure, executor.restarts) == (Failure.RAISED, 0)
            assert unsent.detail.startswith("the payload can't be sent: ValueError")

    asyncio.run(body())


def test_running_out_of_memory_is_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with started(config("Doubles", options={"most": 4})) as executor:
            failed = await failure_of(executor, *range(5))
            assert (failed.failure, failed.detail) == (Failure.OUT_OF_MEMORY, "MemoryError: 5 is more than 4")
            assert (await executor.run(range(4))).results == [0, 2, 4, 6]

    asyncio.run(body())
    logged = capfd.readouterr().err.splitlines()
    assert logged == ["WARNING a call of 5 items failed: MemoryError: 5 is more than 4"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError("no room\nfor 2"), "a call of 2 items failed: MemoryError: no room"),
        (
            RuntimeError("CUDA out of memory. " + 400 * "x"),
            "a call of 2 items failed: RuntimeError: CUDA out of memory. x",
        ),
        (BadItem("odd"), "a call of 2 items failed: BadItem: odd"),
    ],
)
def test_what_a_traceback_would_not_explain_is_one_line_of_the_log(
    error: Exception, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        def run(self, payloads: list[int]) -> list[int]:
            raise error

    fails: Any = Fails()
    with pytest.raises(CallFailed):
        compute(fails, [1, 2])
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage().startswith(line)
    assert len(record.getMessage().splitlines()) == 1
    assert len(record.getMessage()) < 400


def test_a_hanging_call_is_ended_and_the_next_one_runs() -> None:
    async def body() -> None:
        async with started(config("Doubles", call_timeout_s=1.0)) as executor:
            (before,) = (await executor.run(["pid"])).results
            failed = await failure_of(executor, 1, "hang")
            assert failed.failure is Failure.TIMED_OUT
            assert "1 s (call_timeout_s)" in failed.detail
            (after,) = (await executor.run(["pid"])).results
            assert after != before
            assert not Path(f"/proc/{before}").exists()
            assert executor.restarts == 1

    asyncio.run(body())


def test_a_worker_that_dies_costs_its_call_and_is_replaced() -> None:
    seen: list[bool] = []

    async def body() -> None:
        async with started(config("Doubles")) as executor:
            executor.on_ready = seen.append
            failed = await failure_of(executor, "exit")
            assert failed.failure is Failure.DIED
            assert "exit status 3" in failed.detail
            assert (await executor.run([1])).results == [2]
            assert seen == [False, True]
        assert seen == [False, True, False]
        assert (await failure_of(executor, 1)).failure is Failure.DIED

    asyncio.run(body())


def test_a_call_that_was_given_up_is_over_before_the_next_begins() -> None:
    async def body() -> None:
        async with started(config("Slow")) as executor:
            given_up = asyncio.create_task(executor.run([1]))
            await asyncio.sleep(0)
            given_up.cancel()
            assert (await executor.run([2])).results == [3]
            assert given_up.cancelled()

    asyncio.run(body())


def test_a_call_may_come_while_another_runs_and_a_third_waits() -> None:
    async def body() -> None:
        async with started(config("Slow")) as executor:
            calls = [asyncio.create_task(executor.run([number])) for number in range(4)]
            await asyncio.sleep(0)
            assert len(executor._calls) == 2
            made = [await call for call in calls]
            assert [each.results for each in made] == [[1], [2], [3], [4]]
            assert all(each.idle is not None and each.idle >= 0 for each in made)

    asyncio.run(body())


@pytest.mark.parametrize(("first", "failure"), [("exit", Failure.DIED), ("hang", Failure.TIMED_OUT)])
def test_a_call_whose_turn_never_came_is_told_apart(first: str, failure: Failure) -> None:
    async def body() -> None:
        async with started(config("Doubles", call_timeout_s=1.0)) as executor:
            calls = [asyncio.create_task(failure_of(executor, payload)) for payload in (first, 1)]
            assert [(await call).failure for call in calls] == [failure, Failure.UNTRIED]
            assert (await executor.run([1])).results == [2]

    asyncio.run(body())


def test_only_the_call_that_runs_is_timed() -> None:
    async def body() -> None:
        async with started(config("Slow", call_timeout_s=30.0)) as executor:
            calls = [asyncio.create_task(executor.run([number])) for number in range(2)]
            await asyncio.sleep(0)
            assert [call.timer is not None for call in executor._calls] == [True, False]
            await calls[0]
            assert [call.timer is not None for call in executor._calls] == [True]
            await calls[1]

    asyncio.run(body())


@pytest.mark.parametrize("large", [False, True])
def test_streams_hand_over_each_part_once(large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(worker_answers, "LARGE_BYTES", 0)
    parts: list[dict[int, int]] = []
    seen = tmp_path / "seen"

    def take(new: dict[int, Any]) -> None:
        # Every element, since the model goes on to write into the array that it gave.
        parts.append({index: int(part.min()) for index, part in new.items() if part.min() == part.max()})

    async def body() -> None:
        async with started(config("Counts", options={"until": str(seen)})) as executor:
            assert executor.info is not None
            assert executor.info.streams
            made = await executor.run([2, 4], take)
            assert [len(result) for result in made.results] == [2, 4]
            assert parts == [{0: 0, 1: 0}, {0: 1, 1: 1}, {1: 2}, {1: 3}]
            whole = await executor.run([2])
            assert len(whole.results[0]) == 2
            broken = await executor.run([3, -2], take)
            assert shown(broken.results) == ["RequestFailed: RuntimeError: broke"] * 2
            # What a worker says just before it dies may be lost with it, so this one dies when some of it was read.
            died = await executor.run([5, -3], lambda new: seen.touch())
            assert all("died" in text and "after a part" in text for text in shown(died.results))
            assert (await failure_of(executor, 5, -3)).failure is Failure.DIED

    asyncio.run(body())


def test_large_calls_are_written_and_read_beside_the_loop_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    may_go_on = {"encode_each": threading.Event(), "decode_each": threading.Event()}

    def slow(module: ModuleType, name: str) -> None:
        plain = getattr(module, name)

        def watched(given: Any) -> Any:
            seen.append((name, threading.current_thread() is threading.main_thread()))
            assert may_go_on[name].wait(60)
            return plain(given)

        monkeypatch.setattr(module, name, watched)

    slow(process_executor, "encode_each")
    slow(worker_answers, "decode_each")
    large = [[0.5] * 50_000, {"x": np.arange(3000.0)}]

    async def body() -> None:
        async with started(config("Doubles")) as executor:
            calls = [asyncio.create_task(executor.run(payloads)) for payloads in (large, [2])]
            while not seen:
                await asyncio.sleep(0.001)
            assert not executor._calls, "the small one waits for its turn"
            may_go_on["encode_each"].set()
            idle = asyncio.create_task(executor.idle())
            # Both are computed, and the first one's results are yet to be read.
            while len(seen) < 2 or executor._calls:
                await asyncio.sleep(0.001)
            assert not any(each.done() for each in (*calls, idle))
            may_go_on["decode_each"].set()
            first, second = [await call for call in calls]
            assert first.results[0] == [0.5] * 100_000
            np.testing.assert_array_equal(first.results[1]["x"], np.arange(3000.0) * 2)
            assert second.results == [4]
            await idle
            assert seen == [("encode_each", False), ("decode_each", False)]
            assert (await failure_of(executor, *[object()] * 20_000)).detail.startswith("the payload can't be sent")

    asyncio.run(body())


@pytest.mark.parametrize("name", ["Doubles", "Counts"])
def test_what_can_not_be_read_costs_its_call_and_no_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frames: Any) -> Any:
        raise MemoryError("no room")

    async def body() -> None:
        async with started(config(name)) as executor:
            with monkeypatch.context() as patch:
                patch.setattr(worker_answers, "decode", broken)
                failed = await failure_of(executor, 3)
            assert (failed.failure, failed.detail) == (
                Failure.RAISED,
                "what the model gave can't be read: MemoryError: no room",
            )
            assert len((await executor.run([3])).results) == 1
            assert executor.restarts == 0

    asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CannotLoad", "OSError: no weights here"),
        ("Exits", "SystemExit: the model's own idea"),
        ("CannotLoadByName", "FileNotFoundError: a"),
        ("CannotBeSo", "udc80b"),
        ("HasNoTextToLoad", "its text can't be had: ValueError"),
        ("Missing", "has no class Missing"),
    ],
)
def test_a_model_that_cannot_load_says_why_and_is_not_tried_again(name: str, reason: str) -> None:
    async def body() -> None:
        executor = ProcessExecutor(config(name))
        await executor.start()
        with pytest.raises(Unavailable, match=reason):
            await asyncio.wait_for(executor.wait_ready(), 60)
        assert executor.state == "failed"
        assert executor.restarts == 0
        failed = await failure_of(executor, 1)
        assert reason in failed.detail
        await executor.stop()
        assert executor.worker_pid is None

    asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("CannotLoad", "OSError: no weights here"), ("DiesLoading", r"died \(exit status 5\) while it loaded")],
)
@pytest.mark.parametrize("attempts", [1, 3])
def test_a_model_that_cannot_load_is_tried_so_often(
    name: str, reason: str, attempts: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.02)

    async def body() -> None:
        executor = ProcessExecutor(config(name), load_attempts=attempts)
        await executor.start()
        with pytest.raises(Unavailable, match=reason):
            await asyncio.wait_for(executor.wait_ready(), 60)
        assert (executor.state, executor.restarts) == ("failed", attempts - 1)
        assert "\n" not in str(executor.failure)
        await executor.stop()

    asyncio.run(body())
    assert "Traceback" not in capfd.readouterr().err


def test_a_model_that_has_served_is_tried_until_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.02)
    file = tmp_path / "file"

    async def body() -> None:
        async with started(config("Spoilt", options={"file": str(file)})) as executor:
            assert (await failure_of(executor, "spoil")).failure is Failure.DIED
            while executor.restarts < 4:
                await asyncio.sleep(0.02)
            assert executor.state == "restarting"
            assert "OSError: spoilt (worker_models.py, line" in str(executor.failure)
            file.unlink()
            await executor.wait_ready()
            assert executor.failure is None
            assert (await executor.run(["fine"])).results == ["fine"]

    asyncio.run(body())


def test_warm_up_goes_as_far_as_memory_does() -> None:
    async def body() -> None:
        async with started(config("Warm")) as executor:
            assert executor.info is not None
            assert executor.info.max_batch_size == 16
            assert (await executor.run([0])).results == [[1, 2, 4, 8, 1]]

    asyncio.run(body())


def test_encoders_get_encodings() -> None:
    async def body() -> None:
        given = ItemConfig(model=str(encoder_folder("bert")), dtype="float32", num_threads=1, max_batch_size=2)
        texts = [Encoding([1, 2, 3]), Encoding([4, 5], [0, 1]), Encoding([9999])]
        runner = make_runner(given)
        runner.load()
        expected = runner.run(texts)
        async with started(given) as executor:
            assert executor.info is not None
            assert (executor.info.task, executor.info.dimensions) == ("embed", 64)
            results = (await executor.run(texts)).results
            np.testing.assert_allclose(results[:2], expected[:2], rtol=1e-6)
            assert shown(results[2:]) == ["BadItem: token ids must be from 0 to 319"]
            assert (await failure_of(executor, "no encoding")).detail.startswith("the payload can't be read")

    asyncio.run(body())


def test_onnx_models_get_tensors(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from support.onnx_models import WEIGHT, linear

    async def body() -> None:
        async with started(ItemConfig(model=linear(tmp_path / "m.onnx"), num_threads=1)) as executor:
            made = await executor.run([{"x": np.ones(4, np.float32)}, {"z": 1}])
            assert made.results[0]["y"].tolist() == WEIGHT.sum(axis=0).tolist()
            assert shown(made.results[1:]) == ["BadItem: input 'x' is missing"]

    asyncio.run(body())


FRONT = """
import asyncio, sys
from chairlift.config.items import ItemConfig
from chairlift.engine.items.process_executor import ProcessExecutor
async def main():
    executor = ProcessExecutor(ItemConfig(model=sys.argv[1]))
    await executor.start()
    await executor.wait_ready()
    call = asyncio.create_task(executor.run([sys.argv[2]]))
    await asyncio.sleep(0.1)
    print(executor.worker_pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("payload", ["idle", "hang", "hang alone"])
@pytest.mark.parametrize("stopped", [False, True])
def test_no_worker_outlives_its_front(payload: str, stopped: bool) -> None:
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, f"{MODELS}:Doubles", payload], stdout=subprocess.PIPE, text=True
    )
    assert front.stdout is not None
    worker = int(front.stdout.readline())
    if stopped:
        os.kill(worker, signal.SIGSTOP)
    front.kill()
    front.wait()
    _until_gone(worker)


def test_what_a_model_starts_ends_with_its_worker() -> None:
    async def body() -> None:
        async with started(config("Doubles")) as executor:
            (child,) = (await executor.run(["child"])).results
            assert _alive(child)
            assert executor.worker_pid is not None
            os.kill(executor.worker_pid, signal.SIGKILL)
            await asyncio.to_thread(_until_gone, child)
            (last,) = (await executor.run(["child"])).results
        await asyncio.to_thread(_until_gone, last)

    asyncio.run(body())


def _until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_an_idle_worker_wakes_for_its_heartbeat_alone() -> None:
    def wakes(pid: int) -> int:
        """How often its threads have gone to sleep so far."""
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
        return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in texts)

    async def body() -> None:
        async with started(config("Counts")) as executor:
            await executor.run([3])
            await asyncio.sleep(0.2)
            assert executor.worker_pid is not None
            before = wakes(executor.worker_pid)
            await asyncio.sleep(1)
            assert wakes(executor.worker_pid) - before < 5

    asyncio.run(body())


def test_a_thread_does_the_same_in_process() -> None:
    async def body() -> None:
        runner = make_runner(config("Counts"))
        executor = ThreadExecutor(runner, runner.load())
        parts: list[dict[int, int]] = []
        made = await executor.run([2, 1], lambda new: parts.append({index: len(part) for index, part in new.items()}))
        assert [len(result) for result in made.results] == [2, 1]
        assert parts == [{0: 3000, 1: 3000}, {0: 3000}]
        assert len((await executor.run([2])).results[0]) == 2
        await executor.stop()
        runner = make_runner(config("Doubles", options={"most": 2}))
        executor = ThreadExecutor(runner, runner.load())
        assert (await failure_of(executor, 1, "poison")).failure is Failure.RAISED
        assert (await failure_of(executor, 1, 2, 3)).failure is Failure.OUT_OF_MEMORY
        assert shown((await executor.run([1, "own error"])).results) == [2, "ValueError: mine alone"]
        await executor.stop()

    asyncio.run(body())


def test_killed_again_and_again_and_every_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.02)

    async def body() -> None:
        async with started(config("Slow")) as executor:
            outcomes: list[str] = []
            finished = asyncio.Event()

            async def caller(number: int) -> None:
                while not finished.is_set():
                    try:
                        assert (await executor.run([number])).results == [number + 1]
                        outcomes.append("answered")
                    except CallFailed as failed:
                        outcomes.append(failed.failure)

            callers = [asyncio.create_task(caller(number)) for number in range(4)]
            for kill in range(8):
                answered = outcomes.count("answered")
                while executor.worker_pid is None or not executor.ready or outcomes.count("answered") <= answered:
                    await asyncio.sleep(0.002)
                os.kill(executor.worker_pid, signal.SIGKILL)
                while executor.restarts == kill:
                    await asyncio.sleep(0.002)
            finished.set()
            await asyncio.wait_for(asyncio.gather(*callers), 30)
            assert executor.restarts == 8
            assert set(outcomes) <= {"answered", Failure.DIED, Failure.UNTRIED}
            assert outcomes.count(Failure.DIED) <= 8
            assert outcomes.count(Failure.UNTRIED) <= 8

    asyncio.run(body())

"""The executor: each line has one result, whatever happens on the way."""

import asyncio
import errno
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from support.items_harness import adder, function
from support.job_harness import URL, Flow, Scripted, app_of, batch_line, check_doubled, results, write_doubling

from chairlift.core.items.item import Failure
from chairlift.engine.items.call import CallFailed, CallResult
from chairlift.errors import JobError, StorageFull, StorageLost
from chairlift.jobs import retry
from chairlift.jobs.executor import MAX_AHEAD, JobOutcome
from chairlift.jobs.lines import JsonLines, Line
from chairlift.jobs.replies import ENDS_WORKER, Reply
from chairlift.jobs.result_lines import answered
from chairlift.jobs.retry import Attempts, LineVerdict


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_DELAY", 0.001)
    monkeypatch.setattr(retry, "_MAX_DELAY", 0.01)


def doubling(folder: Path) -> Flow:
    return Flow(folder, app_of(function()[0]))


def scripted(folder: Path, *scripts: list[Any], app: Scripted | None = None) -> tuple[Flow, Scripted]:
    app = app or Scripted()
    lines = [batch_line(f"c{i}", {"id": i, "say": script}, "/x") for i, script in enumerate(scripts)]
    flow = Flow(folder, app)
    flow.input.write_text("\n".join(lines))
    return flow, app


def test_every_line_has_its_answer(tmp_path: Path) -> None:
    flow = doubling(tmp_path)
    write_doubling(flow.input, 3000)
    assert flow.run() is JobOutcome.COMPLETED
    check_doubled(flow.output, 3000)
    assert not flow.errors.exists()
    assert flow.executor is not None
    assert flow.executor.total == flow.executor.counts.completed == 3000
    first = results(flow.output)[0]
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert set(first["response"]) == {"status_code", "request_id", "body"}
    assert first["id"].startswith("batch_req_1-")


def test_lines_that_are_wrong_go_to_the_error_file(tmp_path: Path) -> None:
    flow = doubling(tmp_path)
    good = batch_line("good", {"instances": [4]})
    lines = [
        "{not json",
        good,
        "",
        batch_line("unknown model", {"instances": [1]}, "/v1/models/other:predict"),
        batch_line("bad body", {"instance": [1]}),
        batch_line("streams", {"instances": [1], "stream": True}),
        json.dumps({"custom_id": "no body", "method": "POST", "url": URL}),
        json.dumps({"custom_id": "gets", "method": "GET", "url": URL, "body": {}}),
        batch_line("nowhere", {}, "/nowhere"),
        batch_line("elsewhere", {}, "http://example.com/v1/completions"),
    ]
    flow.input.write_text("\n".join(lines))
    assert flow.run() is JobOutcome.COMPLETED
    (done,) = results(flow.output)
    assert done["response"]["body"] == {"predictions": [8]}
    failed = {result["custom_id"]: result for result in results(flow.errors)}
    assert len(failed) == 8
    answered = {name: r["response"]["status_code"] for name, r in failed.items() if r["response"] is not None}
    assert answered == {"unknown model": 404, "bad body": 400, "nowhere": 404}
    assert "instance" in failed["bad body"]["response"]["body"]["error"]
    codes = {name: r["error"]["code"] for name, r in failed.items() if r["error"] is not None}
    assert codes == {
        None: "invalid_json",
        "streams": "stream_not_supported",
        "no body": "missing_field",
        "gets": "invalid_method",
        "elsewhere": "invalid_url",
    }
    assert failed[None]["error"]["message"].startswith("line 1: ")
    assert failed["gets"]["error"]["message"].startswith("line 8: ")


def test_transient_errors_are_tried_again(tmp_path: Path) -> None:
    flow, app = scripted(tmp_path, [429, 503, 500, 200], [503] * 12 + [200], [], [500] * 9)
    assert flow.run(max_attempts=3) is JobOutcome.COMPLETED
    assert {r["custom_id"] for r in results(flow.output)} == {"c0", "c1", "c2"}
    (failed,) = results(flow.errors)
    assert failed["custom_id"] == "c3"
    assert failed["response"]["status_code"] == 500
    assert failed["response"]["body"] == {"error": {"message": "status 500"}}
    assert Counter(app.seen) == {0: 4, 1: 13, 2: 1, 3: 3}
    assert flow.executor is not None
    assert flow.executor.counts.retries == 3 + 12 + 2


def test_permanent_errors_are_not_tried_again(tmp_path: Path) -> None:
    flow, app = scripted(tmp_path, *([status] * 2 for status in (400, 401, 404, 413, 415, 422)))
    assert flow.run() is JobOutcome.COMPLETED
    assert len(results(flow.errors)) == len(app.seen) == 6


class Deadly(Scripted):
    """A server whose worker line 7 ends whenever it comes, or so many times what others send it; `live` if they do."""

    def __init__(self, live: bool = False, others_kill: int = 0) -> None:
        super().__init__()
        self.deaths = 0
        self.live, self.others_kill = live, others_kill

    async def answer(self, body: Any) -> tuple[Any, ...]:
        before = self.deaths
        await asyncio.sleep(0.001)
        if self.deaths < self.others_kill if self.others_kill else body["id"] == 7:
            self.deaths += 1
        alone = self.running == 1 and not self.live
        await asyncio.sleep(0.002)
        if before == self.deaths:
            return 200, {"echo": body["id"]}
        lost = 503, {"error": {"code": "worker_lost", "message": "died"}}
        return (*lost, (ENDS_WORKER, b"alone")) if alone else lost


@pytest.mark.parametrize(("live", "times"), [(False, retry.MAX_LOST), (True, retry.MAX_LOST_BESIDE)])
def test_who_kills_workers_runs_alone_and_is_blamed_alone(live: bool, times: int, tmp_path: Path) -> None:
    flow, app = scripted(tmp_path, *([] for _ in range(12)), app=Deadly(live))
    assert flow.run(concurrency=12) is JobOutcome.COMPLETED
    assert len(results(flow.output)) == 11
    (failed,) = results(flow.errors)
    assert failed["custom_id"] == "c7"
    assert failed["response"]["status_code"] == 503
    assert app.seen.count(7) == times


def test_no_line_fails_for_what_others_do_to_its_workers(tmp_path: Path) -> None:
    flow, app = scripted(tmp_path, [], app=Deadly(live=True, others_kill=retry.MAX_LOST_BESIDE - 1))
    assert flow.run() is JobOutcome.COMPLETED
    assert len(results(flow.output)) == 1
    assert len(app.seen) == retry.MAX_LOST_BESIDE


def test_an_item_that_was_found_to_end_its_worker_is_not_sent_again(tmp_path: Path) -> None:
    """Whatever the shape of the answer, as the server itself gives it."""

    async def kills(payloads: Sequence[Any], on_parts: Any = None) -> CallResult:
        raise CallFailed(Failure.DIED, "its worker died")

    service, dispatcher = function()
    dispatcher.executors[0].run = calls = AsyncMock(side_effect=kills)
    flow = Flow(tmp_path, app_of(service))
    flow.input.write_text(batch_line("poison", {"instances": [1]}))
    assert flow.run() is JobOutcome.COMPLETED
    (failed,) = results(flow.errors)
    assert failed["response"]["status_code"] == 500
    assert calls.await_count == 1 + dispatcher.limits.retries


def test_trials() -> None:
    trials = Attempts()
    assert trials.judge(204, False, 1) is LineVerdict.DONE
    found = [trials.judge(503, True, 1, alone=True) for _ in range(3)]
    assert found == [LineVerdict.AGAIN, LineVerdict.ALONE, LineVerdict.FAILED]
    beside = [Attempts(lost=lost).judge(503, True, 1) for lost in range(retry.MAX_LOST_BESIDE)]
    assert beside == [LineVerdict.AGAIN, *[LineVerdict.ALONE] * 6, LineVerdict.FAILED]
    assert Attempts().judge(500, False, 1) is LineVerdict.FAILED
    assert Attempts().judge(500, False, 5) is LineVerdict.AGAIN
    assert Attempts().judge(500, False, 5, alone=True) is LineVerdict.FAILED
    assert Attempts(waits=10**6).judge(429, False, 1) is LineVerdict.WAIT
    assert 0 < Attempts(errors=1).delay(0.0, 0.0) <= Attempts(errors=1).delay(0.0, 1.0)
    assert Attempts(waits=10**6).delay(0.0, 1.0) <= retry._MAX_DELAY
    assert Attempts(waits=1).delay(7.0, 0.0) >= 7.0


def test_retry_after_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, app = scripted(tmp_path, [429], app=Scripted(headers=[(b"retry-after", b"3600")]))
    call_later, waits = asyncio.BaseEventLoop.call_later, list[float]()

    def at_once(loop: Any, delay: float, callback: Any, *arguments: Any, **more: Any) -> asyncio.TimerHandle:
        if getattr(callback, "__name__", "") == "_send_again":
            waits.append(delay)
            delay = 0.0
        return call_later(loop, delay, callback, *arguments, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", at_once)
    assert flow.run() is JobOutcome.COMPLETED
    assert app.seen == [0, 0]
    (wait,) = waits
    assert 3600 <= wait <= 1.25 * 3600


def test_no_more_than_so_many_are_under_way_and_never_fewer(tmp_path: Path) -> None:
    flow, app = scripted(tmp_path, *([] for _ in range(500)))
    assert flow.run(concurrency=7, window_lines=20) is JobOutcome.COMPLETED
    assert app.most == 7


def test_reading_stops_while_the_oldest_line_lags(tmp_path: Path) -> None:
    class Lags(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.lagging = asyncio.Event()

        async def answer(self, body: Any) -> tuple[int, Any]:
            if body["id"] == 0:
                await self.lagging.wait()
            return 200, {}

    count = MAX_AHEAD + 6000
    app = Lags()
    flow, _ = scripted(tmp_path, *([] for _ in range(count)), app=app)

    async def watch(flow: Flow) -> None:
        before = -1
        while len(app.seen) != before or before < MAX_AHEAD:
            before = len(app.seen)
            await asyncio.sleep(0.1)
        assert before < MAX_AHEAD + 2100
        app.lagging.set()

    assert flow.run(watch, concurrency=16) is JobOutcome.COMPLETED
    assert len(results(flow.output)) == count


def test_too_many_failures_stop_the_job_and_it_goes_on_with_more(tmp_path: Path) -> None:
    flow, _ = scripted(tmp_path, *([400] if i % 2 else [] for i in range(200)))
    assert flow.run(concurrency=4, window_lines=10, max_failures=10) is JobOutcome.TOO_MANY_FAILURES
    assert 11 <= len(results(flow.errors)) < 20
    assert len(results(flow.output)) < 30
    assert flow.run(concurrency=4, max_failures=100) is JobOutcome.COMPLETED
    assert len(results(flow.errors)) == len(results(flow.output)) == 100
    assert len({r["custom_id"] for r in results(flow.errors) + results(flow.output)}) == 200


class Holds(Scripted):
    """Answers the first lines and then no more, until it is let go."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.woken = asyncio.Event()

    async def answer(self, body: Any) -> tuple[int, Any]:
        if len(self.seen) > self.first:
            await self.woken.wait()
        return 200, {}


@pytest.mark.parametrize("how", ["stop", "cancel", "expire"])
def test_ending_early(how: str, tmp_path: Path) -> None:
    app = Holds(40)
    flow, _ = scripted(tmp_path, *([] for _ in range(100)), app=app)

    async def end(flow: Flow) -> None:
        while len(app.seen) < 45:
            await asyncio.sleep(0.001)
        assert flow.executor is not None
        if how == "stop":
            flow.executor.stop()
        elif how == "cancel":
            flow.executor.cancel(0.01)

    options = {"expires_at": time.time() + 0.5} if how == "expire" else {}
    outcome = flow.run(end, concurrency=5, window_lines=20, **options)
    done, failed = results(flow.output), results(flow.errors)
    assert len(done) == 40 or (how == "expire" and len(done) < 40)
    assert app.running == 0
    if how == "stop":
        assert outcome is JobOutcome.STOPPED
        assert not failed
        flow.app = Scripted()
        assert flow.run() is JobOutcome.COMPLETED
        assert len({r["custom_id"] for r in results(flow.output)}) == len(results(flow.output)) == 100
        return
    assert outcome is (JobOutcome.CANCELLED if how == "cancel" else JobOutcome.EXPIRED)
    assert {r["error"]["code"] for r in failed} == {"batch_cancelled" if how == "cancel" else "batch_expired"}
    assert all(r["response"] is None for r in failed)
    assert len({r["custom_id"] for r in done + failed}) == len(done + failed) == 100


def test_cancelled_before_it_began(tmp_path: Path) -> None:
    flow, _ = scripted(tmp_path, *([] for _ in range(30)))

    async def go() -> JobOutcome:
        asyncio.get_running_loop().call_soon(lambda: flow.executor and flow.executor.cancel())
        return await flow.go()

    assert asyncio.run(go()) is JobOutcome.CANCELLED
    assert len(results(flow.errors)) + len(results(flow.output)) == 30


@pytest.mark.parametrize("how", ["told to leave", "taken away"])
def test_nothing_waits_for_errors_that_are_never_written(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled job has more errors to write than may wait for the disk, and then the disk takes no more."""
    flow, _ = scripted(tmp_path, *([] for _ in range(3000)), app=Holds(0))
    disk = Disk(monkeypatch, 200_000)

    async def end(flow: Flow) -> None:
        assert flow.executor is not None
        flow.executor.cancel()
        if how == "taken away":
            while not flow.errors.exists():
                await asyncio.sleep(0.001)
            flow.errors.unlink()
            return
        while flow.executor.problem is None:
            await asyncio.sleep(0.001)
        flow.executor.stop()

    with pytest.raises(StorageFull if how == "told to leave" else StorageLost):
        flow.run(end, commit_bytes=1000, wait_for_space=True)
    disk.room = 10**9
    if how == "told to leave":
        flow.app = Scripted()
        assert flow.run() is JobOutcome.COMPLETED
        assert len({r["custom_id"] for r in results(flow.errors) + results(flow.output)}) == 3000


def test_a_model_that_never_comes_ends_the_run(tmp_path: Path) -> None:
    flow, _ = scripted(tmp_path, [200], [503] * 10**6)
    with pytest.raises(JobError, match="no weights"):
        flow.run(hopeless=lambda: "no weights here")
    with pytest.raises(JobError, match=r"nothing was answered for 0.05 s.*status 503"):
        flow.run(stall_seconds=0.05)
    assert len(results(flow.output)) == 1


def test_hears_when_all_are_sent(tmp_path: Path) -> None:
    flow, app = scripted(tmp_path, *([] for _ in range(50)))
    at: list[int] = []
    assert flow.run(on_last=lambda: at.append(len(app.seen)), window_lines=8, concurrency=3) is JobOutcome.COMPLETED
    assert at == [50]


class Full(Scripted):
    """Answers three together, and then the next three; fewer only if it is told that nobody else comes."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.waiting: list[asyncio.Event] = []
        self.batch = 0
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.leave()

    def leave(self) -> None:
        if not self.batch and (len(self.waiting) >= 3 or self.is_closed):
            going, self.waiting = self.waiting[:3], self.waiting[3:]
            self.batch = len(going)
            for each in going:
                each.set()

    async def answer(self, body: Any) -> tuple[Any, ...]:
        await self.begun.wait()
        admitted = asyncio.Event()
        self.waiting.append(admitted)
        self.leave()
        await admitted.wait()
        try:
            return await super().answer(body)
        finally:
            self.batch -= 1
            self.leave()


async def hold_until_all_is_read(flow: Flow) -> None:
    assert flow.executor is not None
    assert isinstance(flow.app, Full)
    while flow.executor.total is None:
        await asyncio.sleep(0.001)
    flow.app.begun.set()
    await give_up(flow)


async def give_up(flow: Flow) -> None:
    await asyncio.sleep(10)
    assert flow.executor is not None
    flow.executor.stop()


def test_a_last_line_that_is_wrong_is_the_last_too(tmp_path: Path) -> None:
    app = Full()
    flow, _ = scripted(tmp_path, *([] for _ in range(4)), app=app)
    with flow.input.open("a") as file:
        file.write("\n{wrong")
    assert flow.run(hold_until_all_is_read, on_last=app.close, concurrency=3) is JobOutcome.COMPLETED
    assert (len(results(flow.output)), len(results(flow.errors))) == (4, 1)


@pytest.mark.parametrize(
    ("scripts", "options"),
    [
        # A line that was there at two deaths of a worker runs alone, long before the last.
        ([["lost", "lost"], *([] for _ in range(40))], {}),
        # A line has 26 bytes: two may be under way, and another in memory or not.
        ([[], [], [], []], {"window_bytes": 52}),
        ([[], [], [], []], {"window_bytes": 60}),
    ],
)
def test_who_waits_for_company_hears_when_none_comes(
    scripts: list[list[Any]], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_FIRST_DELAY", 0.0)
    app = Full()
    app.begun.set()
    flow, _ = scripted(tmp_path, *scripts, app=app)
    assert flow.run(give_up, on_last=app.close, concurrency=3, **options) is JobOutcome.COMPLETED
    assert len(results(flow.output)) == len(scripts)


def test_lines_in_memory_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Holds(0)
    flow = Flow(tmp_path, app)
    sizes = [4000] * 10 + [20_000] + [4000] * 9
    lines = [batch_line(f"c{i}", {"id": i, "fill": "x" * size}, "/x") for i, size in enumerate(sizes)]
    flow.input.write_text("\n".join(lines))
    read, numbers, held = JsonLines.read, [0], list[int]()

    def reading(self: JsonLines, *limits: int) -> list[Line]:
        found = read(self, *limits)
        numbers.append(self.number)
        return found

    async def watch(flow: Flow) -> None:
        while len(app.seen) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        held.append(numbers[-1])
        app.woken.set()

    monkeypatch.setattr(JsonLines, "read", reading)
    assert flow.run(watch, concurrency=16, window_bytes=10_000) is JobOutcome.COMPLETED
    assert len(results(flow.output)) == 20
    assert held == [3], "the window, and the line at its end"
    assert app.most == 2


def test_lines_that_a_large_one_held_back_go_on_side_by_side(tmp_path: Path) -> None:
    after: list[int] = []

    class Watches(Scripted):
        async def answer(self, body: Any) -> tuple[Any, ...]:
            if body["id"] == 10:
                # Meanwhile the lines behind it are read.
                await asyncio.sleep(0.05)
            elif body["id"] > 10:
                after.append(self.running)
            return await super().answer(body)

    flow = Flow(tmp_path, Watches())
    sizes = [100] * 10 + [9_900] + [100] * 30
    lines = [batch_line(f"c{i}", {"id": i, "fill": "x" * size}, "/x") for i, size in enumerate(sizes)]
    flow.input.write_text("\n".join(lines))
    assert flow.run(concurrency=2, window_bytes=10_000) is JobOutcome.COMPLETED
    assert max(after[:10]) == 2


def test_tokens_are_counted_however_they_are_named(tmp_path: Path) -> None:
    chat = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": None}
    response = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 4}
    said = [
        chat | {"completion_tokens_details": {"reasoning_tokens": 2}},
        response | {"output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 7},
        chat,
    ]

    class Counting(Scripted):
        async def answer(self, body: Any) -> tuple[Any, ...]:
            return 200, {"usage": said[body["id"]]}

    flow, _ = scripted(tmp_path, [], [], [], app=Counting())
    assert flow.run() is JobOutcome.COMPLETED
    assert flow.executor is not None
    counts = flow.executor.counts
    assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (17, 2, 14)
    assert counts.reasoning_tokens == 5


def test_an_answer_that_is_no_json_is_a_line_all_the_same(tmp_path: Path) -> None:
    body = b'{"outputs":[]}\x00\xff\n\x80'
    for given, kind in ((body, b"application/octet-stream"), (b"", b"application/json"), (b"no\n", b"text/plain")):
        record = answered("r", Line(number=1, custom_id=b'"a"'), Reply(200, [(b"content-type", kind)], given))
        assert record.count(b"\n") == 1
        assert json.loads(record)["response"]["body"] == given.decode("utf-8", "replace")
    # A line that asks for such an answer is told.
    flow = Flow(tmp_path, app_of(adder()[0]))
    tensors = [
        {"name": "a", "shape": [1, 1], "datatype": "FP32", "data": [1.0]},
        {"name": "b", "shape": [1, 1], "datatype": "FP32", "data": [2.0]},
        {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["x"]},
    ]
    url = "/v2/models/adder/infer"
    lines = [
        batch_line("json", {"inputs": tensors}, url),
        batch_line("bytes", {"inputs": tensors, "parameters": {"binary_data_output": True}}, url),
        batch_line("some", {"inputs": tensors, "outputs": [{"name": "sum", "parameters": {"binary_data": True}}]}, url),
    ]
    flow.input.write_text("\n".join(lines))
    assert flow.run() is JobOutcome.COMPLETED
    assert [each["custom_id"] for each in results(flow.output)] == ["json"]
    assert len(results(flow.errors)) == 2
    for each in results(flow.errors):
        assert each["response"]["status_code"] == 400
        assert "leave the parameters binary_data_output and binary_data out" in str(each["response"]["body"])


def test_nothing_to_do(tmp_path: Path) -> None:
    flow = doubling(tmp_path)
    flow.input.write_text("\n\r\n  \n")
    assert flow.run() is JobOutcome.COMPLETED
    assert not flow.output.exists()
    assert flow.executor is not None
    assert flow.executor.total == 0


class Disk:
    """Has room for so many bytes of results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self.refused = 0
        self.whole = 0  # where the last write ended that had room for all of it
        self._write = os.pwrite
        monkeypatch.setattr("chairlift.jobs.result_file.os.pwrite", self)

    def __call__(self, fd: int, raw: Any, offset: int) -> int:
        fits = self.room - offset
        if fits <= 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(raw) <= fits:
            self.whole = offset + len(raw)
        return self._write(fd, raw[:fits], offset)


def test_a_full_disk_ends_the_run_and_nothing_half_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = doubling(tmp_path)
    write_doubling(flow.input, 3000)
    disk = Disk(monkeypatch, 20_001)
    with pytest.raises(StorageFull, match=r"out\.jsonl.*No space left.*make some"):
        flow.run(commit_bytes=5000)
    # How much is written at once depends on how many results there are by then: 5,000 bytes or more.
    assert 5_000 <= flow.output.stat().st_size == disk.whole <= 20_001
    some = len(results(flow.output))
    assert some > 50
    disk.room = 10**9
    flow.app = doubling(tmp_path).app
    assert flow.run() is JobOutcome.COMPLETED
    check_doubled(flow.output, 3000)


def test_a_server_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = doubling(tmp_path)
    write_doubling(flow.input, 3000)
    disk = Disk(monkeypatch, 20_001)

    async def make_space(flow: Flow) -> None:
        assert flow.executor is not None
        while flow.executor.problem is None:
            await asyncio.sleep(0.01)
        assert "out.jsonl" in flow.executor.problem
        disk.room = 10**9

    assert flow.run(make_space, commit_bytes=5000, wait_for_space=True) is JobOutcome.COMPLETED
    assert disk.refused
    check_doubled(flow.output, 3000)


def test_a_server_that_leaves_waits_for_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = doubling(tmp_path)
    write_doubling(flow.input, 3000)
    disk = Disk(monkeypatch, 20_001)

    async def leave(flow: Flow) -> None:
        assert flow.executor is not None
        while flow.executor.problem is None:
            await asyncio.sleep(0.01)
        flow.executor.stop()

    with pytest.raises(StorageFull):
        flow.run(leave, commit_bytes=5000, wait_for_space=True)
    disk.room = 10**9
    flow.app = doubling(tmp_path).app
    assert flow.run() is JobOutcome.COMPLETED
    check_doubled(flow.output, 3000)


def test_a_disk_that_fails_ends_the_run_and_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = doubling(tmp_path)
    write_doubling(flow.input, 3000)
    real, calls = os.fdatasync, []

    def failing(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr("chairlift.jobs.result_file.os.fdatasync", failing)
    with pytest.raises(JobError, match="can't be written"):
        flow.run(commit_bytes=5000)
    flow.app = doubling(tmp_path).app
    assert flow.run() is JobOutcome.COMPLETED
    check_doubled(flow.output, 3000)


def test_a_result_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    flow, _ = scripted(tmp_path, *([] for _ in range(10)), app=Holds(5))

    async def stop(flow: Flow) -> None:
        while not results(flow.output):
            await asyncio.sleep(0.01)
        assert flow.executor is not None
        flow.executor.stop()

    assert flow.run(stop, commit_seconds=0.01) is JobOutcome.STOPPED
    flow.output.write_text("")
    with pytest.raises(JobError, match="fewer than the"):
        flow.run()


@pytest.mark.parametrize("what", ["out.jsonl", "jobs.sqlite", "jobs.sqlite-wal"])
@pytest.mark.parametrize("how", ["removed", "replaced", "overwritten"])
@pytest.mark.parametrize("quiet", [False, True])
def test_what_was_kept_is_taken_away_while_it_runs(what: str, how: str, quiet: bool, tmp_path: Path) -> None:
    if (what, how) == ("jobs.sqlite-wal", "overwritten"):
        pytest.skip("what is in its log only SQLite knows")
    app = Holds(40)
    flow, _ = scripted(tmp_path, *([] for _ in range(100)), app=app)
    path = tmp_path / what

    async def take(flow: Flow) -> None:
        while not flow.output.exists() or flow.output.read_bytes().count(b"\n") < 40:
            await asyncio.sleep(0.005)
        other = tmp_path / "other"
        other.write_text("something else")
        if how == "removed":
            path.unlink()
        elif how == "replaced":
            os.replace(other, path)
        else:
            path.write_text("something else")
        if not quiet:
            app.first = 100
            app.woken.set()

    with pytest.raises(StorageLost, match=f"{what.removesuffix('-wal')} was (taken away|written to by another)"):
        flow.run(take, concurrency=5, commit_seconds=0.01)
    if what == "out.jsonl" and how != "removed":
        assert path.read_text() == "something else", "it is somebody's"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    flow, _ = scripted(tmp_path, [])
    flow.app = Holds(0)

    async def go() -> None:
        first = asyncio.ensure_future(flow.go())
        await asyncio.sleep(0.05)
        with pytest.raises(JobError, match="another process works on this job"):
            await Flow(tmp_path, Scripted()).go()
        assert flow.executor is not None
        flow.executor.stop()
        assert await first is JobOutcome.STOPPED

    asyncio.run(go())

"""What the live page is told, who may hear it, and that nothing is done where nobody listens."""

import asyncio
import json
import re
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from support.items_harness import embedder, function
from support.key_files import bearer, write_keys
from support.server_harness import Answer, FakeClient, Front, run, until

from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.core.cost import Coefficients
from chairlift.core.finished import FinishReason
from chairlift.core.items.item import Failure
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.sequences.client import Beginning, Stream
from chairlift.engine.sequences.messages import EngineStats, SequenceUpdate
from chairlift.errors import RequestFailed
from chairlift.jobs.store import Counts, Job
from chairlift.server.batches.record import About, note
from chairlift.server.batches.service import Batches
from chairlift.server.front import page_line
from chairlift.server.http.exchange import Terms
from chairlift.server.http.tenants import Keys
from chairlift.server.live import snapshot
from chairlift.server.live.feed import MOST_WATCHERS, LiveFeed
from chairlift.server.live.items import ItemWatch
from chairlift.server.live.model_look import LogReader
from chairlift.server.live.slot_board import MOST_BARS, Bar, SlotBoard
from chairlift.server.live.snapshot import BatchLook, Observer
from chairlift.server.metrics.items import RecentCall
from chairlift.server.models.registry import Models
from chairlift.server.models.request_log import EndedRequest, RequestLog
from chairlift.server.models.sequence_service import SequenceService

HERE = {"host": "127.0.0.1:8000"}
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PEOPLE: dict[str, dict[str, Any]] = {
    "alice": {"rights": ["infer"], "requests_per_minute": 100, "requests_at_once": 5},
    "root": {"rights": ["infer", "admin"]},
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(write_keys(tmp_path / "keys.toml", **PEOPLE))


async def get(front: Front, path: str = "/v1/live", client: str = "127.0.0.1", query: str = "", **more: Any) -> Answer:
    return await front.call("GET", path, headers=HERE | more, query=query, client=client)


async def look(front: Front, **more: Any) -> Any:
    """One message."""
    answer = await get(front, query="limit=1", **more)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    return json.loads(answer.body.removeprefix(b"data: "))


@asynccontextmanager
async def asked(front: Front, *names: str | None, **body: Any) -> AsyncIterator[list[Stream]]:
    """Completions of these people that wait for their tokens, and are given up in the end."""
    tasks = []
    for name in names:
        count = len(front.client.streams)
        headers = bearer(name) if name else None
        tasks.append(asyncio.create_task(front.post("/v1/completions", {"prompt": "hello"} | body, headers=headers)))
        await until(lambda before=count: len(front.client.streams) > before)
    try:
        yield front.client.streams
    finally:
        front.gone.set()
        await asyncio.gather(*tasks)
        front.gone.clear()


def begin(stream: Stream, start: float, first: float) -> None:
    stream.running_since = start
    stream.beginning = Beginning(start, first, 0, {}, 0, 0)
    stream.started = True


# Who may watch


def test_without_keys_this_machine_may_watch_and_no_other() -> None:
    async def go() -> None:
        front = Front(host="0.0.0.0")  # else names but this machine's are refused before
        assert (await look(front))["models"][0]["name"] == "tiny"
        assert (await look(front, client="::1", host="localhost:8000"))["full"]
        for refused in (
            {"client": "10.0.0.7"},
            {"host": "chairlift.example"},
            {"x-forwarded-for": "10.0.0.7"},
            {"forwarded": "for=10.0.0.7"},
        ):
            answer = await get(front, **refused)
            assert (answer.status, answer.error["code"]) == (403, "not_local")
        elsewhere = await get(front, **{"sec-fetch-site": "cross-site"})
        assert (elsewhere.status, elsewhere.error["code"]) == (403, "cross_origin")
        assert front.live.task is None

    run(go)


def test_with_keys_the_right_admin_may_watch_from_anywhere(keys: str) -> None:
    async def go() -> None:
        front = Front(api_keys=keys)
        assert (await get(front)).status == 401
        refused = await get(front, **bearer("alice"))
        assert (refused.status, refused.error["code"]) == (403, "missing_right")
        seen = await look(front, client="10.0.0.7", **bearer("root"))
        assert seen["keys"]

    run(go)


# What costs


def test_nothing_runs_unless_somebody_watches() -> None:
    async def go() -> None:
        front = Front()
        feed = front.live
        assert feed.task is None
        first, second = feed.watch(), feed.watch()
        task = feed.task
        assert task is not None
        for watcher in (first, second):
            assert json.loads((await anext(watcher)).removeprefix(b"data: "))["full"]
        first.close()
        assert feed.task is task
        assert not json.loads((await anext(second)).removeprefix(b"data: "))["full"], "only what has changed"
        second.close()
        assert feed.task is None
        await until(task.done)

    run(go)


def test_who_asks_for_the_headers_alone_does_not_watch() -> None:
    async def go() -> None:
        front = Front()
        answer = await front.call("HEAD", "/v1/live", headers=HERE, client="127.0.0.1")
        assert (answer.status, answer.complete, answer.writes) == (200, True, [])
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert not front.live.watchers
        assert front.live.task is None

    run(go)


def test_a_client_that_hangs_up_watches_no_longer() -> None:
    async def go() -> None:
        front = Front()
        call = asyncio.create_task(get(front))
        await until(lambda: front.live.watchers)
        front.gone.set()
        await call
        assert not front.live.watchers
        assert front.live.task is None

    run(go)


def test_watchers_are_few_and_share_one_message() -> None:
    async def go() -> None:
        front = Front()
        feed = front.live
        watchers = [feed.watch() for _ in range(MOST_WATCHERS)]
        refused = await get(front)
        assert (refused.status, refused.error["code"]) == (429, "too_many_watchers")
        assert refused.headers["retry-after"] == "5"
        messages = [await anext(each) for each in watchers]
        assert all(each is messages[0] for each in messages)
        feed.close()
        for watcher in watchers:
            assert [each async for each in watcher] == []
        assert (await get(front)).status == 503, "the server leaves"

    run(go)


def test_who_reads_too_slowly_is_told_all_anew() -> None:
    async def go() -> None:
        feed = LiveFeed(lambda: pytest.fail("nobody reads"))  # type: ignore[arg-type,return-value]
        watcher = feed.watch()
        for number in range(5):
            watcher.push(b"%d" % number)
        assert watcher.is_new
        assert watcher.unread == []
        watcher.push(b"all")
        assert not watcher.is_new
        assert await anext(watcher) == b"all"
        watcher.close()

    run(go)


# What is told


def test_requests_have_bars_and_those_who_wait_a_reason() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        front.client.stats = EngineStats(
            running=2,
            waiting=1,
            waiting_reason="waiting_for_slots",
            kv_blocks_used=30,
            kv_blocks_cached=20,
            kv_blocks_total=100,
            coefficients=Coefficients(0.01, 0.0, 0.0, 0.0),
        )
        async with asked(front, None, None, None, max_tokens=5) as streams:
            feed = front.live
            watcher = feed.watch()
            arrival = streams[0].request.arrival
            begin(streams[0], arrival, arrival + 0.001)
            streams[1].running_since = arrival
            (model,) = json.loads((await anext(watcher)).removeprefix(b"data: "))["models"]
            assert (model["running"], model["waiting"], model["kv"]) == (2, 1, [30, 20, 100])
            assert model["queue"] == [["every place to run is taken, and it gets one when another request ends", 1]]
            assert model["limit"] == pytest.approx(6400), "64 slots in a step of 10 ms"
            told = {bar[0]: bar for bar in model["bars"]}
            ids = [stream.request.id for stream in streams]
            assert told.keys() == set(ids[:2])
            assert {told[each][1] for each in ids[:2]} == {0, 1}
            assert (told[ids[0]][3], told[ids[1]][3]) == (arrival + 0.001, None), "the second one's prompt is read"
            streams[0].ended = arrival + 0.002
            streams[0].push(SequenceUpdate(ids[0], [70], FinishReason.LENGTH))
            while not (bars := json.loads((await anext(watcher)).removeprefix(b"data: "))["models"][0]["bars"]):
                pass
            assert [(bar[0], bar[4]) for bar in bars] == [(ids[0], arrival + 0.002)]
            watcher.close()
            # Whoever comes now hears of the last minute, also of what nobody watched.
            (model,) = (await look(front))["models"]
            assert {bar[0] for bar in model["bars"]} == set(ids[:2])

    run(go)


def test_who_was_told_less_than_there_was_is_told_all_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_MOST_CHANGES", 2)

    async def go() -> None:
        front = Front(FakeClient(manual=True))
        watcher = front.live.watch()
        assert json.loads((await anext(watcher)).removeprefix(b"data: "))["full"]
        async with asked(front, *(None for _ in range(5)), max_tokens=5) as streams:
            for stream in streams:
                stream.running_since = stream.request.arrival
            told: list[tuple[bool, int]] = []
            while len(told) < 3:
                message = json.loads((await anext(watcher)).removeprefix(b"data: "))
                if told or message["models"][0]["bars"]:
                    told.append((message["full"], len(message["models"][0]["bars"])))
            assert told == [(False, 2), (True, 5), (False, 0)]
            watcher.close()

    run(go)


def test_a_model_in_the_place_of_another_is_told_whole_the_next_time() -> None:
    """Bars of the one before would never end for who watches."""
    front = Front()
    config = ServerConfig()
    observer = Observer(front.models, Batches(front.models, config), Keys(config), False)
    told = []
    for _ in range(2):
        for _ in range(2):
            observer.look()
            told.append(observer.needs_full)
        front.models.add(SequenceService(FakeClient(), front.tokenizer, "tiny", config))
    observer.look()
    assert [*told, observer.needs_full] == [False, False, True, False, True]


def test_rates_and_percentiles_are_those_of_the_last_seconds() -> None:
    async def go() -> None:
        front = Front()
        front.service.metrics.time_to_first_token.observe(100.0)  # long ago
        watcher = front.live.watch()
        first = json.loads((await anext(watcher)).removeprefix(b"data: "))["models"][0]
        assert (first["written"], first["ttft"]) == (None, None)
        front.service.metrics.time_to_first_token.observe(0.2, 100)
        await front.complete(max_tokens=7)
        second = first
        while not (second["written"] and second["ttft"]):
            second = json.loads((await anext(watcher)).removeprefix(b"data: "))["models"][0]
        assert 0 < second["written"] <= second["most"] < 100
        assert 0.1 < second["ttft"][0] < second["ttft"][1] <= 0.25
        watcher.close()

    run(go)


def test_models_that_answer_in_one_call_have_calls_as_bars() -> None:
    async def go() -> None:
        front = Front()
        service, dispatcher = embedder()
        front.models.add(service)
        answer = await front.post("/v1/embeddings", {"input": ["hello", "world"], "model": "embedder"})
        assert answer.status == 200
        _, model = (await look(front))["models"]
        assert (model["name"], model["kind"], model["slots"]) == ("embedder", "item", 1)
        ((name, slot, start, _, end, _, count, *_),) = model["bars"]
        assert (name, slot, count) == (answer.headers["x-request-id"], 0, 2)
        assert start < end
        dispatcher.held = True
        waits = asyncio.create_task(front.post("/v1/embeddings", {"input": "hello", "model": "embedder"}))
        await until(lambda: dispatcher.scheduler.num_running)
        assert [bar[4] for bar in (await look(front))["models"][1]["bars"]] == [end, None]
        dispatcher.held = False
        await waits

    run(go)


def test_every_call_has_a_bar_and_those_that_failed_say_so() -> None:
    async def go() -> None:
        service, dispatcher = function()
        watch = ItemWatch(service)
        dispatcher.held = True
        first = asyncio.create_task(service.infer([1], Terms()))
        await until(lambda: dispatcher.scheduler.num_running)
        (bar,) = watch.look(time.monotonic()).bars
        dispatcher.held = False
        await first
        # Others begin and end between two looks, as shortly after the first one as it took itself.
        for number in range(3):
            await service.infer([number], Terms())
        bars = watch.look(time.monotonic()).bars
        assert len({each.id for each in bars}) == 4
        assert (bar.id, "done") in {(each.id, each.finish_reason) for each in bars}
        assert all(each.end is not None and each.start < each.end for each in bars)
        assert watch.look(time.monotonic()).bars == []

        def broken(payloads: list[Any]) -> list[Any]:
            if "bad" in payloads:
                raise ValueError("no")
            return payloads

        dispatcher.compute = broken
        with pytest.raises(RequestFailed):
            await service.infer(["good", "bad"], Terms())
        told = [(each.finish_reason, each.count) for each in watch.look(time.monotonic()).bars]
        # Both together, then each by itself, and who is to blame once more.
        assert told[0] == ("error", 2)
        assert ("done", 1) in told
        assert ("error", 1) in told
        assert len(told) == len(service.metrics.calls) - 4
        assert len(watch.board.bars) == len(service.metrics.calls)

    run(go)


def test_why_items_wait_is_told_of_live_ones_and_of_those_in_the_background_apart() -> None:
    async def go() -> None:
        service, dispatcher = function()
        dispatcher.configure(BatchLimits(max_batch_size=100, max_waiting=4096))
        watch = ItemWatch(service)
        dispatcher.held = True
        asked = [asyncio.create_task(service.infer([1] * 100, Terms()))]
        await until(lambda: dispatcher.scheduler.num_running == 100)
        asked.append(asyncio.create_task(service.infer([1] * 3, Terms(background=True))))
        await until(lambda: dispatcher.scheduler.num_background_waiting)
        taken = "every place to run is taken, and it gets one when another request ends"
        assert watch.look(time.monotonic()).queue == [(f"they are in the background; {taken}", 3)]
        asked.append(asyncio.create_task(service.infer([1] * 2, Terms())))
        await until(lambda: dispatcher.scheduler.num_waiting)
        live, background = watch.look(time.monotonic()).queue
        assert live == (taken, 2)
        assert background == ("they are in the background, and wait for live ones", 3)
        dispatcher.held = False
        await asyncio.gather(*asked)
        assert watch.look(time.monotonic()).queue == []

    run(go)


def test_an_instance_is_busy_while_its_call_runs() -> None:
    """Long before the call is over, and is timed."""

    async def go() -> None:
        service, dispatcher = function()
        watch, now = ItemWatch(service), time.monotonic()
        dispatcher.held = True
        asked = asyncio.create_task(service.infer([1], Terms()))
        await until(lambda: dispatcher.scheduler.num_running)
        watch.look(now + 1)
        assert watch.look(now + 2).busy == pytest.approx(1)
        dispatcher.held = False
        await asked

    run(go)


def call_of(instance: int, started: float, ended: float, failure: Failure | None = None) -> RecentCall:
    return RecentCall(started, 0.0, instance, 1, 1.0, 0, failure, ended=ended, first=f"item-{started}")


def test_calls_that_failed_kept_an_instance_busy_too() -> None:
    service, _ = function()
    watch = ItemWatch(service)
    watch.look(100.0)
    service.metrics.calls.append(call_of(0, 101.0, 106.0, Failure.TIMED_OUT))
    assert watch.look(110.0).busy == pytest.approx(0.5)


def test_a_call_has_the_row_of_its_instance() -> None:
    service, _ = function()
    service.metrics.calls += [call_of(1, 98.0, 98.5), call_of(0, 99.0, 99.5)]
    told = {bar.start: bar.slot for bar in ItemWatch(service).look(100.0).bars}
    assert told == {98.0: 1, 99.0: 0}


def test_settings_that_hold_by_now_are_told() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        front.client.stats = EngineStats(running=1, kv_blocks_total=100, coefficients=Coefficients(0.01, 0.0, 0.0, 0.0))
        front.client.retune(SequenceConfig(model="tiny", max_num_seqs=8))
        (model,) = (await look(front))["models"]
        assert (model["slots"], model["limit"]) == (8, pytest.approx(800))

    run(go)


def test_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_MOST_MODELS", 2)

    async def go() -> None:
        front = Front()
        listed = [("tiny", front.service), *((str(number), None) for number in range(5))]
        monkeypatch.setattr(front.models, "index", lambda: listed)
        seen = await look(front)
        assert (seen["loadable"], seen["more"]) == (["0", "1"], {"loadable": 3})

    run(go)


def test_models_in_every_state_and_folders_stay_unsaid() -> None:
    async def go() -> None:
        front = Front()
        front.client.state, front.client.failure = "failed", "no file at /srv/secret/model.safetensors"
        (model,) = (await look(front))["models"]
        assert model["state"] == "failed"
        assert "model.safetensors" in model["failure"]
        assert "secret" not in model["failure"]
        assert not (await look(front))["control"], "no model comes or goes here"

    run(go)


def test_tenants_have_their_requests_and_limits(keys: str) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True), api_keys=keys)
        async with asked(front, "alice", "alice", "root", max_tokens=1) as streams:
            streams[0].running_since = streams[0].request.arrival
            seen = await look(front, **bearer("root"))
            (alice, root) = seen["tenants"]
            assert (alice["name"], alice["running"], alice["waiting"], alice["ended"]) == ("alice", 1, 1, 0)
            assert alice["left"]["requests_at_once"] == [3, 5]
            assert 97 < alice["left"]["requests_per_minute"][0] < 99.9
            assert (root["name"], root["running"], root["waiting"], root["left"]) == ("root", 0, 1, {})
            assert seen["models"][0]["bars"][0][7] == "alice"
            streams[0].push(SequenceUpdate(streams[0].request.id, [70], FinishReason.LENGTH))
            await until(lambda: front.service.log.ended["alice"])
            (alice, _) = (await look(front, **bearer("root")))["tenants"]
            assert (alice["ended"], alice["tokens"]) == (1, len(streams[0].request.prompt_ids) + 1)

    run(go)


def test_what_ended_counts_for_a_minute_from_its_end_whoever_watches(
    keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("chairlift.server.live.snapshot.time.monotonic", lambda: clock[0])
    front = Front(api_keys=keys)
    line = front.service.log.ended["alice"]
    for ended in (900.0, 950.5, 970.5, 999.5):
        line.append(EndedRequest(id=f"cmpl-{ended}", ended=ended, finish_reason="stop", prompt_tokens=2, tokens=1))
    config = ServerConfig(api_keys=keys)
    observer = Observer(front.models, Batches(front.models, config), Keys(config), False)

    def told() -> tuple[int, int]:
        (alice,) = (each for each in observer.look().tenants if each.name == "alice")
        return alice.ended, alice.tokens

    assert told() == (3, 9)
    clock[0] = 1020.0
    assert told() == (2, 6)
    clock[0] = 1055.0
    assert told() == (1, 3)
    clock[0] = 1061.0
    assert told() == (0, 0)


def test_who_reads_slowly_counts_once_it_is_written_down() -> None:
    log: RequestLog[Any] = RequestLog()
    reader = LogReader(log)

    def keep(owner: str, name: str, ended: float) -> None:
        log.keep(owner, EndedRequest(id=name, ended=ended, finish_reason="stop"))

    def read(now: float) -> list[tuple[str | None, str]]:
        return sorted((owner, each.id) for owner, each in reader.read(now))

    keep("alice", "first", 990.0)
    keep("alice", "ancient", 900.0)
    assert read(1000.0) == [("alice", "first")]
    keep("alice", "slow", 980.0)
    keep("bob", "last", 1000.0)
    keep("bob", "slower than a minute", 930.0)
    assert read(1001.0) == [("alice", "slow"), ("bob", "last")]
    assert read(1002.0) == []


def test_batches_that_are_not_over_say_how_far_they_are(keys: str) -> None:
    noted = About(endpoint="/v1/embeddings", input_file_id="f", completion_window="24h", expires_at=1.0, model="tiny")
    jobs = []
    for number in range(25):
        job = Job(id=f"batch_{number}", state="in_progress", entered={}, total=10, tenant="alice")
        note(job, noted)
        jobs.append((job, Counts(completed=number, failed=1)))

    class Stored(Batches):
        def under_way(self) -> list[tuple[Job, Counts]]:
            return jobs

    config = ServerConfig(api_keys=keys)
    seen = Observer(Models([]), Stored(Models([]), config), Keys(config), False).look()
    assert seen.batches[1] == BatchLook("batch_1", "in_progress", "/v1/embeddings", "tiny", "alice", 10, 1, 1)
    assert (len(seen.batches), seen.more) == (20, {"batches": 5})


# Slots


def test_a_slot_that_is_left_is_taken_by_the_next() -> None:
    board = SlotBoard(2)
    new = board.update([Bar("a", 9, 0.0), Bar("b", 9, 0.5)], [], 1.0)
    assert [(bar.id, bar.slot) for bar in new] == [("a", 0), ("b", 1)]
    over = Bar("a", 9, 0.0, 0.2, 1.5, finish_reason="stop")
    changed = board.update([Bar("b", 9, 0.5), Bar("c", 9, 1.5)], [over], 2.0)
    # What has changed comes last: of a long list the end is told.
    assert [(bar.id, bar.slot, bar.end, bar.finish_reason) for bar in changed] == [
        ("c", 0, None, None),
        ("a", 0, 1.5, "stop"),
    ]
    assert board.update([Bar("b", 9, 0.5, 0.9), Bar("c", 9, 1.5)], [over], 2.3) == [Bar("b", 1, 0.5, 0.9)]
    # More than there are slots, as far as can be seen: shown in a row of its own.
    assert board.update([Bar("b", 9, 0.5, 0.9), Bar("c", 9, 1.5), Bar("d", 9, 2.4)], [], 2.5)[0].slot == 2


def test_who_was_preempted_has_a_bar_for_each_time() -> None:
    board = SlotBoard(1)
    board.update([Bar("a", 0, 0.0)], [], 1.0)
    board.update([], [], 2.0)
    board.update([Bar("a", 0, 3.0)], [], 3.5)
    board.update([], [Bar("a", 0, 0.0, 3.2, 4.0)], 4.5)
    assert [(bar.start, bar.end) for bar in board.bars] == [(0.0, 2.0), (3.0, 4.0)]


def test_a_board_holds_the_last_minute_and_no_more_than_so_many() -> None:
    board = SlotBoard(4)
    board.update([], [Bar(f"x{i}", 0, i / 1e3, None, i / 1e3) for i in range(2 * MOST_BARS)], 2.0)
    assert len(board.bars) == MOST_BARS
    assert board.bars[-1].id == f"x{2 * MOST_BARS - 1}"
    board.update([], [], 100.0)
    assert board.bars == []


# The page


def test_browsers_get_the_page_and_others_what_they_got() -> None:
    async def go() -> None:
        front = Front()
        for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
            answer = await get(front, "/", **accept)
            assert answer.json() == {"model": "tiny", "status": "ready"}
            assert answer.headers["vary"] == "Accept"
        page = await get(front, "/", **HTML)
        assert page.headers["content-type"].startswith("text/html")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {value for name, value in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}
        assert policy["require-trusted-types-for"] == "'script'"

    run(go)


def test_the_page_is_open_and_says_nothing_and_the_rest_is_not(keys: str) -> None:
    async def go() -> None:
        front = Front(api_keys=keys)
        assert (await get(front, "/")).status == 401
        page = await get(front, "/", **HTML)
        assert page.status == 200
        assert b"tiny" not in page.body
        assert (await front.post("/", {"inputs": "x"}, headers=HTML)).status == 401
        assert (await get(front, "/live/live.css")).status == 200
        for wrong in ("/live/none.js", "/live/__init__.py", "/live/live.html"):
            assert (await get(front, wrong)).status == 404

    run(go)


@pytest.mark.parametrize(
    ("address", "settings", "said"),
    [
        ("127.0.0.1", {}, "Live page: http://127.0.0.1:8000/"),
        ("::1", {}, "Live page: http://[::1]:8000/"),
        ("0.0.0.0", {}, "Live page: http://127.0.0.1:8000/"),
        ("10.0.0.7", {}, None),
        ("10.0.0.7", {"api_key": "x"}, "Live page: http://10.0.0.7:8000/ (with a key that has the right 'admin')"),
    ],
)
def test_where_the_page_is_said_to_be(address: str, settings: dict[str, Any], said: str | None) -> None:
    assert page_line(ServerConfig(**settings), "http", address, 8000) == said


def test_what_the_page_is_made_of_is_packaged_small_and_makes_no_markup_of_text() -> None:
    folder = resources.files("chairlift.server.live") / "page"
    files = {each.name: each.read_text() for each in folder.iterdir()}
    globs = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = globs["package-data"]["chairlift"]
    for name, text in files.items():
        assert any(fnmatch(f"server/live/page/{name}", glob) for glob in packaged), name
        if not name.startswith("uplot-"):
            assert len(text.splitlines()) < 500
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert unsafe not in text, name
        for wanted in re.findall(r'from "\./([^"]+)"', text):
            assert wanted in files, f"{name} imports it"
    shell = files["live.html"]
    named = re.findall(r'(?:src|href)="([^"]+)"', shell)
    assert {each.removeprefix("live/") for each in named} - {"docs"} <= files.keys()
    assert not re.search(r"<style|<script(?! src)| style=| on[a-z]+=", shell)
    assert "MIT" in files["uplot-1.6.32.LICENSE.txt"]

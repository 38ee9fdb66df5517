"""Whose requests there are, why they wait, and what became of them, over HTTP and in a terminal."""

import asyncio
import io
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.items_harness import embedder, function
from support.key_files import bearer, write_keys
from support.server_harness import Answer, FakeClient, Front, run, until

from chairlift import BadItem
from chairlift.cli import main
from chairlift.commands import why
from chairlift.config.sequences import SequenceConfig
from chairlift.core.decision import Reason
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.overload import Foreseen, ForeseenMoment
from chairlift.core.sequences.standing import SequenceState, Standing
from chairlift.engine.sequences.client import Beginning, Stream
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.server.models import request_log

PEOPLE: dict[str, dict[str, Any]] = {
    "alice": {"rights": ["infer"]},
    "bob": {"rights": ["infer"]},
    "root": {"rights": ["infer", "admin"]},
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(write_keys(tmp_path / "keys.toml", **PEOPLE))


@asynccontextmanager
async def asked(front: Front, *names: str | None, **body: Any) -> AsyncIterator[list[Stream]]:
    """Completions of these people that wait for their tokens, and are given up in the end."""
    tasks = []
    for name in names:
        count = len(front.client.streams)
        headers = bearer(name) if name else None
        tasks.append(asyncio.create_task(front.post("/v1/completions", {"prompt": "hello"} | body, headers=headers)))
        while len(front.client.streams) == count:
            await asyncio.sleep(0.001)
    try:
        yield front.client.streams
    finally:
        front.gone.set()
        await asyncio.gather(*tasks)
        front.gone.clear()


async def get(front: Front, path: str = "", name: str | None = None, query: str = "") -> Answer:
    headers = bearer(name) if name else None
    return await front.call("GET", f"/v1/requests{path}", headers=headers, query=query, client="127.0.0.1")


def waiting(stream: Stream, ahead: int, detail: str = "all 2 slots are taken", more_urgent: int = 0) -> Standing:
    name = stream.request.id
    return Standing(name, SequenceState.WAITING, ahead, more_urgent, reason=Reason.SLOTS, detail=detail)


def begin(
    stream: Stream, queued: float, prefill: float, waits: dict[str, float] | None = None, cached: int = 0
) -> None:
    """As the client does with the first update."""
    scheduled = stream.request.arrival + queued
    stream.beginning = Beginning(scheduled, scheduled + prefill, cached, waits or {}, steps=10, rows=30)


def end(stream: Stream, after: float, steps: int = 0, rows: int = 0) -> None:
    """As the client does with the last update."""
    stream.ended, stream.steps, stream.rows = stream.request.arrival + after, steps, rows
    stream.push(SequenceUpdate(stream.request.id, [70], FinishReason.LENGTH))


# Live ones


def test_a_request_that_waits_says_where_and_why_and_until_when() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        async with asked(front, None, None, None) as streams:
            ids = [stream.request.id for stream in streams]
            front.client.standings = {
                ids[0]: Standing(ids[0], SequenceState.RUNNING, tokens=7),
                ids[1]: waiting(streams[1], 3, more_urgent=1),
                ids[2]: waiting(streams[2], 5, f"waits behind {ids[1]}: no block for cmpl-{'0' * 24}-1"),
            }
            now = time.monotonic()
            moment = ForeseenMoment(now + 100, now + 50, now + 200)
            front.client.foreseen = {ids[2]: Foreseen(ForeseenMoment(now + 90), moment, None)}
            told = (await get(front)).json()
            assert not told["has_more"]
            assert [each["id"] for each in told["data"]] == ids
            first, second, third = told["data"]
            assert (first["state"], first["position"], first["ahead"], first["tokens"]) == ("running", None, None, 7)
            assert (second["state"], second["position"], second["reason"]) == ("waiting", 4, "waiting_for_slots")
            assert second["ahead"] == {"count": 3, "own": [], "others": 3, "more_urgent": 1}
            assert third["ahead"] == {"count": 5, "own": [ids[1]], "others": 4, "more_urgent": 0}
            assert third["detail"] == f"waits behind {ids[1]}: no block for another request"
            assert second["predicted"] is None
            predicted = third["predicted"]
            assert predicted["end"] is None
            assert predicted["start"]["early_s"] is None
            assert 40 < predicted["first_token"]["early_s"] < predicted["start"]["in_s"] < 100
            assert predicted["first_token"]["in_s"] < predicted["first_token"]["late_s"] <= 200
            assert third["phases"]["queued_s"] <= third["phases"]["total_s"]
            assert (await get(front, f"/{ids[2]}")).json()["parts"][0]["position"] == 6
            assert [each["id"] for each in (await get(front, query="limit=2")).json()["data"]] == ids[:2]
            assert (await get(front, query="limit=2")).json()["has_more"]
        assert (await get(front)).json()["data"] == []

    run(go)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (SequenceState.PREPARING, "form"),
        (SequenceState.PREFILLING, "prompt is read: 3 of"),
        (SequenceState.PREEMPTED, "gave up its place"),
        (SequenceState.PAUSED, "background"),
    ],
)
def test_every_state_has_words(state: SequenceState, words: str) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        async with asked(front, None) as (stream,):
            reason = Reason.LIVE if state is SequenceState.PAUSED else None
            name = stream.request.id
            front.client.standings = {name: Standing(name, state, computed=3, reason=reason, started=1.0)}
            (told,) = (await get(front)).json()["data"]
            assert told["state"] == state
            assert words in told["why"]

    run(go)


def test_where_the_worker_does_not_say_the_front_says_what_it_knows() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        async with asked(front, None) as (stream,):
            moment = ForeseenMoment(time.monotonic() + 90)
            front.client.foreseen = {stream.request.id: Foreseen(moment, None, None)}

            async def told() -> Any:
                (view,) = (await get(front)).json()["data"]
                assert "ask again" in view["why"]
                return view

            waits = await told()
            assert (waits["state"], waits["predicted"]["start"] is None) == ("waiting", False)
            assert set(waits["phases"]) == {"queued_s", "total_s"}
            stream.running_since = time.monotonic()
            reads = await told()
            assert (reads["state"], reads["predicted"]["start"]) == ("prefilling", None)
            queued = stream.running_since - stream.request.arrival
            assert reads["phases"]["queued_s"] == pytest.approx(queued, abs=1e-4)
            assert reads["phases"]["prefill_s"] >= 0
            begin(stream, 0.0, 0.0)
            stream.push(SequenceUpdate(stream.request.id, [70]))
            assert (await told())["state"] == "running"
            stream.running_since = 0.0
            assert (await told())["state"] == "preempted"

    run(go)


def test_all_parts_of_a_request_are_found_by_its_id() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        async with asked(front, None, n=3) as streams:
            whole = streams[0].request.id.removesuffix("-0")
            told = (await get(front, f"/{whole}")).json()
            assert [part["id"] for part in told["parts"]] == [f"{whole}-{index}" for index in range(3)]
            assert {part["request"] for part in told["parts"]} == {whole}
            assert len((await get(front, f"/{whole}-1")).json()["parts"]) == 1
        assert len((await get(front, f"/{whole}")).json()["parts"]) == 3, "and when they have ended"

    run(go)


# Whose they are


def test_another_tenant_sees_nothing_of_it(keys: str) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True), api_keys=keys)
        async with asked(front, "alice", "bob", "alice") as streams:
            ids = [stream.request.id for stream in streams]
            head = f"waits behind {ids[0]}: all 2 slots are taken"
            front.client.standings = {each.request.id: waiting(each, i, head) for i, each in enumerate(streams)}
            assert [each["id"] for each in (await get(front, name="alice")).json()["data"]] == [ids[0], ids[2]]
            (told,) = (await get(front, name="bob")).json()["data"]
            assert told["id"] == ids[1]
            assert told["ahead"] == {"count": 1, "own": [], "others": 1, "more_urgent": 0}
            assert told["detail"] == "waits behind another request: all 2 slots are taken"
            assert ids[0] not in str(told)
            assert len((await get(front, name="root")).json()["data"]) == 3
            assert (await get(front, f"/{ids[0]}", "root")).status == 200
            nobodys = f"cmpl-{'0' * 24}"
            nothing = await get(front, f"/{nobodys}", "bob")
            found = await get(front, f"/{ids[0]}", "bob")
            assert found.status == nothing.status == 404
            assert found.error["message"] == nothing.error["message"].replace(nobodys, ids[0])
            assert (await get(front, f"/{ids[0]}")).status == 401
        assert (await get(front, f"/{ids[0]}", "bob")).status == 404
        assert (await get(front, f"/{ids[0]}", "alice")).json()["parts"][0]["state"] == "ended"
        assert [each["id"] for each in (await get(front, name="bob", query="status=ended")).json()["data"]] == [ids[1]]
        assert len((await get(front, name="root", query="status=ended")).json()["data"]) == 3

    run(go)


@pytest.mark.parametrize("request_id", ["a" * 101, "a%", "..", "a b", "<script>", "é", "a\x00", "a;b", "*", "a.b"])
def test_hostile_ids_are_refused(request_id: str) -> None:
    async def go() -> None:
        answer = await get(Front(), f"/{request_id}")
        assert answer.status == 400
        assert answer.error["code"] == "invalid_id"

    run(go)


@pytest.mark.parametrize("path", ["/unknown", "/item-00000000-1", f"/chatcmpl-{'f' * 24}", "/a/b", "/-"])
def test_ids_of_nothing_are_not_found(path: str) -> None:
    async def go() -> None:
        assert (await get(Front(), path)).status == 404

    run(go)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("limit=0", 400),
        ("limit=101", 400),
        (f"limit={9:013}", 400),
        (f"limit={'0' * 12}{'9' * 30}", 400),
        ("limit=x", 400),
        ("status=all", 400),
        ("x=1", 400),
        ("model=none", 404),
    ],
)
def test_a_list_takes_what_it_knows(query: str, status: int) -> None:
    async def go() -> None:
        assert (await get(Front(), query=query)).status == status

    run(go)


# What became of them


def ended_with(config: SequenceConfig, **beginning: Any) -> dict[str, Any]:
    """What is told of a request of 5 s that began so, of a model with these settings."""
    made: dict[str, Any] = {}

    async def go() -> None:
        front = Front(FakeClient(manual=True), show_cached_tokens=beginning.pop("show_cached", True))
        front.client.config = config
        task = asyncio.create_task(front.complete(prompt=[7] * 50, max_tokens=1))
        await until(lambda: front.client.streams)
        (stream,) = front.client.streams
        stream.preemptions = beginning.pop("preemptions", 0)
        begin(stream, **beginning)
        end(stream, after=5.0, steps=40, rows=100)
        answer = await task
        assert answer.status == 200
        (part,) = (await get(front, f"/{answer.headers['x-request-id']}")).json()["parts"]
        made.update(part)

    run(go)
    return made


def test_afterwards_each_phase_has_its_time() -> None:
    told = ended_with(SequenceConfig(model="m"), queued=1.5, prefill=0.5, cached=16)
    assert (told["state"], told["finish_reason"]) == ("ended", "length")
    assert told["phases"] == {"queued_s": 1.5, "prefill_s": 0.5, "decode_s": 3.0, "total_s": 5.0}
    assert (told["prompt_tokens"], told["cached_tokens"], told["tokens"]) == (50, 16, 1)
    assert (told["steps"], told["mean_batch"], told["preemptions"]) == (40, 2.5, 0)


@pytest.mark.parametrize(
    ("settings", "reason", "setting"),
    [
        ({}, "waiting_for_slots", "max_num_seqs"),
        ({"strategy": "none"}, "waiting_for_slots", "strategy"),
        ({"strategy": "static"}, "waiting_for_slots", "strategy"),
        ({"strategy": "static"}, "waiting_for_batch", "batch_size"),
        ({"strategy": "dynamic"}, "waiting_for_window", "max_wait_ms"),
        ({}, "waiting_for_blocks", "kv_cache_gb"),
        ({}, "waiting_for_tokens", "max_num_batched_tokens"),
        ({"target_itl_ms": 50}, "waiting_for_itl", "target_itl_ms"),
        ({}, "waiting_for_itl", "step_time_ms"),
    ],
)
def test_what_it_waited_for_says_what_would_have_made_it_faster(
    settings: dict[str, Any], reason: str, setting: str
) -> None:
    waits = {reason: 9.0, "waiting_for_tokens" if reason != "waiting_for_tokens" else "waiting_for_itl": 0.01}
    (hint,) = ended_with(SequenceConfig(model="m", **settings), queued=3.0, prefill=0.01, waits=waits)["hints"]
    assert (hint["setting"], hint["seconds"]) == (setting, 3.0), "no longer than it waited at all"


def test_a_prompt_that_was_not_cached_and_preemptions_are_told_and_trifles_are_not() -> None:
    config = SequenceConfig(model="m")
    assert ended_with(config, queued=0.2, prefill=0.2, waits={"waiting_for_slots": 0.2})["hints"] == []
    (hint,) = ended_with(config, queued=0.0, prefill=2.0)["hints"]
    assert (hint["setting"], hint["seconds"]) == (None, 2.0)
    assert "50 of 50 tokens" in hint["text"]
    assert ended_with(config, queued=0.0, prefill=2.0, cached=48)["hints"] == []
    (hint,) = ended_with(SequenceConfig(model="m", enable_prefix_caching=False), queued=0.0, prefill=2.0)["hints"]
    assert hint["setting"] == "enable_prefix_caching"
    (hint,) = ended_with(config, queued=0.0, prefill=0.0, preemptions=3)["hints"]
    assert (hint["setting"], hint["seconds"]) == ("kv_cache_gb", None)


def test_what_is_cached_is_not_told_where_the_server_keeps_that_to_itself() -> None:
    told = ended_with(SequenceConfig(model="m"), queued=0.0, prefill=2.0, cached=16, show_cached=False)
    assert told["cached_tokens"] is None
    assert told["hints"] == []


def test_what_ended_is_kept_for_a_while_and_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        front = Front()
        ids = [(await front.complete(max_tokens=1)).headers["x-request-id"] for _ in range(5)]
        told = (await get(front, query="status=ended&limit=2")).json()
        assert [each["id"] for each in told["data"]] == ids[:2:-1]
        assert told["has_more"]
        ended = front.service.log.ended
        assert (ended[None].maxlen, ended["alice"].maxlen) == (4000, 1000), "without keys all are one tenant's"
        monkeypatch.setattr(request_log, "KEPT_S", 0.0)
        assert (await get(front, query="status=ended")).json()["data"] == []
        assert (await get(front, f"/{ids[-1]}")).status == 404

    run(go)


def test_who_hung_up_and_what_failed_is_told_too() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        async with asked(front, None) as (stream,):
            pass
        (part,) = (await get(front, f"/{stream.request.id}")).json()["parts"]
        assert (part["finish_reason"], part["steps"]) == ("abort", None)
        assert not front.service.log.live[None]

    run(go)


# Items


def test_items_wait_and_run_and_end(keys: str) -> None:
    async def go() -> None:
        service, dispatcher = function()
        front = Front(api_keys=keys)
        front.models.add(service)
        path = "/v1/models/function:predict"
        await front.post(path, {"instances": [0]}, headers=bearer("root"))
        dispatcher.held = True

        def ask(name: str) -> asyncio.Task[Answer]:
            return asyncio.create_task(front.post(path, {"instances": [1]}, headers=bearer(name)))

        running = ask("alice")
        await until(lambda: dispatcher.scheduler.num_running)
        tasks = [running, ask("bob"), ask("alice")]
        await until(lambda: dispatcher.scheduler.num_waiting == 2)
        first, last = (await get(front, name="alice")).json()["data"]
        assert (first["state"], first["kind"], first["position"]) == ("running", "item", None)
        assert (last["state"], last["position"]) == ("waiting", 2)
        assert last["ahead"] == {"count": 1, "own": [], "others": 1, "more_urgent": None}
        assert last["reason"] == "waiting_for_slots"
        assert first["predicted"]["start"] is None
        ends, starts = (each["predicted"][name]["in_s"] for each, name in ((first, "end"), (last, "start")))
        assert ends <= starts < last["predicted"]["end"]["in_s"]
        (other,) = (await get(front, name="bob")).json()["data"]
        assert (await get(front, f"/{last['id']}", "bob")).status == 404
        assert (await get(front, f"/{last['id']}", "alice")).json()["parts"][0]["id"] == last["id"]
        assert len((await get(front, name="root")).json()["data"]) == 3
        dispatcher.held = False
        answers = await asyncio.gather(*tasks)
        assert [answer.headers["x-request-id"] for answer in answers] == [first["id"], other["id"], last["id"]]
        assert (await get(front, name="root")).json()["data"] == []
        (part,) = (await get(front, f"/{last['id']}", "alice")).json()["parts"]
        assert (part["state"], part["finish_reason"], part["items"]) == ("ended", "done", 1)
        assert part["phases"]["run_s"] == 0.002
        assert part["mean_batch"] == 2, "the one that waited with it"
        assert (await get(front, f"/{last['id']}", "bob")).status == 404

    run(go)


def test_items_that_failed_are_told_with_their_request() -> None:
    async def go() -> None:
        service, dispatcher = embedder()
        front = Front()
        front.models.add(service)
        dispatcher.compute = lambda payloads: [RuntimeError("no") for _ in payloads]
        answer = await front.post("/v1/embeddings", {"input": ["hello", "world"]})
        assert answer.status == 500
        (part,) = (await get(front, query="status=ended")).json()["data"]
        assert (part["finish_reason"], part["items"]) == ("error", 2)

    run(go)


def test_without_keys_ids_are_listed_for_this_machine_alone() -> None:
    """With an id of a kept response anybody could read it."""

    async def go() -> None:
        front = Front(FakeClient(manual=True))
        async with asked(front, None) as streams:
            name = streams[0].request.id
            refused = await front.call("GET", "/v1/requests", client="192.0.2.7")
            assert (refused.status, refused.error["code"]) == (403, "not_local")
            assert refused.error["message"].endswith("elsewhere it takes a key")
            assert (await front.call("GET", f"/v1/requests/{name}", client="192.0.2.7")).status == 200
            assert (await get(front)).json()["data"][0]["id"] == name

    run(go)


# In a terminal


def test_words_for_a_person() -> None:
    told = ended_with(SequenceConfig(model="m"), queued=3.0, prefill=0.5, waits={"waiting_for_slots": 3.0})
    text = "\n".join(why.words(told))
    assert "tiny: ended" in text
    assert "waited 3.00 s, prompt read 0.50 s, answer written 1.50 s" in text
    assert "40 to write it, with 2.5 requests in each" in text
    assert "(max_num_seqs)" in text


def test_words_for_one_that_waits() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        async with asked(front, None, None) as streams:
            front.client.standings = {each.request.id: waiting(each, 2 * i) for i, each in enumerate(streams)}
            name, now = streams[1].request.id, time.monotonic()
            front.client.foreseen = {name: Foreseen(None, ForeseenMoment(now + 40, now + 30, now + 90.4), None)}
            text = "\n".join(why.words((await get(front, f"/{name}")).json()["parts"][0]))
            assert f"{name} on tiny: waiting, number 3 in the queue" in text
            assert f"yours: {streams[0].request.id}, 1 more" in text
            assert "first token in 40 s (9 times in 10 in 30 s to 90 s)" in text
            lines = why.table((await get(front)).json(), 100)
            assert lines[0] == "2 requests: 2 waiting"
            assert all(len(line) <= 100 for line in lines)
            assert lines[3].startswith(streams[0].request.id)

    run(go)


def test_top_draws_over_and_over_until_it_is_told_to_stop() -> None:
    looks = [{"data": [], "has_more": False}, {"data": [], "has_more": True}]
    out = io.StringIO()

    def pause() -> None:
        if len(looks) == 0:
            raise KeyboardInterrupt

    why.follow(lambda: looks.pop(0), out, pause, lambda: os.terminal_size((80, 24)))
    drawn = out.getvalue()
    assert drawn.startswith("\033[?1049h\033[H0 requests")
    assert drawn.endswith("\033[?1049l")
    assert drawn.count("0 requests") == 2


@pytest.mark.parametrize("interval", ["0.05", "-1", "nan", "inf", "1e10"])
def test_top_looks_as_often_as_can_be(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:9", "--interval", interval]) == 1
    assert "--interval must be from 0.1 to 3600 seconds, got " in capsys.readouterr().err


def test_a_name_is_no_command_to_a_terminal() -> None:
    found = {"data": [], "has_more": False}
    part = msgspec.json.decode(msgspec.json.encode(ended_with(SequenceConfig(model="m"), queued=0.0, prefill=0.0)))
    found["data"] = [part | {"model": "m\033[2J"}]
    assert "\033" not in "".join(why.table(found, None))


def test_who_was_late_and_who_asked_for_nothing_good_failed_by_no_fault_of_the_server() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        late = await front.post("/v1/completions", {"prompt": "hello"}, headers={"X-Request-Timeout-Ms": "20"})
        service, dispatcher = function()
        front.models.add(service)
        dispatcher.compute = lambda payloads: [BadItem("no number") for _ in payloads]
        bad = await front.post("/v1/models/function:predict", {"instances": ["x"]})
        assert (late.status, bad.status) == (504, 400)
        told = {}
        for model in ("tiny", "function"):
            (told[model],) = (await get(front, query=f"status=ended&model={model}")).json()["data"]
        assert [told["tiny"]["finish_reason"], told["function"]["finish_reason"]] == ["late", "invalid"]
        metrics = (await front.call("GET", "/metrics")).body.decode()
        for model, reason in (("tiny", "late"), ("function", "invalid")):
            assert f'requests_finished_total{{model="{model}",reason="{reason}"}} 1' in metrics
            assert f'requests_finished_total{{model="{model}",reason="error"}} 0' in metrics

    run(go)


def test_one_that_is_heard_of_late_hides_no_other() -> None:
    """A client that reads slowly ends a request long after it was computed."""
    log: request_log.RequestLog[Any] = request_log.RequestLog()
    now = time.monotonic()
    for name, ended in (("a", now - 20), ("b", now - 5), ("slow", now - 10), ("ancient", now - 2 * request_log.KEPT_S)):
        log.keep(None, request_log.EndedRequest(id=name, ended=ended, finish_reason="stop"))
    viewer = request_log.Viewer(None, False)
    assert [each.id for each in log.ended_of(viewer)] == ["b", "slow", "a"]
    assert [each.id for each in log.find_ended(viewer, "b")] == ["b"]


def test_a_request_is_found_without_a_look_at_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admin's page asks for one more than once a second, however many there are of all."""
    monkeypatch.setattr(request_log, "_MOST_ENDED", 3)
    log: request_log.RequestLog[Any] = request_log.RequestLog()
    monkeypatch.setattr(log, "ended_of", lambda viewer: pytest.fail("all of them were gone through"))
    now, whole = time.monotonic(), f"cmpl-{'0' * 24}"
    admin, alice, bob = (request_log.Viewer(name, name == "root") for name in ("root", "alice", "bob"))

    def keep(owner: str, name: str, ended: float) -> None:
        log.keep(owner, request_log.EndedRequest(id=name, ended=now + ended, finish_reason="stop", count=3))

    def found(viewer: request_log.Viewer, name: str) -> list[str]:
        return [each.id for each in log.find_ended(viewer, name)]

    for place, name in enumerate((f"{whole}-0", f"{whole}-1", "item-0123abcd-10")):
        keep("alice", name, place - 9)
    keep("bob", "item-0123abcd-13", -1)
    assert found(admin, whole) == found(alice, whole) == [f"{whole}-1", f"{whole}-0"]
    assert found(alice, f"{whole}-0") == [f"{whole}-0"]
    assert found(bob, whole) == found(bob, f"{whole}-0") == found(bob, "item-0123abcd-10") == []
    asked = [found(admin, f"item-0123abcd-{number}") for number in (9, 10, 12, 13, 16)]
    assert asked == [[], ["item-0123abcd-10"], ["item-0123abcd-10"], ["item-0123abcd-13"], []]
    # What a full line has dropped is not found any more, and not remembered.
    keep("alice", "next", 0)
    keep("alice", "older than all", -20)
    assert (found(admin, whole), found(admin, "older than all")) == ([f"{whole}-1"], [])
    for number in range(20, 40):
        keep("alice", f"item-0123abcd-{number}", number)
    index = log._index["alice"]
    assert (len(index._parts), index._firsts) == (3, {"item-0123abcd-": [37, 38, 39]})

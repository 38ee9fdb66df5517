"""GET /v1/timeline: the last minute as viewers of the Trace Event Format open it, and who may see it."""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.items_harness import function
from support.key_files import bearer, write_keys
from support.server_harness import FakeClient, Front, run
from support.trace_events import check_trace, slices

from chairlift.core.finished import FinishReason
from chairlift.engine.sequences.client import Beginning
from chairlift.engine.sequences.messages import EngineStats, SequenceUpdate
from chairlift.server.http.exchange import Terms
from chairlift.server.metrics import sequences
from chairlift.server.models.request_log import EndedRequest, Viewer
from chairlift.server.requests.timeline import ModelSnapshot, snapshot, timeline_document

NOBODY = Viewer(None, False)
NOW = 1000.0
THERE = {"sec-fetch-site": "cross-site", "host": "127.0.0.1"}


def ended(name: str, end: float, queued: float, prefill: float, decode: float, **more: Any) -> EndedRequest:
    total = queued + prefill + decode
    times = {"total_s": total, "queued_s": queued, "prefill_s": prefill, "decode_s": decode}
    return EndedRequest(id=name, ended=end, finish_reason="stop", **times, **more)


def drawn(*requests: EndedRequest, steps: tuple[Any, ...] = ()) -> Any:
    document = timeline_document([ModelSnapshot("tiny", list(requests), list(steps), [])], NOW)
    return check_trace(json.loads(document))


def step(end: float, seconds: float, requests: int = 1, waiting: int = 0, blocks: int = 5) -> sequences.RecentStep:
    return sequences.RecentStep(end, seconds, requests, 3 * requests, waiting, 0, blocks)


def test_phases_lie_in_their_request_and_requests_in_slots() -> None:
    kinds = drawn(
        ended("a", 990.0, 1.0, 2.0, 3.0, tokens=7),
        ended("b", 991.0, 0.0, 1.0, 5.0),
        ended("c", 995.0, 1.0, 0.5, 3.5),
    )
    slots = {event["name"]: event["tid"] for event in slices(kinds, "request")}
    assert slots["a"] == slots["c"] != slots["b"], "c takes the slot that a left"
    a = next(event for event in slices(kinds, "request") if event["name"] == "a")
    assert (a["ts"], a["dur"]) == (985_000_000, 5_000_000)
    assert (a["args"]["tokens"], a["args"]["finish_reason"]) == (7, "stop")
    phases = [(e["name"], e["ts"], e["dur"]) for e in slices(kinds, "phase") if e["tid"] == slots["a"]]
    assert phases[:2] == [("prefill", 985_000_000, 2_000_000), ("decode", 987_000_000, 3_000_000)]
    waits = {event["id"]: event["ts"] for event in kinds["b"]}
    assert waits == {"a": 984_000_000, "c": 990_000_000}, "b did not wait"


def test_what_never_ran_only_waits() -> None:
    shed = EndedRequest(id="a", ended=990.0, finish_reason="shed", total_s=5.0, queued_s=5.0)
    kinds = drawn(shed)
    assert not kinds["X"]
    (wait,) = kinds["b"]
    assert wait["args"]["finish_reason"] == "shed"


def test_only_the_last_minute_is_drawn() -> None:
    long = ended("a", 999.0, 100.0, 50.0, 30.0)
    kinds = drawn(long, steps=(step(940.5, 1.0), step(999.5, 2.0)))
    events = [*kinds["X"], *kinds["C"], *kinds["b"], *kinds["e"]]
    assert min(event["ts"] for event in events) == 940_000_000
    assert max(event["ts"] + event.get("dur", 0) for event in events) <= 1000_000_000
    assert [event["name"] for event in slices(kinds, "phase")] == ["prefill", "decode"]
    assert not kinds["b"], "its wait was before that"


def test_steps_never_overlap_and_counters_say_what_changes() -> None:
    steps = (step(990.0, 1.0), step(990.5, 1.0, 4, waiting=2), step(990.5, 0.1, waiting=2), step(992.0, 1.0, blocks=9))
    kinds = drawn(steps=steps)
    made = slices(kinds, "step")
    assert [(event["ts"], event["dur"]) for event in made] == [
        (989_000_000, 1_000_000),
        (990_000_000, 500_000),
        (990_500_000, 0),
        (991_000_000, 1_000_000),
    ]
    assert made[1]["args"] == {"requests": 4, "tokens": 12}
    counted = [(event["name"], event["args"]) for event in kinds["C"]]
    assert counted == [
        ("waiting", {"live": 0, "background": 0}),
        ("KV blocks", {"held": 5}),
        ("waiting", {"live": 2, "background": 0}),
        ("waiting", {"live": 0, "background": 0}),
        ("KV blocks", {"held": 9}),
    ]


def test_random_requests_make_a_sound_timeline() -> None:
    chance = random.Random(3)
    requests = [
        ended(f"r{n}", 1000 - 90 * chance.random(), *(chance.choice((0.0, 4 * chance.random())) for _ in range(3)))
        for n in range(300)
    ]
    steps = [step(900 + n / 3, chance.random(), waiting=chance.randrange(3)) for n in range(300)]
    kinds = drawn(*requests, steps=tuple(steps))
    assert len(slices(kinds, "request")) > 150


def test_a_server_draws_what_is_live_and_what_ended() -> None:
    client = FakeClient(manual=True)

    async def go() -> None:
        front = Front(client, api_key="secret")
        key = {"authorization": "Bearer secret"}
        tasks = []
        for _ in range(3):
            body = {"prompt": "hello", "max_tokens": 2}
            tasks.append(asyncio.create_task(front.post("/v1/completions", body, headers=key)))
            while len(client.streams) < len(tasks):
                await asyncio.sleep(0.001)
        first, second, third = client.streams
        for stream in (first, second):
            came = stream.request.arrival
            stream.beginning = Beginning(came + 0.00001, came + 0.00002, 0, {}, 0, 0)
        assert client.on_step is not None
        moment = time.monotonic()
        stats = EngineStats(2, 9, 0.001, waiting=1, kv_blocks_used=4, steps=1, step_ended=moment)
        client.on_step(stats)
        client.on_step(EngineStats(steps=1))  # nothing was computed
        first.push(SequenceUpdate(first.request.id, [70, 70], FinishReason.LENGTH))
        await tasks[0]
        answer = await front.call("GET", "/v1/timeline", headers=key)
        assert answer.headers["content-type"] == "application/json"
        kinds = check_trace(answer.json())
        told = {event["name"]: event["args"]["finish_reason"] for event in slices(kinds, "request")}
        assert told == {first.request.id: "length", second.request.id: "under way"}
        assert [event["id"] for event in kinds["b"] if event["args"]["finish_reason"] == "under way"][-1:] == [
            third.request.id
        ]
        (only,) = slices(kinds, "step")
        assert only["args"] == {"requests": 2, "tokens": 9}
        assert only["ts"] + only["dur"] == pytest.approx(moment * 1e6, abs=1)
        front.gone.set()
        await asyncio.gather(*tasks)

    run(go)


def test_calls_of_a_model_for_items_lie_on_their_instance() -> None:
    async def go() -> None:
        service, dispatcher = function()
        await service.infer([1, 2], Terms())
        dispatcher.held = True
        waiting = asyncio.create_task(service.infer([3], Terms()))
        while dispatcher.scheduler.num_running < 1:
            await asyncio.sleep(0.001)
        now = time.monotonic()
        kinds = check_trace(json.loads(timeline_document([snapshot(service, NOBODY, now)], now)))
        assert sum(call["args"]["items"] for call in slices(kinds, "call")) == 2
        tracks = [event["args"]["name"] for event in kinds["M"] if event["name"] == "thread_name"]
        assert tracks == ["instance 0", "slot 1"]
        (done,) = slices(kinds, "request")
        assert done["args"]["finish_reason"] == "done"
        assert [event["args"]["finish_reason"] for event in kinds["b"]][-1] == "under way"
        dispatcher.held = False
        await waiting

    run(go)


def test_kept_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_MOST_STEPS", 10)

    async def go() -> None:
        front = Front()
        assert front.client.on_step is not None
        now = time.monotonic()
        for number in range(30):
            front.client.on_step(EngineStats(1, 1, 0.001, steps=number, step_ended=now + number))
        made = snapshot(front.service, NOBODY, now + 30)
        assert [each.ended for each in made.steps] == [now + number for number in range(20, 30)]
        assert len(snapshot(front.service, NOBODY, now + 84.5).steps) == 5

    run(go)


def test_only_admins_and_this_machine_see_it(tmp_path: Path) -> None:
    people: dict[str, dict[str, Any]] = {"alice": {"rights": ["infer"]}, "root": {"rights": ["admin"]}}
    keys = str(write_keys(tmp_path / "keys.toml", **people))

    async def go() -> None:
        front = Front(api_keys=keys)
        body = {"prompt": "hello", "max_tokens": 1}
        assert (await front.post("/v1/completions", body, headers=bearer("alice"))).status == 200
        assert (await front.call("GET", "/v1/timeline")).status == 401
        refused = await front.call("GET", "/v1/timeline", headers=bearer("alice"))
        assert (refused.status, refused.error["code"]) == (403, "missing_right")
        seen = await front.call("GET", "/v1/timeline", headers=bearer("root"))
        ids = [event["id"] for event in check_trace(seen.json())["b"]]
        assert len(ids) == 1, "an admin sees the requests of all"
        far = await Front().call("GET", "/v1/timeline")
        assert (far.status, far.error["code"]) == (403, "not_local")
        elsewhere = await Front().call("GET", "/v1/timeline", headers=THERE, client="127.0.0.1")
        assert (elsewhere.status, elsewhere.error["code"]) == (403, "cross_origin")

    run(go)

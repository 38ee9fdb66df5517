"""GET /v1/recording: what comes, as a trace, to whoever may have it, and for no longer than somebody reads it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.items_harness import embedder
from support.key_files import bearer, write_keys
from support.server_harness import Answer, Front, run, until

from chairlift.plan.trace_files import TraceLine
from chairlift.server import recording_routes
from chairlift.server.models import trace_notes

HERE = {"host": "127.0.0.1:8000"}
PEOPLE: dict[str, dict[str, Any]] = {"alice": {"rights": ["infer"]}, "root": {"rights": ["infer", "admin"]}}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_routes, "_PERIOD_S", 0.01)


async def record(
    front: Front, answer: Answer | None = None, query: str = "", client: str = "127.0.0.1", **more: Any
) -> Answer:
    return await front.call("GET", "/v1/recording", headers=HERE | more, query=query, client=client, answer=answer)


def lines(answer: Answer) -> list[TraceLine]:
    return [msgspec.json.decode(line, type=TraceLine) for line in answer.body.splitlines()]


def test_what_comes_is_told_line_by_line_and_no_text_is() -> None:
    async def go() -> None:
        front = Front()
        assert (await front.complete(max_tokens=2)).status == 200
        answer = Answer()
        recording = asyncio.create_task(record(front, answer))
        await until(lambda: front.service.recorders)
        assert (await front.complete(prompt="hello hello", max_tokens=5, n=2, temperature=1)).status == 200
        service, _ = embedder()
        front.models.add(service)
        await until(lambda: service.recorders)
        assert (await front.post("/v1/embeddings", {"input": ["hello", "world"], "model": "embedder"})).status == 200
        await until(lambda: len(answer.body.splitlines()) == 3)
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        told = [(each.model, each.output_length, each.max_tokens, each.items) for each in lines(answer)]
        assert told == [("tiny", 5, 5, 0), ("tiny", 5, 5, 0), ("embedder", 0, None, 2)]
        first, second, _ = lines(answer)
        assert first.hash_ids == second.hash_ids != []
        assert all(each.request() for each in lines(answer))
        assert b"hello" not in answer.body
        front.gone.set()
        await recording
        assert front.service.recorders == service.recorders == []

    run(go)


def test_who_asks_for_the_headers_alone_records_nothing() -> None:
    async def go() -> None:
        front = Front()
        # More than may record at a time.
        for _ in range(recording_routes.MOST_RECORDINGS + 1):
            answer = await front.call("HEAD", "/v1/recording", headers=HERE, client="127.0.0.1")
            assert (answer.status, answer.complete, answer.writes) == (200, True, [])
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        assert front.service.recorders == []

    run(go)


def test_it_ends_after_so_many_seconds_or_when_the_server_leaves() -> None:
    async def go() -> None:
        front = Front()
        answer = await record(front, query="seconds=1")
        assert (answer.status, answer.body, front.service.recorders) == (200, b"", [])
        recording = asyncio.create_task(record(front))
        await until(lambda: front.service.recorders)
        front.client.state = "draining"
        assert (await recording).complete

    run(go)


@pytest.mark.parametrize("query", ["seconds=0", "seconds=86401", "seconds=x", "seconds=1e3", "seconds=-1", "limit=1"])
def test_other_times_are_refused(query: str) -> None:
    async def go() -> None:
        front = Front()
        refused = await record(front, query=query)
        assert (refused.status, refused.error["param"]) == (400, query.partition("=")[0])
        assert front.service.recorders == []

    run(go)


def test_whoever_may_see_all_may_record(tmp_path: Path) -> None:
    async def go() -> None:
        keys = str(write_keys(tmp_path / "keys.toml", **PEOPLE))
        front = Front(api_keys=keys)
        assert (await record(front)).status == 401
        refused = await record(front, **bearer("alice"))
        assert (refused.status, refused.error["code"]) == (403, "missing_right")
        answer = Answer()
        recording = asyncio.create_task(record(front, answer, client="10.0.0.7", **bearer("root")))
        await until(lambda: front.service.recorders)
        assert (await front.post("/v1/completions", {"prompt": "a"}, headers=bearer("alice"))).status == 200
        await until(lambda: answer.body)
        (line,) = lines(answer)
        assert line.tenant not in ("", "alice")
        front.gone.set()
        await recording
        front = Front(host="0.0.0.0")
        refused = await record(front, client="10.0.0.7")
        assert (refused.status, refused.error["code"]) == (403, "not_local")
        elsewhere = await record(front, **{"sec-fetch-site": "cross-site"})
        assert (elsewhere.status, elsewhere.error["code"]) == (403, "cross_origin")

    run(go)


def test_few_record_at_a_time() -> None:
    async def go() -> None:
        front = Front()
        recordings = [asyncio.create_task(record(front)) for _ in range(recording_routes.MOST_RECORDINGS)]
        await until(lambda: len(front.service.recorders) == recording_routes.MOST_RECORDINGS)
        refused = await record(front)
        assert (refused.status, refused.error["code"]) == (429, "too_many_recordings")
        assert refused.headers["retry-after"] == "5"
        front.gone.set()
        await asyncio.gather(*recordings)
        front.gone.clear()
        assert front.service.recorders == []

    run(go)


def test_a_reader_who_is_too_slow_is_told_so_and_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_notes, "_MOST_WAITING", 3)
    monkeypatch.setattr(recording_routes, "_PERIOD_S", 0.2)

    async def go() -> None:
        front = Front()
        recording = asyncio.create_task(record(front))
        await until(lambda: front.service.recorders)
        (notes,) = front.service.recorders
        assert (await front.complete(max_tokens=1, n=8, temperature=1)).status == 200
        assert not notes.is_open
        assert notes.take() == []
        answer = await recording
        assert "slower than requests come" in json.loads(answer.body)["error"]["message"]
        assert front.service.recorders == []

    run(go)

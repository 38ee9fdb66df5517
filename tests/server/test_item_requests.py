"""Requests of several items: by which ids they are found, and whose they are on the live page."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.items_harness import counter, embedder, function
from support.key_files import bearer, write_keys
from support.server_harness import Answer, Front, run, until

from chairlift.core.items.waiting import WaitingItems
from chairlift.engine.items.dispatcher import Answer as ItemAnswer
from chairlift.server.http.exchange import Terms
from chairlift.server.live.items import ItemWatch
from chairlift.server.models.request_log import EndedRequest, RequestLog, Viewer

PATH = "/v1/embeddings"


async def told(front: Front, item_id: str, **more: Any) -> list[dict[str, Any]]:
    answer = await front.call("GET", f"/v1/requests/{item_id}", **more)
    return answer.json()["parts"] if answer.status == 200 else []


async def live(front: Front) -> list[dict[str, Any]]:
    return (await front.call("GET", "/v1/requests", client="127.0.0.1")).json()["data"]


def test_items_tell_their_request_and_lead_to_it_when_it_has_ended() -> None:
    async def go() -> None:
        front, (service, dispatcher) = Front(), embedder()
        front.models.add(service)
        dispatcher.held = True

        def ask(*texts: str) -> asyncio.Task[Answer]:
            return asyncio.create_task(front.post(PATH, {"input": list(texts)}))

        tasks = [ask("hello")]
        await until(lambda: dispatcher.scheduler.num_running)
        tasks += [ask("hello", "world", "fox"), ask("world", "fox")]
        await until(lambda: dispatcher.scheduler.num_waiting == 5)
        rows = await live(front)
        requests = [row["request"] for row in rows]
        ids = [row["id"] for row in rows]
        assert requests == [ids[0], *[ids[1]] * 3, *[ids[4]] * 2]
        assert [(await told(front, each))[0]["id"] for each in ids] == ids
        dispatcher.held = False
        answers = [await task for task in tasks]
        assert [answer.headers["x-request-id"] for answer in answers] == [ids[0], ids[1], ids[4]]
        # One has ended by every id that was seen of it, and by no other.
        assert [[part["id"] for part in await told(front, each)] for each in ids] == [[each] for each in requests]
        prefix, number = ids[-1].rsplit("-", 1)
        assert await told(front, f"{prefix}-{int(number) + 1}") == []
        assert await told(front, f"{prefix}-0") == []
        assert await told(front, f"item-00000000-{number}") == []
        assert service.requests == {}

    run(go)


def test_places_in_line_are_looked_up_once_for_all_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    num_ahead = WaitingItems.num_ahead

    def counted(self: WaitingItems, item_ids: Iterable[str]) -> dict[str, int]:
        found = num_ahead(self, item_ids)
        asked.append(len(found))
        return found

    monkeypatch.setattr(WaitingItems, "num_ahead", counted)

    async def go() -> None:
        front, (service, dispatcher) = Front(), function()
        front.models.add(service)
        dispatcher.held = True
        dispatcher.submit(0)
        await until(lambda: dispatcher.scheduler.num_running)
        futures = [dispatcher.submit(number, shape_key=number) for number in range(30)]
        futures += [dispatcher.submit(number, background=True) for number in range(30)]
        answer = await front.call("GET", "/v1/requests", query="limit=100", client="127.0.0.1")
        rows = answer.json()["data"]
        assert asked == [30, 30], "live ones, and those in the background"
        assert [row.get("position") for row in rows] == [None, *range(1, 31), *[None] * 30]
        assert all(f"{place} of 30 are ahead of it" in row["detail"] for place, row in enumerate(rows[1:31]))
        dispatcher.held = False
        await asyncio.gather(*futures)

    run(go)


def test_an_item_that_is_done_leads_to_those_that_its_request_waits_for() -> None:
    async def go() -> None:
        front, (service, dispatcher) = Front(), function()
        front.models.add(service)
        dispatcher.held_from = 1
        futures = service.submit([1], Terms())
        (first,) = [item.id for item in dispatcher.items_of(None)]
        await until(lambda: dispatcher.held)
        futures += service.submit([2, 3, 4], Terms())
        _, second, third, fourth = [item.id for item in dispatcher.items_of(None)]
        # As a worker's later call would leave it: one of three has its answer.
        dispatcher.forget(third)
        assert [part["id"] for part in await told(front, third)] == [second, fourth]
        assert [part["id"] for part in await told(front, second)] == [second]
        dispatcher.held = False
        service.answered([await futures[0]], Terms())
        assert [part["id"] for part in await told(front, first)] == [first]
        service.failed(futures[1:], TimeoutError(), Terms())
        assert [part["items"] for part in await told(front, fourth)] == [3]
        assert service.requests == {}

    run(go)


def test_what_another_had_is_not_found(tmp_path: Path) -> None:
    people: dict[str, dict[str, Any]] = {"alice": {"rights": ["infer"]}, "bob": {"rights": ["infer"]}}

    async def go() -> None:
        front = Front(api_keys=str(write_keys(tmp_path / "keys.toml", **people)))
        service, dispatcher = embedder()
        front.models.add(service)
        dispatcher.held = True
        ask = asyncio.create_task(front.post(PATH, {"input": ["a", "b"]}, headers=bearer("alice")))
        await until(lambda: dispatcher.num_unfinished)
        first, second = [item.id for item in dispatcher.items_of(None)]
        assert await told(front, second, headers=bearer("bob")) == []
        dispatcher.held = False
        await ask
        assert [part["id"] for part in await told(front, second, headers=bearer("alice"))] == [first]
        assert await told(front, second, headers=bearer("bob")) == []

    run(go)


def test_a_stream_has_the_id_of_its_first_item_whichever_ends_first() -> None:
    async def go() -> None:
        service, _ = counter()
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[ItemAnswer]] = [loop.create_future() for _ in range(2)]
        service.submit = lambda payloads, terms, sizes=None, on_part=None: futures  # type: ignore[method-assign]

        async def read() -> None:
            async for _ in service.stream([1, 2], Terms()):
                pass

        reading = asyncio.create_task(read())
        for number in (2, 1):
            futures[number - 1].set_result(ItemAnswer(None, 0.0, 0.1, 1, 1.0, f"item-00000000-{number}"))
            await asyncio.sleep(0)
        await reading
        assert [each.id for each in service.log.ended[None]] == ["item-00000000-1"]

    run(go)


def test_a_stream_that_is_read_late_hides_no_other() -> None:
    async def go() -> None:
        service, _ = counter()
        stream = service.stream([3], Terms())
        await anext(stream)
        await until(lambda: not service.dispatcher.num_unfinished)
        async for _ in service.stream([1], Terms()):
            pass
        rest = [part async for part in stream]
        assert len(rest) == 2
        ended = list(service.log.ended[None])
        assert [each.ended for each in ended] == sorted(each.ended for each in ended)
        slow = ended[0]
        assert service.log.find_ended(Viewer(None, False), slow.id) == [slow]
        assert len(list(service.log.ended_of(Viewer(None, False)))) == len(ended)

    run(go)


@pytest.mark.parametrize(("asked", "found"), [(9, 0), (10, 1), (12, 1), (13, 0), (100, 0)])
def test_an_ended_request_is_found_by_any_of_its_numbers(
    asked: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: RequestLog[Any] = RequestLog()
    monkeypatch.setattr("chairlift.server.models.request_log.KEPT_S", float("inf"))
    log.keep(None, EndedRequest(id="item-0123abcd-10", ended=1.0, finish_reason="done", count=3))
    log.keep(None, EndedRequest(id="item-ffffffff-11", ended=2.0, finish_reason="done", count=3))
    assert len(log.find_ended(Viewer(None, True), f"item-0123abcd-{asked}")) == found


def test_tenants_have_the_requests_for_items_that_run_and_wait(tmp_path: Path) -> None:
    people: dict[str, dict[str, Any]] = {"alice": {"rights": ["infer"]}, "bob": {}, "root": {"rights": ["admin"]}}
    keys = str(write_keys(tmp_path / "keys.toml", **people))

    async def go() -> None:
        front, (service, dispatcher) = Front(api_keys=keys), embedder()
        front.models.add(service)
        dispatcher.held = True

        def ask(name: str, *texts: str) -> asyncio.Task[Answer]:
            return asyncio.create_task(front.post(PATH, {"input": list(texts)}, headers=bearer(name)))

        tasks = [ask("alice", "a", "b")]
        await until(lambda: dispatcher.scheduler.num_running == 2)
        tasks += [ask("alice", "c"), ask("bob", "d", "e", "f"), ask("bob", "g")]
        await until(lambda: dispatcher.scheduler.num_waiting == 5)
        watch = ItemWatch(service)
        watch.look(0.0)
        assert {name: (load.running, load.waiting) for name, load in watch.load.items()} == {
            "alice": (1, 1),
            "bob": (0, 2),
        }
        dispatcher.held = False
        for task in tasks:
            await task
        watch.look(1.0)
        assert {name: (load.running, load.waiting) for name, load in watch.load.items()} == {
            "alice": (0, 0),
            "bob": (0, 0),
        }

    run(go)


def test_only_the_newest_version_is_said_to_be() -> None:
    async def go() -> None:
        front = Front()
        for version in ("2", "10", "1"):
            service, _ = embedder(version=version)
            front.models.add(service)
        answer = await front.call("GET", "/v1/live", headers={"host": "127.0.0.1"}, query="limit=1", client="127.0.0.1")
        data = answer.body.removeprefix(b"data: ")
        looks = json.loads(data)["models"]
        assert {(look["name"], look["version"]): look["newest"] for look in looks} == {
            ("tiny", "1"): True,
            ("embedder", "2"): False,
            ("embedder", "10"): True,
            ("embedder", "1"): False,
        }

    run(go)

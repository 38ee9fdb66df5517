"""GET /v1/traffic: the last minutes of a model, for whoever may plan with them."""

import time
from math import floor
from typing import Any

import msgspec
from support.items_harness import embedder, function
from support.server_harness import FakeClient, Front, full, run

from chairlift.plan.seen_traffic import AllArrivals, SeenItems, SeenRequest, SeenSequences
from chairlift.server.metrics.sequences import RecentStep
from chairlift.server.models.request_log import EndedRequest, RefusedRequest
from chairlift.server.twin.past_traffic import all_arrivals, past_of

HERE = {"host": "127.0.0.1:8000"}


async def ask(front: Front, **query: str) -> tuple[int, dict[str, Any]]:
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    answer = await front.call("GET", "/v1/traffic", headers=HERE, query=asked, client="127.0.0.1")
    return answer.status, answer.json()


def test_what_came_and_what_it_took_without_text() -> None:
    async def go() -> None:
        front = Front()
        service, _ = embedder()
        front.models.add(service)
        for number in range(25):
            if number == 10:
                assert (await ask(front, model="embedder"))[0] == 409
                assert len((await ask(front, model="embedder", least_answered="5"))[1]["seen"]["requests"]) == 10
            await front.post("/v1/embeddings", {"input": ["hello", "world"], "model": "embedder"})
        status, told = await ask(front, model="embedder")
        assert (status, told["object"], told["model"], told["window_s"]) == (200, "traffic", "embedder", 120.0)
        seen = msgspec.convert(told["seen"], SeenSequences | SeenItems)
        assert isinstance(seen, SeenItems)
        assert [each.outputs for each in seen.requests] == [2] * 25
        assert len(seen.calls) == 25
        assert "hello" not in str(told)

    run(go)


def test_all_that_came_are_counted_though_few_of_the_refused_are_kept() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        log, begin = front.service.log, floor(time.monotonic()) - 30
        for number in range(2500):
            log.refuse(RefusedRequest(None, begin + number / 100, 0, False, 8, 4))
        times = {"total_s": 0.0625, "queued_s": 0.0, "prefill_s": 0.02}
        about = {"prompt_tokens": 8, "cached_tokens": 0, "tokens": 4, **times}
        for number in range(50):
            log.arrive(begin + number / 2)
            ended = begin + number / 2 + times["total_s"]
            log.keep(None, EndedRequest(id=f"cmpl-{number:024x}", ended=ended, finish_reason="stop", **about))
            front.service.metrics.steps.append(RecentStep(ended, 0.015, 1, 1, 0, 0, 4, 1))
        status, told = await ask(front, model="tiny")
        assert status == 200
        assert (told["came"]["requests"], told["came"]["seconds"]) == (102 * 24, 24)
        assert 14 * 24 < told["came"]["listed"] < 20 * 24
        for second in range(10_000):
            log.arrive(second)
        assert len(log.came) < 300

    run(go)


def test_whatever_comes_is_counted_once() -> None:
    async def go() -> None:
        front, (service, dispatcher) = Front(), function()
        front.models.add(service)

        def refuse(priority: int) -> None:
            raise full(1.0)

        assert (await front.complete(max_tokens=1, n=2)).status == 200
        front.client.refusal = full(1.0)
        assert (await front.complete(max_tokens=1)).status == 429
        front.client.check_load = refuse  # type: ignore[method-assign]
        assert (await front.complete(max_tokens=1)).status == 429
        assert sum(front.service.log.came.values()) == 4
        path = "/v1/models/function:predict"
        assert (await front.post(path, {"instances": [1, 2]})).status == 200
        dispatcher.refusal = full(1.0)
        assert (await front.post(path, {"instances": [1, 2]})).status == 429
        assert sum(service.log.came.values()) == 2
        listed = [SeenRequest(float(second), 1, 1) for second in range(1000, 1011)]
        service.log.came = dict.fromkeys(range(900, 1100), 100)
        assert all_arrivals(past_of(service), listed) == AllArrivals(1000, 10, 10)
        assert all_arrivals(past_of(service), listed[:1]) is None

    run(go)


def test_what_is_refused() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        for query, status, param in (
            ({}, 400, "model"),
            ({"model": "nobody"}, 404, "model"),
            ({"model": "tiny", "seconds": "5"}, 400, "seconds"),
            ({"model": "tiny", "least_answered": "0"}, 400, "least_answered"),
            ({"model": "tiny", "least_answered": "1"}, 409, None),
            ({"model": "tiny"}, 409, None),
        ):
            found, told = await ask(front, **query)
            assert (found, told["error"]["param"]) == (status, param)

    run(go)

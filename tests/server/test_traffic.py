"""GET /v1/traffic: the last minutes of a model, for whoever may plan with them."""

from typing import Any

import msgspec
from support.items_harness import embedder
from support.server_harness import FakeClient, Front, run

from chairlift.plan.seen_traffic import SeenItems, SeenSequences

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

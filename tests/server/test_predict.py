"""KServe v1's :predict: any JSON, tensors and texts in, predictions out; parts of streaming models as they come."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.items_harness import (
    Listening,
    adder,
    counter,
    embedder,
    embedding,
    function,
    ids_of,
    listening,
    reranker,
    threads_of,
)

from chairlift.core.items.item import Failure
from chairlift.engine.items.call import CallFailed
from chairlift.errors import BadItem, QueueFull, RequestFailed
from chairlift.server import direct
from chairlift.server.http import exchange
from chairlift.server.http.exchange import Terms
from chairlift.server.models import item_service
from chairlift.server.models.result_size import size_of
from chairlift.server.oip import predict as predict_route
from chairlift.server.oip import tensor_items


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    with listening(adder()[0], embedder()[0], reranker()[0], function()[0]) as it:
        yield it


def predict(server: Listening, model: str, instances: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/models/{model}:predict", json={"instances": instances})


def test_predict_any_json(server: Listening) -> None:
    answer = predict(server, "function", [{"x": 1.5}, [1], "ab"])
    assert answer.json() == {"predictions": [{"twice": 3.0, "list": [0, 1]}, [1, 1], "abab"]}
    assert answer.headers["x-batch-size"] == "3"


def test_predict_tensors_and_texts(server: Listening) -> None:
    instances = [{"a": [1, 2], "b": [3, 4], "word": "x"}, {"a": [1], "b": [3], "word": "naïve"}]
    assert predict(server, "adder", instances).json()["predictions"] == [
        {"sum": [4.0, 6.0], "mean": 5.0, "loud": "X"},
        {"sum": [4.0], "mean": 4.0, "loud": "naïve".encode().upper().decode()},
    ]
    vectors = predict(server, "embedder", ["fox", {"text": "hello world"}]).json()["predictions"]
    np.testing.assert_allclose(vectors[1], embedding(ids_of("hello world")), rtol=1e-5, atol=1e-6)
    assert len(predict(server, "reranker", [{"query": "fox", "text": "a fox"}]).json()["predictions"][0]) == 1


@pytest.mark.parametrize(
    ("model", "instances", "word"),
    [
        ("adder", [5], "instances[0] must be an object with a, b, word"),
        ("adder", [{"a": [1], "b": [2]}], "'word' is missing"),
        ("adder", [{"a": [1], "b": [2], "word": "x", "z": 1}], "no input 'z'"),
        ("adder", [{"a": [[1], [2, 3]], "b": [2], "word": "x"}], "different lengths"),
        ("embedder", [5], "not BYTES"),
        ("function", [], "instances must not be empty"),
        ("function", 5, "instances"),
        ("other", [5], "does not exist"),
    ],
)
def test_predict_refuses_by_name(server: Listening, model: str, instances: Any, word: str) -> None:
    answer = predict(server, model, instances)
    assert answer.status_code == (404 if model == "other" else 400)
    assert set(answer.json()) == {"error"}
    assert word in answer.json()["error"]


def test_json_has_a_limit_of_its_own() -> None:
    """The direct way, and that through the routes, compressed and not."""
    with listening(adder()[0], function()[0], embedder()[0], max_tensor_json_bytes=300) as server:
        for model, instead in (("adder", True), ("function", False)):
            url = f"{server.url}/v1/models/{model}:predict"
            body = b'{"instances": [%b]}' % (b" " * 300)
            for content, headers in ((body, {}), (gzip.compress(body), {"Content-Encoding": "gzip"})):
                answer = httpx.post(url, content=content, headers=headers | {"Content-Type": "application/json"})
                assert answer.status_code == 413
                told = answer.json()["error"]
                assert "317 bytes of JSON, more than the limit of 300 (max_tensor_json_bytes); send fewer" in told
                assert ("tensors as bytes to /v2/models/{name}/infer" in told) is instead
        tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": ["[]" + " " * 300]}
        refused = httpx.post(f"{server.url}/v2/models/function/infer", json={"inputs": [tensor]})
        assert (refused.status_code, "max_tensor_json_bytes" in refused.text) == (413, True)
        assert predict(server, "function", [1]).json() == {"predictions": [2]}
        assert predict(server, "embedder", ["fox"] * 90).status_code == 200, "texts have that of all bodies"


def test_an_item_that_the_model_refuses_is_the_clients_fault_and_named() -> None:
    """All of a request's items or an error: the others of the request are not answered, those of other requests are."""
    service, dispatcher = function()
    dispatcher.compute = lambda payloads: [BadItem("no number") if each == "x" else each for each in payloads]
    with listening(service, counter()[0]) as server:
        for body in ({"instances": [1, "x", 2]}, {"instances": [1, "x", "x"]}):
            # The direct way, and that through the routes.
            for headers in ({}, {"Sec-Fetch-Site": "same-origin"}):
                answer = httpx.post(f"{server.url}/v1/models/function:predict", json=body, headers=headers)
                assert (answer.status_code, answer.json()) == (400, {"error": "item 1: no number"})
        assert predict(server, "function", [1, 2]).json() == {"predictions": [1, 2]}
        tensor = {"name": "input", "datatype": "BYTES", "shape": [3], "data": ['"x"', "1", "2"]}
        answer = httpx.post(f"{server.url}/v2/models/function/infer", json={"inputs": [tensor]})
        assert (answer.status_code, answer.json()) == (400, {"error": "item 0: no number"})


def test_a_request_whose_items_end_workers_takes_no_other_along() -> None:
    service, dispatcher = function()

    def compute(payloads: list[Any]) -> list[Any]:
        if "bad" in payloads:
            raise CallFailed(Failure.DIED, "died")
        return payloads

    async def go() -> None:
        dispatcher.compute = compute
        dispatcher.held = True
        first = asyncio.ensure_future(service.infer([0], Terms()))
        await asyncio.sleep(0.01)
        bad = asyncio.ensure_future(service.infer(["bad"] * 31, Terms()))
        await asyncio.sleep(0)
        good = asyncio.ensure_future(service.infer(["good"], Terms()))
        await asyncio.sleep(0)
        dispatcher.held = False
        assert [answer.value for answer in await good] == ["good"]
        with pytest.raises(RequestFailed, match="died"):
            await bad
        await first
        assert dispatcher.batches[:2] == [1, 32]

    asyncio.run(go())


def test_results_that_are_no_json_are_the_models_fault() -> None:
    service, dispatcher = function()
    dispatcher.compute = lambda payloads: [object() for _ in payloads]
    with listening(service) as server:
        answer = predict(server, "function", [1])
        assert (answer.status_code, "JSON" in answer.json()["error"]) == (500, True)


def test_a_streaming_model_sends_parts_as_lines_or_events() -> None:
    with listening(counter()[0], function()[0]) as server:
        url = f"{server.url}/v1/models/counter:predict"
        whole = httpx.post(url, json={"instances": [2, 0]})
        assert whole.json() == {"predictions": [[{"count": i, "text": "a\u2028b"} for i in range(2)], []]}
        lines = httpx.post(url, json={"instances": [2, 1]}, headers={"Accept": "application/x-ndjson"})
        assert lines.headers["content-type"].startswith("application/x-ndjson")
        made = [json.loads(line) for line in lines.text.splitlines()]
        assert sorted((each["instance"], each["part"]["count"]) for each in made) == [(0, 0), (0, 1), (1, 0)]
        events = httpx.post(url, json={"instances": [1]}, headers={"Accept": "text/event-stream"})
        first, last, rest = events.text.split("\n\n")
        assert json.loads(first.removeprefix("data: ")) == {"instance": 0, "part": {"count": 0, "text": "a\u2028b"}}
        assert (last, rest) == ("data: [DONE]", "")
        plain = f"{server.url}/v1/models/function:predict"
        refused = httpx.post(plain, json={"instances": [1]}, headers={"Accept": "text/event-stream"})
        assert (refused.status_code, "does not stream" in refused.json()["error"]) == (400, True)


def test_large_answers_are_written_beside_the_loop(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        assert predict(server, "function", ["fox"]).status_code == 200
        tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": ['"fox"']}
        assert httpx.post(f"{server.url}/v2/models/function/infer", json={"inputs": [tensor]}).status_code == 200

    # The direct way is for small requests only.
    monkeypatch.setattr(direct.Direct, "take", lambda *given: None)
    threads = threads_of(monkeypatch, (predict_route, "write_predictions"), (tensor_items, "join"))
    ask()
    monkeypatch.setattr(exchange, "INLINE_SIZE", 2)
    ask()
    assert [name.startswith("asyncio_") for name in threads] == [False, False, True, True]


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("abc", 3),
        ([1, 2.5, True], 24),
        ({"ab": [1, "abc"], "c": None}, 2 + 1 + 16 + 8 + 3 + 8),
        (np.zeros((2, 3), np.float32), 48),
        (np.array([b"abc", b"d"], object), 16 + 4),
        (["a" * 50] * 100, 850),
        pytest.param(dict.fromkeys(range(1000), "long"), 1000, id="many keys"),
    ],
    ids=str,
)
def test_the_size_of_a_result(value: Any, size: int) -> None:
    assert size_of(value, 840) == size


def test_a_stream_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_service, "_MOST_UNREAD", 4000)
    service, dispatcher = counter()

    async def go() -> None:
        read = [index async for index, _ in service.stream([1000], Terms())]
        assert len(read) == 1000, "who reads what comes gets all of it"
        slow = service.stream([20], Terms())
        assert (await anext(slow))[1]["count"] == 0
        while dispatcher.waiting:
            await asyncio.sleep(0.001)
        assert len([part async for part in slow]) == 19, "a little may wait"
        slow = service.stream([1000], Terms())
        await anext(slow)
        while dispatcher.waiting:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFull, match="more than 4000 characters of its stream unread"):
            await anext(slow)

    asyncio.run(go())


def test_a_stream_that_fails_says_so() -> None:
    service, dispatcher = counter()
    headers = {"Accept": "application/x-ndjson"}
    with listening(service) as server:
        url = f"{server.url}/v1/models/counter:predict"
        dispatcher.compute = lambda payloads: [[{"count": 1}, RequestFailed("boom")] for _ in payloads]
        answer = httpx.post(url, json={"instances": [1]}, headers=headers)
        assert answer.text.splitlines() == ['{"instance":0,"part":{"count":1}}', '{"error":"boom"}']
        dispatcher.compute = lambda payloads: [BadItem("odd") if each == 3 else [] for each in payloads]
        answer = httpx.post(url, json={"instances": [1, 3]}, headers=headers)
        assert (answer.status_code, answer.json()) == (400, {"error": "item 1: odd"})
        dispatcher.compute = lambda payloads: [QueueFull("full", 2) for _ in payloads]
        answer = httpx.post(url, json={"instances": [1]}, headers=headers)
        assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, {"error": "full"}, "2")
        dispatcher.held = True
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={"instances": [1]}, headers=headers, timeout=0.3)
        while dispatcher.waiting:
            pass

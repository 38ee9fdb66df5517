"""Background requests through the server: only a caller in its own process can send them, by any route."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from support.items_harness import LocalDispatcher, classifier, counter, embedder, function, listening, reranker
from support.server_harness import Answer, Front

from chairlift.config.server import ServerConfig
from chairlift.core.decision import Reason
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.items.call import CallResult
from chairlift.engine.items.dispatcher import Dispatcher
from chairlift.engine.sequences.messages import EngineStats
from chairlift.errors import QueueFull
from chairlift.server.app import create_app
from chairlift.server.http.exchange import BACKGROUND, Terms
from chairlift.server.models.registry import Models, ModelService


def marked(app: ASGIApp) -> ASGIApp:
    """The application as a batch job calls it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, BACKGROUND: True}, receive, send)

    return call


async def post(app: ASGIApp, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        return await client.post(path, json=body, headers=headers)


def decoder() -> Front:
    async def make() -> Front:
        return Front()

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_decoders_routes(path: str, body: dict[str, Any]) -> None:
    async def go() -> None:
        front = Front()
        for app, expected in ((front.app, False), (marked(front.app), True)):
            answer = await post(app, path, body | {"n": 2, "max_tokens": 3})
            assert answer.status_code == 200
            assert [request.background for request in front.client.requests[-2:]] == [expected] * 2

    asyncio.run(go())


def item_service(name: str) -> tuple[ModelService, LocalDispatcher]:
    factories = [embedder, reranker, classifier, function, counter]
    return next(make for make in factories if make.__name__ == name)()


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        ("embedder", "/v1/embeddings", {"input": "hello", "model": "embedder"}),
        ("embedder", "/embed", {"inputs": "hello"}),
        ("reranker", "/rerank", {"query": "a", "documents": ["b"]}),
        ("classifier", "/predict", {"inputs": "hello"}),
        ("function", "/v1/models/function:predict", {"instances": [2]}),
        ("counter", "/v1/models/counter:predict", {"instances": [2]}),
    ],
)
def test_routes_of_models_that_answer_in_one_call(model: str, path: str, body: dict[str, Any]) -> None:
    async def go() -> None:
        service, dispatcher = item_service(model)
        app = create_app(Models([service]), ServerConfig())
        for each, expected in ((app, False), (marked(app), True)):
            answer = await post(each, path, body)
            assert answer.status_code == 200, answer.text
            assert dispatcher.submitted[-1]["background"] is expected

    asyncio.run(go())


def test_open_inference_protocol_and_streamed_parts() -> None:
    async def go() -> None:
        service, dispatcher = function()
        app = create_app(Models([service]), ServerConfig())
        document = {"name": "input", "datatype": "BYTES", "shape": [1], "data": ["2"]}
        answer = await post(marked(app), "/v2/models/function/infer", {"inputs": [document]})
        assert answer.status_code == 200, answer.text
        assert dispatcher.submitted[-1]["background"] is True
        service, dispatcher = counter()
        app = create_app(Models([service]), ServerConfig())
        path = "/v1/models/counter:predict"
        answer = await post(marked(app), path, {"instances": [2]}, {"accept": "application/x-ndjson"})
        assert answer.status_code == 200
        assert dispatcher.submitted[-1]["background"] is True

    asyncio.run(go())


def test_no_client_can_ask_for_it() -> None:
    front = decoder()
    service, dispatcher = function()
    headers = {BACKGROUND: "true", "X-Background": "true", "X-Chairlift-Background": "1", "Chairlift.Background": "1"}
    with listening(front.service, service) as server, httpx.Client(base_url=server.url, headers=headers) as client:
        answer = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, "model": "tiny"})
        assert answer.status_code == 200
        answer = client.post("/v1/models/function:predict", json={"instances": [2]})
        assert answer.status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "hello", "model": "tiny", "background": True})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert [request.background for request in front.client.requests] == [False]
    assert dispatcher.submitted[-1]["background"] is False


def lines_of(text: str, name: str) -> dict[str, float]:
    found = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(f"chairlift_{name}")]
    return {key: float(value) for key, value in found}


def test_a_decoders_metrics() -> None:
    async def go() -> str:
        front = Front()
        for app in (front.app, marked(front.app)):
            await post(app, "/v1/completions", {"prompt": "hello", "max_tokens": 3})
        front.client.stats = EngineStats(running=1, waiting=2, background_running=3, background_waiting=4)
        answer: Answer = await front.call("GET", "/metrics")
        return answer.body.decode()

    text = asyncio.run(go())
    states = lines_of(text, "background_requests")
    assert states == {
        'chairlift_background_requests{model="tiny",state="running"}': 3,
        'chairlift_background_requests{model="tiny",state="waiting"}': 4,
    }
    assert lines_of(text, "requests_waiting{") == {'chairlift_requests_waiting{model="tiny"}': 2}
    for name, count in (("time_to_first_token", 1), ("queue_time", 1), ("request_duration", 1), ("inter_token", 2)):
        (found,) = [v for key, v in lines_of(text, name).items() if "_count" in key]
        assert found == count, f"{name} counts background requests"
    assert lines_of(text, "generation_tokens_total") == {'chairlift_generation_tokens_total{model="tiny"}': 6}
    assert 'reason="live"' not in text


def test_a_line_takes_live_items_first_and_counts_apart() -> None:
    async def go() -> None:
        calls: list[list[Any]] = []
        release = asyncio.Event()

        class Gate:
            async def run(self, payloads: Any, on_parts: Any = None) -> Any:
                calls.append(list(payloads))
                await release.wait()
                return CallResult([np.float32(0)] * len(payloads), 0.001)

        dispatcher = Dispatcher(BatchLimits(max_waiting=2), [Gate()])
        first = dispatcher.submit("live-0")
        await asyncio.sleep(0.01)
        later = [dispatcher.submit(f"job-{index}", background=True) for index in range(2)]
        with pytest.raises(QueueFull, match="2 background requests wait"):
            dispatcher.submit("job-2", background=True)
        live = [dispatcher.submit(f"live-{index}", priority=5) for index in (1, 2)]
        with pytest.raises(QueueFull, match="2 requests wait"):
            dispatcher.submit("live-3")
        decision = dispatcher.explain(later[0])
        assert decision is not None
        assert decision.reason is Reason.LIVE
        release.set()
        await asyncio.gather(first, *later, *live)
        assert calls == [["live-0"], ["live-1", "live-2"], ["job-0", "job-1"]]
        await dispatcher.close()

    asyncio.run(go())


def test_the_default_deadline_is_for_live_requests() -> None:
    async def go() -> None:
        service, dispatcher = function()
        dispatcher.configure(BatchLimits(default_timeout=0.02))
        dispatcher.held = True
        # What runs already has all the time that it takes; what waits for it is dropped at its deadline.
        running = dispatcher.submit(1, timeout=60.0)
        await asyncio.sleep(0)
        waiting = asyncio.create_task(service.infer([1], Terms(background=True)))
        await asyncio.sleep(0.06)
        dispatcher.held = False
        await running
        (answer,) = await waiting
        assert answer.value == 2

    asyncio.run(go())

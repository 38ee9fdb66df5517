"""Spans of requests, as a collector gets them: whose they are, what they say, and that they hold nobody up."""

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from support.collector import Collector, attributes
from support.items_harness import adder, embedder, function, listening
from support.oip_tensors import tensors
from support.server_harness import FakeClient, Front, full, run

from chairlift.config.server import ServerConfig
from chairlift.core.finished import FinishReason
from chairlift.engine.sequences.client import Beginning
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import ConfigError
from chairlift.server.front import make_spans
from chairlift.server.http.local_client import AppClient
from chairlift.server.models import request_spans
from chairlift.server.models.request_spans import RequestSpans

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def traced(collector: Collector, test: Callable[[Front], Awaitable[None]], client: FakeClient | None = None) -> None:
    """Have a front send spans to a collector while a test runs, and all of them by its end."""

    async def go() -> None:
        front = Front(client)
        front.service.spans = spans = RequestSpans(collector.url)
        try:
            await test(front)
        finally:
            await asyncio.to_thread(spans.close)

    run(go)


def test_a_chat_is_a_span_of_its_callers(collector: Collector) -> None:
    before = time.time_ns()

    async def test(front: Front) -> None:
        headers = PARENT | {"tracestate": "a=1,b=2"}
        asked = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}
        body = {"messages": [{"role": "user", "content": "a secret question"}]} | asked
        answer = await front.post("/v1/chat/completions", body, headers=headers)
        assert answer.status == 200
        (span,) = await sent(front)
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == SPAN
        assert span.span_id.hex() != SPAN
        assert span.trace_state == "a=1,b=2"
        assert span.name == "chat tiny"
        assert span.kind == span.SPAN_KIND_SERVER
        assert span.status.code == span.status.STATUS_CODE_UNSET
        assert before < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
        said = attributes(span)
        read = answer.json()["usage"]["prompt_tokens"]
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "chairlift",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.response.id": answer.headers["x-request-id"],
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.top_k": 7.0,
            "gen_ai.request.seed": 3,
            "gen_ai.usage.input_tokens": read,
            "gen_ai.usage.output_tokens": 5,
        }
        assert said.items() >= expected.items()
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert said["gen_ai.latency.e2e"] == pytest.approx(seconds, abs=1e-6)

    async def sent(front: Front) -> list[Any]:
        assert front.service.spans is not None
        await asyncio.to_thread(front.service.spans.close)
        return collector.spans

    traced(collector, test)
    assert collector.paths == ["/v1/traces"]
    assert collector.resource["service.name"] == "chairlift"
    assert not any(b"secret" in raw or b"hello world" in raw for raw in collector.raw), "no text of prompt or answer"


@pytest.mark.parametrize(("seed", "told"), [(2**63 - 1, 2**63 - 1), (2**63, str(2**63)), (-(2**63), -(2**63))])
def test_seeds_that_are_no_number_to_a_collector_are_told_as_text(
    collector: Collector, seed: int, told: int | str
) -> None:
    async def test(front: Front) -> None:
        assert (await front.complete(max_tokens=1, temperature=1, seed=seed)).status == 200

    traced(collector, test)
    (span,) = collector.spans
    assert attributes(span)["gen_ai.request.seed"] == told


def test_every_protocol_has_its_span(collector: Collector) -> None:
    async def test(front: Front) -> None:
        talk = [{"role": "user", "content": "hi"}]
        for path, body in (
            ("/v1/completions", {"prompt": ["hello", "hello world"], "max_tokens": 3, "n": 2, "temperature": 1}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
            ("/v1/messages", {"messages": talk, "max_tokens": 3, "model": "tiny"}),
            ("/v1/chat/completions", {"messages": talk, "max_tokens": 3, "stream": True}),
        ):
            assert (await front.post(path, body)).status == 200, path

    traced(collector, test)
    said = [attributes(span) for span in collector.spans]
    assert [span.name for span in collector.spans] == ["text_completion tiny", *["chat tiny"] * 3]
    assert [each["gen_ai.response.id"].rstrip("0123456789abcdef") for each in said] == [
        "cmpl-",
        "resp_",
        "msg_",
        "chatcmpl-",
    ]
    assert said[0]["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert said[0]["gen_ai.request.choice.count"] == 2
    assert said[0]["gen_ai.usage.output_tokens"] == 12
    assert not any("gen_ai.request.seed" in each for each in said), "nobody asked for one"
    tokens = Front().tokenizer
    assert said[0]["gen_ai.usage.input_tokens"] == sum(len(tokens.encode(each)) for each in ("hello", "hello world"))
    assert len({span.trace_id for span in collector.spans}) == 4, "without a caller's span each is a trace of its own"
    assert not any(span.parent_span_id for span in collector.spans)


def test_times_are_those_of_the_phases(collector: Collector) -> None:
    client = FakeClient(manual=True)

    async def test(front: Front) -> None:
        task = asyncio.create_task(front.complete(max_tokens=2))
        while not client.streams:
            await asyncio.sleep(0.001)
        (stream,) = client.streams
        began = stream.request.arrival
        stream.beginning = Beginning(began + 0.25, began + 0.75, 2, {}, 0, 0)
        stream.ended, stream.steps, stream.rows, stream.preemptions = began + 2.0, 4, 10, 1
        token = front.tokenizer.encode("hello")[0]
        stream.push(SequenceUpdate(stream.request.id, [token, token], FinishReason.LENGTH, num_cached_tokens=2))
        assert (await task).status == 200

    traced(collector, test, client)
    (span,) = collector.spans
    said = attributes(span)
    times = {name.removeprefix("gen_ai.latency."): said[name] for name in said if "latency" in name}
    assert times == {
        "time_in_queue": pytest.approx(0.25),
        "time_to_first_token": pytest.approx(0.75),
        "time_in_model_prefill": pytest.approx(0.5),
        "time_in_model_decode": pytest.approx(1.25),
        "time_in_model_inference": pytest.approx(1.75),
        "e2e": pytest.approx(2.0),
    }
    assert said["gen_ai.usage.cache_read.input_tokens"] == 2
    assert (said["chairlift.mean_batch"], said["chairlift.preemptions"]) == (2.5, 1)
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(2e9, abs=1e3)


@pytest.mark.parametrize(
    ("headers", "count", "has_parent"),
    [
        ({"traceparent": f"00-{TRACE}-{SPAN}-00"}, 0, False),
        ({"traceparent": f"00-{TRACE}-{SPAN}-03"}, 1, True),
        ({"traceparent": f"00-{TRACE}-{SPAN}-1"}, 1, False),
        ({"traceparent": "\xff" * 600}, 1, False),
        (PARENT | {"tracestate": "no state"}, 1, True),
        ({"tracestate": "a=1"}, 1, False),
    ],
)
def test_who_is_not_sampled_has_none_and_who_is_wrong_no_parent(
    collector: Collector, headers: dict[str, str], count: int, has_parent: bool
) -> None:
    async def test(front: Front) -> None:
        answer = await front.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}, headers=headers)
        assert answer.status == 200

    traced(collector, test)
    assert len(collector.spans) == count
    assert all((span.trace_id.hex() == TRACE) is has_parent for span in collector.spans)
    assert all(span.trace_state == "" for span in collector.spans)


def test_refusals_and_clients_that_leave(collector: Collector) -> None:
    async def test(front: Front) -> None:
        front.client.refusal = full(1.0)
        assert (await front.complete()).status == 429
        front.client.refusal = None
        front.gone.set()
        await front.complete()

    traced(collector, test, FakeClient(manual=True))
    refused, left = collector.spans
    assert attributes(refused)["error.type"] == "shed"
    assert refused.status.code == refused.status.STATUS_CODE_ERROR
    assert attributes(left)["gen_ai.response.finish_reasons"] == ["abort"]
    assert left.status.code == left.status.STATUS_CODE_UNSET
    assert "error.type" not in attributes(left)


def test_lines_of_a_batch_have_none_and_background_responses_say_that_they_are(collector: Collector) -> None:
    async def test(front: Front) -> None:
        line = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
        assert (await AppClient(front.app, background=True).post("/v1/completions", line)).status == 200
        answer = await front.post("/v1/responses", {"input": "hi", "background": True, "max_output_tokens": 1})
        name = answer.json()["id"]
        while (await front.call("GET", f"/v1/responses/{name}")).json()["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.001)

    traced(collector, test)
    (span,) = collector.spans
    assert attributes(span)["chairlift.background"] is True


def test_requests_for_items_have_spans_too(collector: Collector) -> None:
    """By the ordinary way and by the short one, answered and failed."""
    texts, _ = embedder()
    doubles, dispatcher = function()
    texts.spans = doubles.spans = spans = RequestSpans(collector.url)
    with listening(texts, doubles) as server, httpx.Client(base_url=server.url) as http:
        asked = {"input": ["hello world", "hello"], "model": "embedder"}
        embedded = http.post("/v1/embeddings", json=asked, headers=PARENT)
        assert embedded.status_code == 200
        body = {"instances": [1, 2, 3]}
        predicted = http.post("/v1/models/function:predict", json=body, headers=PARENT)
        assert predicted.json() == {"predictions": [2, 4, 6]}
        dispatcher.compute = lambda items: [ValueError("broken") for _ in items]
        assert http.post("/v1/models/function:predict", json=body).status_code >= 400
    spans.close()
    first, second, third = collector.spans
    assert (first.name, second.name, third.name) == ("embeddings embedder", "python function", "python function")
    assert first.trace_id.hex() == second.trace_id.hex() == TRACE
    said = attributes(first)
    assert said["gen_ai.usage.input_tokens"] == embedded.json()["usage"]["prompt_tokens"]
    assert said["gen_ai.response.id"] == embedded.headers["x-request-id"]
    assert said["chairlift.items"] == 2
    assert said["gen_ai.latency.e2e"] == pytest.approx(
        said["gen_ai.latency.time_in_queue"] + said["gen_ai.latency.time_in_model_inference"]
    )
    assert attributes(second)["chairlift.items"] == 3
    assert "gen_ai.usage.input_tokens" not in attributes(second)
    assert attributes(third)["error.type"] == "error"
    assert third.end_time_unix_nano >= third.start_time_unix_nano


def test_a_dead_collector_is_told_of_once(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    collector.status = 400
    spans: list[RequestSpans] = []

    async def test(front: Front) -> None:
        assert front.service.spans is not None
        spans.append(front.service.spans)
        for _ in range(5):
            assert (await front.complete(max_tokens=1)).status == 200
        while not caplog.records:
            await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING):
        traced(collector, test)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the collector {collector.url}/v1/traces is not reached")


def test_a_collector_that_hangs_costs_spans_and_no_requests(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits to be sent is bounded: the oldest spans are dropped, and leaving does not wait for long."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setattr(request_spans, "_CLOSE_S", 0.01)
    collector.open.clear()

    async def test(front: Front) -> None:
        for number in range(20):
            assert (await front.complete(max_tokens=number + 1)).status == 200

    traced(collector, test)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]
    collector.open.set()
    for thread in threads:
        thread.join(20)
    asked = [attributes(span)["gen_ai.request.max_tokens"] for span in collector.spans]
    assert len(asked) <= 6
    assert asked[-4:] == [17, 18, 19, 20], "the last ones are sent"


def test_the_environment_names_the_service_and_samples(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front desk")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")

    async def test(front: Front) -> None:
        assert (await front.complete(max_tokens=1)).status == 200
        body = {"prompt": "hello", "max_tokens": 1}
        assert (await front.post("/v1/completions", body, headers=PARENT)).status == 200

    traced(collector, test)
    (span,) = collector.spans
    assert span.parent_span_id.hex() == SPAN
    assert collector.resource["service.name"] == "front desk"


def test_settings_that_are_no_good_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("collector:4318", "grpc://collector", "http://", "http://user:password@collector", "http://a/?b"):
        with pytest.raises(ConfigError, match="otlp_endpoint must be like"):
            ServerConfig(otlp_endpoint=url)
    assert make_spans(ServerConfig()) is None
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(ConfigError, match="otlp_endpoint: "):
        make_spans(ServerConfig(otlp_endpoint="http://127.0.0.1:1"))


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "chairlift.server.models.request_spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[otel\]' \(.*opentelemetry"):
        make_spans(ServerConfig(otlp_endpoint="http://127.0.0.1:4318"))


def test_calls_over_grpc_are_part_of_their_callers_trace(collector: Collector) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    service, _ = adder()
    service.spans = spans = RequestSpans(collector.url)
    with listening(service, grpc=True) as server:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        client.infer("adder", tensors(triton, True), headers=PARENT)
        client.close()
    spans.close()
    (span,) = collector.spans
    assert (span.name, span.trace_id.hex()) == ("tensors adder", TRACE)

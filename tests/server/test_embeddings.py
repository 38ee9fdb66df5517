"""POST /v1/embeddings, by the OpenAI client and by hand."""

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from support.items_harness import (
    DIMENSIONS,
    MAX_TOKENS,
    Listening,
    LocalDispatcher,
    adder,
    chat_encoder,
    chat_ids,
    embedder,
    embedding,
    function,
    ids_of,
    listening,
)

from chairlift.errors import DeadlineExceeded, QueueFull, RequestFailed, Unavailable
from chairlift.server.models.registry import Models


class Case:
    """A running server with one embedder, and something else that is none."""

    def __init__(self, server: Listening, dispatcher: LocalDispatcher) -> None:
        self.server, self.dispatcher = server, dispatcher
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.http = httpx.Client(base_url=server.url)

    def post(self, **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        return self.http.post("/v1/embeddings", json={"input": "hello world"} | body, headers=headers)


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    service, dispatcher = embedder()
    with listening(service, adder()[0]) as server:
        it = Case(server, dispatcher)
        yield it
        it.http.close()
        it.openai.close()


def expected(text: str) -> Any:
    return embedding(ids_of(text))


def test_openai_client_gets_base64_and_floats(case: Case) -> None:
    texts = ["hello world", "the quick brown fox"]
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        made = case.openai.embeddings.create(model="embedder", input=texts, **more)  # type: ignore[arg-type]
        assert [each.index for each in made.data] == [0, 1]
        assert made.model == "embedder"
        assert made.usage.prompt_tokens == made.usage.total_tokens == sum(len(ids_of(t)) for t in texts)
        for each, text in zip(made.data, texts, strict=True):
            vector: Any = each.embedding
            if isinstance(vector, str):
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            np.testing.assert_array_equal(np.asarray(vector, dtype=np.float32), expected(text))


def test_floats_are_the_default(case: Case) -> None:
    made = case.post().json()
    assert made["object"] == "list"
    assert made["data"][0]["object"] == "embedding"
    assert len(made["data"][0]["embedding"]) == DIMENSIONS


def test_token_ids(case: Case) -> None:
    ids = [ids_of("hello world"), ids_of("fox")]
    for given, count in ((ids, 2), (ids[0], 1)):
        made = case.openai.embeddings.create(model="embedder", input=given)  # type: ignore[arg-type]
        assert len(made.data) == count
        np.testing.assert_allclose(made.data[0].embedding, expected("hello world"), rtol=1e-6)


def test_2048_inputs_share_batches(case: Case) -> None:
    case.dispatcher.batches.clear()
    made = case.openai.embeddings.create(model="embedder", input=["hello world"] * 2047 + ["fox"])
    assert len(made.data) == 2048
    np.testing.assert_allclose(made.data[2047].embedding, expected("fox"), rtol=1e-6)
    assert case.dispatcher.batches == [32] * 64
    assert case.post(input=["a"] * 2049).json()["error"]["code"] == "too_many_inputs"


def test_dimensions_are_cut_and_normalized(case: Case) -> None:
    vector = case.post(dimensions=3).json()["data"][0]["embedding"]
    cut = expected("hello world")[:3]
    np.testing.assert_allclose(vector, cut / np.linalg.norm(cut), rtol=1e-6)
    assert math.isclose(np.linalg.norm(vector), 1, rel_tol=1e-6)


def test_too_long_is_refused_or_cut(case: Case) -> None:
    long = "hello " * 100
    refused = case.post(input=["fox", long])
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "input[1]" in refused.json()["error"]["message"]
    for tokens, count in ((-1, MAX_TOKENS), (10, 10)):
        made = case.post(input=long, truncate_prompt_tokens=tokens).json()
        assert made["usage"]["prompt_tokens"] == count
        ids = ids_of(long)
        np.testing.assert_allclose(
            made["data"][0]["embedding"], embedding([*ids[: count - 1], ids[-1]]), rtol=1e-5, atol=1e-6
        )
    assert case.post(input=[5] * 99, truncate_prompt_tokens=7).json()["usage"]["prompt_tokens"] == 7
    assert case.post(input=[5] * 99).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", "empty_input"),
        ({"input": []}, "input", "empty_input"),
        ({"input": ["a", ""]}, "input", "empty_input"),
        ({"input": [[]]}, "input", "empty_input"),
        ({"input": ["a", 1]}, "input", None),
        ({"input": [1, 120]}, "input", None),
        ({"input": [-1]}, "input", None),
        ({"input": [2**40]}, "input[0]", None),
        ({"input": 5}, "input", None),
        ({"input": [[1.5]]}, "input[0][0]", None),
        ({"dimensions": 0}, "dimensions", None),
        ({"dimensions": DIMENSIONS + 1}, "dimensions", None),
        ({"encoding_format": "hex"}, "encoding_format", None),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
        ({"truncate_prompt_tokens": 41}, "truncate_prompt_tokens", None),
        ({"wrong": 1}, "wrong", "unknown_field"),
        ({"model": "adder"}, "model", "wrong_task"),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(case: Case, body: dict[str, Any], param: str, code: str | None) -> None:
    answer = case.post(**body)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code), answer.text


def test_whoever_sends_the_ids_of_another_tokenizer_is_told(case: Case) -> None:
    message = case.post(input=[[1, 120]]).json()["error"]["message"]
    assert "outside the vocabulary of 120; if another model's tokenizer made them, send texts" in message
    assert "check_embedding_ctx_length=False" in message


def test_models_that_are_not_there_or_not_embedders(case: Case) -> None:
    with pytest.raises(openai.NotFoundError):
        case.openai.embeddings.create(model="gpt", input="a")
    message = case.post(model="adder").json()["error"]["message"]
    assert message == "`adder` is a tensor model; /v1/embeddings needs an embedding model"
    chat = case.http.post("/v1/chat/completions", json={"model": "embedder", "messages": []})
    assert chat.json()["error"]["message"].startswith("`embedder` is an embedding model")
    assert [m.id for m in case.openai.models.list()] == ["embedder", "adder"]


def test_a_model_must_be_named_where_several_would_do() -> None:
    with listening(embedder("one")[0], embedder("two")[0]) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a", "model": "two"}).status_code == 200
    with listening() as server:
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 404


def test_deadline_and_priority_go_along_and_times_come_back(case: Case) -> None:
    case.dispatcher.submitted.clear()
    answer = case.post(headers={"X-Request-Timeout-Ms": "1500", "X-Request-Priority": "3"})
    case.post(priority=-2)
    first, second = case.dispatcher.submitted
    assert (first["timeout"], first["priority"], first["size"]) == (1.5, 3, len(ids_of("hello world")))
    assert (second["timeout"], second["priority"]) == (None, -2)
    assert 0 <= float(answer.headers["x-queue-time-ms"]) < 10_000
    assert answer.headers["x-inference-time-ms"] == "2.000"
    assert answer.headers["x-batch-size"] == "1"
    for name, value in (
        ("X-Request-Timeout-Ms", "0"),
        ("X-Request-Timeout-Ms", "soon"),
        ("X-Request-Priority", "high"),
    ):
        answer = case.post(headers={name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("full", 2.5), 429),
        (Unavailable("it died"), 503),
        (DeadlineExceeded("late"), 504),
        (RequestFailed("boom"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("at_once", [True, False])
def test_failures_have_their_codes(error: Exception, status: int, at_once: bool) -> None:
    service, dispatcher = embedder()
    with listening(service) as server:
        if at_once:
            dispatcher.refusal = error
        else:
            dispatcher.compute = lambda payloads: [error for _ in payloads]
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a", "fox"]})
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))
        assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_a_model_that_still_loads_is_no_candidate() -> None:
    loading, _ = function()
    loading.info, loading.state = None, "loading"
    with listening(embedder()[0], loading) as server:
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 200
        assert httpx.post(f"{server.url}/rerank", json={"query": "a", "documents": ["a"]}).status_code == 503
        named = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a", "model": "function"})
        assert (named.status_code, named.headers["retry-after"]) == (503, "1")


def test_loading_is_503_and_readiness_needs_all() -> None:
    service, _ = embedder()
    service.state = "loading"
    with listening(service, adder()[0]) as server:
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 503
        for path in ("/health", "/health/ready"):
            answer = httpx.get(server.url + path)
            assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        service.state = "ready"
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_requests_beyond_the_queue_are_refused_as_such() -> None:
    service, dispatcher = embedder()
    dispatcher.limits = msgspec.structs.replace(dispatcher.limits, max_waiting=3)
    with listening(service) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a"] * 4})
        assert answer.status_code == 400
        assert "max_waiting" in answer.json()["error"]["message"]


def test_hanging_up_takes_all_inputs_out_of_the_line() -> None:
    service, dispatcher = embedder()
    dispatcher.held = True
    with listening(service) as server, httpx.Client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{server.url}/v1/embeddings", json={"input": ["a", "fox"]}, timeout=0.3)
        client.close()
        while dispatcher.waiting:
            pass
        assert len(dispatcher.submitted) == 2
        assert 'chairlift_requests_finished_total{model="embedder",reason="abort"} 1.0' in metrics(server)


def metrics(server: Listening) -> str:
    return httpx.get(f"{server.url}/metrics").text


def test_key_guards_everything_but_probes() -> None:
    with listening(embedder()[0], api_key="secret") as server:
        for path in ("/v1/embeddings", "/embed", "/rerank", "/v2/models/embedder/infer"):
            answer = httpx.post(server.url + path, json={"input": "a"})
            assert answer.status_code == 401, path
        for path in ("/health", "/metrics", "/v2/health/ready"):
            assert httpx.get(server.url + path).status_code == 200, path
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200


def test_metrics_of_two_models_share_families() -> None:
    with listening(registry=Models([embedder("one")[0], embedder("two")[0]])) as server:
        httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a", "b"], "model": "two"})
        text = metrics(server)
        assert text.count("# TYPE chairlift_items_answered_total counter") == 1
        assert 'chairlift_items_answered_total{model="one"} 0.0' in text
        assert 'chairlift_items_answered_total{model="two"} 2.0' in text
        assert 'chairlift_ready{model="one"} 1.0' in text


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"input": NaN}', json.dumps({"input": "\ud800"}).encode()])
def test_rubbish_is_400(case: Case, raw: bytes) -> None:
    answer = case.http.post("/v1/embeddings", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_texts_that_are_messages() -> None:
    """On every route what the chat template makes of a text and the folder's prompt."""
    service, dispatcher = embedder("chat", encoder=chat_encoder(judges=False))
    with listening(service) as server, httpx.Client(base_url=server.url) as http:
        for path, body in (
            ("/v1/embeddings", {"input": "world"}),
            ("/pooling", {"input": ["world"]}),
            ("/pooling", {"input": "world", "task": "token_embed"}),
            ("/embed", {"inputs": "world"}),
            ("/embed", {"inputs": "world", "prompt_name": "it"}),
            ("/embed_all", {"inputs": ["world"]}),
            ("/v1/score", {"text_1": "world", "text_2": "world"}),
            ("/similarity", {"inputs": {"source_sentence": "world", "sentences": ["world"]}}),
            ("/v1/models/chat:predict", {"instances": ["world"]}),
        ):
            dispatcher.submitted.clear()
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = [each["payload"].token_ids for each in dispatcher.submitted]
            assert found == [chat_ids(system="hello", user="world")] * len(found), path
            assert found
        dispatcher.submitted.clear()
        assert http.post("/embed", json={"inputs": "world", "prompt_name": "none"}).status_code == 200
        assert http.post("/v1/embeddings", json={"input": chat_ids(user="fox")}).status_code == 200
        found = [each["payload"].token_ids for each in dispatcher.submitted]
        assert found == [chat_ids(user="world"), chat_ids(user="fox")]
        (told,) = http.post("/tokenize", json={"inputs": ["world"], "prompt_name": "it"}).json()
        assert [each["id"] for each in told] == chat_ids(system="hello", user="world")
        assert [each["text"] for each in told if each["start"] is not None] == ["world"]


def test_a_default_prompt_comes_unasked() -> None:
    service, _ = embedder("prompted", default_prompt="query")
    with listening(service) as server, httpx.Client(base_url=server.url) as http:
        made = http.post("/v1/embeddings", json={"input": "world"}).json()["data"][0]["embedding"]
        np.testing.assert_allclose(made, expected("hello world"), rtol=1e-6)
        np.testing.assert_allclose(http.post("/embed", json={"inputs": "world"}).json()[0], made, rtol=1e-6)
        ids = http.post("/v1/embeddings", json={"input": ids_of("world")}).json()["data"][0]["embedding"]
        np.testing.assert_allclose(ids, expected("world"), rtol=1e-6)
        assert http.post("/embed", json={"inputs": [ids_of("world")]}).status_code == 200

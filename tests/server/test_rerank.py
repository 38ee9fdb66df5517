"""Rerank as Cohere, Jina and TEI have it, and TEI's other routes."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.items_harness import (
    DIMENSIONS,
    MAX_TOKENS,
    Listening,
    adder,
    chat_encoder,
    chat_ids,
    classifier,
    embedder,
    embedding,
    ids_of,
    listening,
    pair_of,
    reranker,
)

from chairlift.core.items.limits import BatchLimits
from chairlift.errors import DeadlineExceeded, QueueFull, RequestFailed, Unavailable

QUERY = "quick fox"
DOCUMENTS = ["hello world", "the quick brown fox", "fox"]


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    with listening(reranker()[0], embedder()[0], classifier()[0], adder()[0]) as it:
        yield it


def post(server: Listening, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


def logit(text: str, query: str = QUERY) -> float:
    first = set(ids_of(query))
    second = set(ids_of(text)[1:])
    return len(first & second) - 1


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


ORDER = sorted(range(3), key=lambda i: -logit(DOCUMENTS[i]))


@pytest.mark.parametrize("version", [1, 2])
def test_cohere_client_works_unchanged(server: Listening, version: int) -> None:
    cohere = pytest.importorskip("cohere")
    kind = cohere.Client if version == 1 else cohere.ClientV2
    client = kind(api_key="none", base_url=server.url)
    made = client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [each.index for each in made.results] == ORDER[:2]
    for each in made.results:
        assert each.relevance_score == pytest.approx(sigmoid(logit(DOCUMENTS[each.index])))
    assert made.meta.api_version.version == str(version)
    with pytest.raises(cohere.NotFoundError) as caught:
        client.rerank(model="other", query=QUERY, documents=DOCUMENTS)
    assert "reranker" in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError):
        client.rerank(model="embedder", query=QUERY, documents=DOCUMENTS)


def test_cohere_documents_come_back(server: Listening) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.Client(api_key="none", base_url=server.url)
    documents = [{"text": text, "title": "fox"} for text in DOCUMENTS]
    made = client.rerank(model="reranker", query=QUERY, documents=documents, return_documents=True)
    assert [each.document.text for each in made.results] == [DOCUMENTS[i] for i in ORDER]
    by_title = client.rerank(model="reranker", query=QUERY, documents=documents, rank_fields=["title"])
    assert len({each.relevance_score for each in by_title.results}) == 1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_jina_shape(server: Listening, path: str) -> None:
    answer = post(server, path, query=QUERY, documents=DOCUMENTS, return_documents=True)
    made = answer.json()
    assert made["model"] == "reranker"
    assert made["usage"]["total_tokens"] == sum(len(pair_of(QUERY, d).token_ids) for d in DOCUMENTS)
    assert made["results"][0] == {
        "index": ORDER[0],
        "relevance_score": pytest.approx(sigmoid(logit(DOCUMENTS[ORDER[0]]))),
        "document": {"text": DOCUMENTS[ORDER[0]]},
    }
    assert answer.headers["x-batch-size"] == "3"


def test_long_documents_are_cut(server: Listening) -> None:
    long = "hello " * 100 + "fox"
    whole = post(server, "/v1/rerank", query=QUERY, documents=[long, "hello"]).json()
    assert whole["usage"]["total_tokens"] == MAX_TOKENS + len(pair_of(QUERY, "hello").token_ids)
    short = post(server, "/v1/rerank", query=QUERY, documents=[long], max_tokens_per_doc=3).json()
    assert short["usage"]["total_tokens"] == len(pair_of(QUERY, "").token_ids) + 3
    assert post(server, "/v1/rerank", query=long, documents=[long]).json()["usage"]["total_tokens"] == MAX_TOKENS
    for more, tokens in (
        ({"truncate_prompt_tokens": -1}, MAX_TOKENS),
        ({"truncate_prompt_tokens": 20}, 20),
        ({"truncate_prompt_tokens": 20, "max_tokens_per_doc": 3}, len(pair_of(QUERY, "").token_ids) + 3),
    ):
        made = post(server, "/v1/rerank", query=QUERY, documents=[long], **more).json()
        assert made["usage"]["total_tokens"] == tokens


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": [1]}, "documents[0]"),
        ({"documents": [{"title": "x"}]}, "documents[0]"),
        ({"documents": [{"text": "x"}], "rank_fields": ["title"]}, "title"),
        ({"rank_fields": []}, "rank_fields"),
        ({"documents": [{"a": "x"}], "rank_fields": ["a", "a"]}, "rank_fields"),
        ({"documents": [dict.fromkeys("abc", "x")], "rank_fields": [str(i) for i in range(65)]}, "rank_fields"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_TOKENS + 1}, "truncate_prompt_tokens"),
        ({"max_chunks_per_doc": 10}, "max_chunks_per_doc"),
        ({"relevant_spans": {}}, "relevant_spans"),
        ({"instruction": "find"}, "takes no instruction"),
        ({"instruction": ""}, "instruction must not be empty"),
        ({"instruction": "x" * 2**21}, "instruction has 2097152 characters, which beside 3 others"),
        ({"wrong": 1}, "wrong"),
        ({"priority": 2**40}, "priority"),
        ({"model": "adder"}, "`adder` is a tensor model; /v1/rerank needs a reranker"),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(server: Listening, body: dict[str, Any], word: str) -> None:
    answer = post(server, "/v1/rerank", **({"query": QUERY, "documents": DOCUMENTS} | body))
    assert answer.status_code == 400
    assert word in answer.json()["message"]
    assert answer.json()["detail"] == answer.json()["message"]


def test_an_instruction_is_what_the_system_says() -> None:
    service, dispatcher = reranker("judge", chat_encoder(judges=True))
    dispatcher.compute = lambda payloads: [np.zeros(1, dtype=np.float32) for _ in payloads]
    with listening(service) as it:
        for path, body in (
            ("/v1/rerank", {"query": "fox", "documents": ["world"]}),
            ("/rerank", {"query": "fox", "documents": ["world"]}),
            ("/v1/score", {"text_1": "fox", "text_2": "world"}),
        ):
            for more, said in (({}, "hello"), ({"instruction": "the quick"}, "the quick")):
                dispatcher.submitted.clear()
                answer = post(it, path, **body, **more)
                assert answer.status_code == 200, answer.text
                found = [each["payload"].token_ids for each in dispatcher.submitted]
                assert found == [chat_ids(system=said, query="fox", document="world")]
        refused = post(it, "/v1/rerank", query="fox", documents=["world"], instruction="fox " * MAX_TOKENS)
        assert (refused.status_code, "but the model takes 40; shorten it" in refused.text) == (400, True)


def test_an_instruction_for_an_embedder_is_refused(server: Listening) -> None:
    refused = post(server, "/v1/score", model="embedder", text_1="fox", text_2="fox", instruction="find")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instruction")


def test_documents_are_counted_before_anything_is_made_of_them() -> None:
    service, dispatcher = reranker()
    dispatcher.limits = BatchLimits(max_waiting=2)
    with listening(service) as alone:
        refused = post(alone, "/v1/rerank", query=QUERY, documents=[{"title": "x"}] * 3)
        assert (refused.status_code, "3 inputs are more than the queue of 2" in refused.text) == (400, True)


# TEI


def test_tei_rerank_has_its_own_shape(server: Listening) -> None:
    made = post(server, "/rerank", query=QUERY, texts=DOCUMENTS).json()
    assert [each["index"] for each in made] == ORDER
    assert made[0]["score"] == pytest.approx(sigmoid(logit(DOCUMENTS[ORDER[0]])))
    raw = post(server, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True).json()
    assert raw[0] == {"index": ORDER[0], "score": logit(DOCUMENTS[ORDER[0]]), "text": DOCUMENTS[ORDER[0]]}
    refused = post(server, "/rerank", query=QUERY, texts=["hello " * 100])
    assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")
    assert post(server, "/rerank", query=QUERY, texts=["hello " * 100], truncate=True).status_code == 200
    assert post(server, "/rerank", query=QUERY, texts=[]).json()["error_type"] == "Empty"


@pytest.mark.parametrize("inputs", ["hello world", ["hello world", "fox"]])
def test_tei_embed(server: Listening, inputs: Any) -> None:
    answer = post(server, "/embed", inputs=inputs)
    texts = [inputs] if isinstance(inputs, str) else inputs
    np.testing.assert_allclose(answer.json(), [embedding(ids_of(t)) for t in texts], rtol=1e-5, atol=1e-6)
    assert answer.headers["x-batch-size"] == str(len(texts))


def test_tei_embed_options(server: Listening) -> None:
    ids = ids_of("hello world")
    np.testing.assert_allclose(post(server, "/embed", inputs=[ids]).json(), [embedding(ids)], rtol=1e-5, atol=1e-6)
    with_prompt = post(server, "/embed", inputs="world", prompt_name="query").json()
    np.testing.assert_allclose(with_prompt, [embedding(ids)], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(post(server, "/embed", inputs=ids).json(), [embedding(ids)], rtol=1e-5, atol=1e-6)
    cut = embedding(ids_of("world"))[:3]
    made = post(server, "/embed", inputs="world", dimensions=3).json()
    np.testing.assert_allclose(made, [cut / np.linalg.norm(cut)], rtol=1e-5, atol=1e-6)
    with listening(embedder(normalized=False)[0]) as plain:
        made = post(plain, "/embed", inputs="world", dimensions=3, normalize=False).json()
    np.testing.assert_allclose(made, [cut], rtol=1e-5, atol=1e-6)
    long = " ".join(["hello"] * 60 + ["fox"] * 60)
    whole = ids_of(long)
    for direction, kept in (("right", whole[1 : MAX_TOKENS - 1]), ("left", whole[-MAX_TOKENS + 1 : -1])):
        made = post(server, "/embed", inputs=long, truncate=True, truncation_direction=direction).json()
        np.testing.assert_allclose(made, [embedding([whole[0], *kept, whole[-1]])], rtol=1e-5, atol=1e-6)


def test_tei_normalizes_unless_told_not_to() -> None:
    service, dispatcher = embedder(normalized=False)
    dispatcher.compute = lambda payloads: [np.full(DIMENSIONS, 2, np.float32) for _ in payloads]
    with listening(service) as server:
        assert np.linalg.norm(post(server, "/embed", inputs="a").json()) == pytest.approx(1)
        assert post(server, "/embed", inputs="a", normalize=False).json() == [[2.0] * DIMENSIONS]


def test_tei_predict(server: Listening) -> None:
    def predict(inputs: Any, **more: Any) -> Any:
        return post(server, "/predict", inputs=inputs, model="classifier", **more).json()

    single = predict("fox")
    assert single[0]["label"] == "short"
    assert sum(each["score"] for each in single) == pytest.approx(1)
    assert [each["score"] for each in single] == sorted((each["score"] for each in single), reverse=True)
    assert predict(["fox", "hello"])[0]["label"] == "pair"
    batch = predict([["fox"], ["fox", "hello"], ["the quick brown fox " * 2]])
    assert [each[0]["label"] for each in batch] == ["short", "pair", "long"]
    number = len(ids_of("fox"))
    assert {each["score"] for each in predict("fox", raw_scores=True)} == {-9, 6 - number, number - 6}


def test_tei_info(server: Listening) -> None:
    assert httpx.get(f"{server.url}/info").status_code == 422  # of three, which?
    info = httpx.get(f"{server.url}/info", params={"model": "embedder"}).json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == MAX_TOKENS
    labels = httpx.get(f"{server.url}/info", params={"model": "classifier"}).json()["model_type"]["classifier"]
    assert labels["id2label"]["1"] == "long"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": "hello " * 100}, 413, "Validation"),
        ("/embed", {"inputs": ["a"] * 2049}, 413, "Validation"),
        ("/embed", {"inputs": ["a", [1]]}, 422, "Validation"),
        ("/embed", {"inputs": "a", "normalize": False}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": "what"}, 422, "Validation"),
        ("/embed", {"inputs": [[1]], "prompt_name": "query"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 99}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "model": "reranker"}, 424, "Backend"),
        ("/embed", {"inputs": "a", "what": 1}, 422, "Validation"),
        ("/predict", {"inputs": "a", "model": "embedder"}, 424, "Backend"),
        ("/predict", {"inputs": ["a", "b", "c"], "model": "classifier"}, 422, "Validation"),
        ("/predict", {"inputs": [["a"], "b"], "model": "classifier"}, 422, "Validation"),
        ("/predict", {"inputs": [[""]], "model": "classifier"}, 400, "Empty"),
        ("/predict", {"inputs": [], "model": "classifier"}, 400, "Empty"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_tei_errors(server: Listening, path: str, body: Any, status: int, kind: str) -> None:
    answer = post(server, path, **body)
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text
    assert set(answer.json()) == {"error", "error_type"}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("full", 2.5), 429, "Overloaded"),
        (Unavailable("it died"), 503, "Unhealthy"),
        (DeadlineExceeded("late"), 504, "Backend"),
        (RequestFailed("boom"), 424, "Backend"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tei_failures(error: Exception, status: int, kind: str) -> None:
    service, dispatcher = embedder()
    dispatcher.refusal = error
    with listening(service) as server:
        answer = post(server, "/embed", inputs="a")
        assert (answer.status_code, answer.json()) == (status, {"error": str(error), "error_type": kind})


@pytest.mark.parametrize("path", ["/embed", "/predict", "/rerank"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"texts": 5}'])
def test_rubbish_has_the_routes_shape(server: Listening, path: str, raw: bytes) -> None:
    answer = httpx.post(server.url + path, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert ("error_type" in answer.json()) == (path != "/rerank" or b"texts" in raw)
    wrong = httpx.get(server.url + path)
    assert wrong.status_code == 405
    assert ("error_type" in wrong.json()) == (path != "/rerank")


def test_a_long_query_is_not_tokenized_for_thousands(server: Listening) -> None:
    query, texts = "1 " * 5000, ["a"] * 900
    for path, field, body in (
        ("/v1/rerank", "query", {"model": "reranker", "query": query, "documents": texts}),
        ("/rerank", "query", {"query": query, "texts": texts}),
        ("/v1/score", "text_1", {"model": "reranker", "text_1": query, "text_2": texts}),
    ):
        answer = post(server, f"{path}?model=reranker" if path == "/rerank" else path, **body)
        # As TEI has it for what it can't take.
        assert answer.status_code == (422 if path == "/rerank" else 400)
        assert f"{field} has 10000 characters, which beside 900 others are more than" in answer.text

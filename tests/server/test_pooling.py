"""Scores, labels and vectors in vLLM's shapes."""

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.items_harness import (
    DIMENSIONS,
    Listening,
    adder,
    classifier,
    embedder,
    embedding,
    ids_of,
    listening,
    pair_of,
    relevance,
    reranker,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    with listening(reranker()[0], embedder()[0], classifier()[0], adder()[0]) as it:
        yield it


def post(server: Listening, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


def logit(first: str, second: str) -> float:
    return float(relevance(pair_of(first, second))[0])


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ("fox", "the fox", [("fox", "the fox")]),
        ("fox", ["the fox", "hello"], [("fox", "the fox"), ("fox", "hello")]),
        (["fox", "hello"], ["the fox", "hello"], [("fox", "the fox"), ("hello", "hello")]),
    ],
)
def test_scores_of_a_reranker(server: Listening, path: str, one: Any, other: Any, pairs: list[tuple[str, str]]) -> None:
    made = post(server, path, model="reranker", text_1=one, text_2=other).json()
    assert (made["object"], made["model"], made["id"][:6]) == ("list", "reranker", "score-")
    assert [(each["index"], each["object"]) for each in made["data"]] == [(i, "score") for i in range(len(pairs))]
    logits = np.array([logit(*pair) for pair in pairs])
    assert [each["score"] for each in made["data"]] == pytest.approx(1 / (1 + np.exp(-logits)))
    tokens = sum(len(pair_of(*pair).token_ids) for pair in pairs)
    assert made["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    raw = post(server, path, model="reranker", queries=one, documents=other, use_activation=False).json()
    assert [each["score"] for each in raw["data"]] == pytest.approx(logits)


def test_scores_of_an_embedder_are_cosines(server: Listening) -> None:
    made = post(server, "/v1/score", model="embedder", text_1="fox", text_2=["hello", "fox"]).json()
    wanted = [float(embedding(ids_of("fox")) @ embedding(ids_of(text))) for text in ("hello", "fox")]
    assert [each["score"] for each in made["data"]] == pytest.approx(wanted, abs=1e-6)


def test_labels(server: Listening) -> None:
    made = post(server, "/classify", model="classifier", input=["fox", "the quick brown fox " * 2]).json()
    assert [each["label"] for each in made["data"]] == ["short", "long"]
    assert all(each["num_classes"] == 3 and sum(each["probs"]) == pytest.approx(1) for each in made["data"])
    raw = post(server, "/classify", model="classifier", input="fox", activation=False).json()
    number = len(ids_of("fox"))
    assert raw["data"][0]["probs"] == [6 - number, number - 6, -9]


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_labels_of_which_any_number_may_hold_and_numbers_that_are_meant(activation: str) -> None:
    service, _ = classifier()
    assert service.info is not None
    service.info.activation = activation
    logits = np.array([6.0 - len(ids_of("fox")), len(ids_of("fox")) - 6.0, -9.0])
    wanted = logits if activation == "none" else 1 / (1 + np.exp(-logits))
    with listening(service) as it:
        made = post(it, "/classify", model="classifier", input="fox").json()
        assert made["data"][0]["probs"] == pytest.approx(wanted)
        tei = post(it, "/predict", inputs="fox").json()
        assert sorted(each["score"] for each in tei) == pytest.approx(sorted(wanted))


@pytest.mark.parametrize(("problem", "own"), [(None, "none"), ("none", None), (None, "sigmoid"), (None, None)])
def test_scores_by_a_rerankers_own_activation(problem: str | None, own: str | None) -> None:
    service, _ = reranker()
    assert service.info is not None
    service.info.activation, service.info.own_activation = problem, own
    logits = np.array([logit("fox", "the fox"), logit("fox", "hello")])
    probabilities = 1 / (1 + np.exp(-logits))
    wanted = logits if "none" in (problem, own) else probabilities
    with listening(service) as it:
        made = post(it, "/v1/score", text_1="fox", text_2=["the fox", "hello"]).json()
        assert [each["score"] for each in made["data"]] == pytest.approx(wanted)
        raw = post(it, "/v1/score", text_1="fox", text_2=["the fox", "hello"], activation=False).json()
        assert [each["score"] for each in raw["data"]] == pytest.approx(logits)
        ranked = post(it, "/v1/rerank", query="fox", documents=["the fox", "hello"]).json()["results"]
        assert [each["relevance_score"] for each in ranked] == pytest.approx(wanted)
        # As documented there, whatever the folder says.
        tei = post(it, "/rerank", query="fox", texts=["the fox", "hello"]).json()
        assert [each["score"] for each in tei] == pytest.approx(probabilities)
        tei = post(it, "/rerank", query="fox", texts=["the fox", "hello"], raw_scores=True).json()
        assert [each["score"] for each in tei] == pytest.approx(logits)


def test_labels_by_a_cross_encoders_own_activation() -> None:
    service, _ = classifier()
    assert service.info is not None
    service.info.own_activation = "none"
    with listening(service) as it:
        made = post(it, "/classify", model="classifier", input="fox").json()
        assert made["data"][0]["probs"] == [6 - len(ids_of("fox")), len(ids_of("fox")) - 6, -9]
        assert sum(each["score"] for each in post(it, "/predict", inputs="fox").json()) == pytest.approx(1)


def test_vectors(server: Listening) -> None:
    wanted = embedding(ids_of("fox"))

    def ask(**more: Any) -> Any:
        return post(server, "/pooling", model="embedder", input="fox", **more).json()["data"][0]

    assert ask()["object"] == "pooling"
    np.testing.assert_allclose(ask()["data"], wanted, rtol=1e-6)
    np.testing.assert_array_equal(np.frombuffer(b64decode(ask(encoding_format="base64")["data"]), "<f4"), wanted)
    assert len(ask(dimensions=3)["data"]) == 3
    tokens = [embedding([each]) for each in ids_of("fox")]
    np.testing.assert_allclose(ask(task="token_embed")["data"], tokens, rtol=1e-6)
    packed = np.frombuffer(b64decode(ask(task="token_embed", encoding_format="base64")["data"]), "<f4")
    np.testing.assert_array_equal(packed.reshape(-1, DIMENSIONS), tokens)
    probabilities = post(server, "/pooling", model="classifier", input=[ids_of("fox")]).json()["data"][0]["data"]
    assert sum(probabilities) == pytest.approx(1)


def test_texts_are_cut_where_that_is_asked_for(server: Listening) -> None:
    for path, model in (("/classify", "classifier"), ("/pooling", "embedder")):
        body = {"model": model, "input": "fox " * 60}
        refused = post(server, path, **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert post(server, path, **body, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 40
    long = {"model": "embedder", "text_1": ["fox", "a"], "text_2": ["fox", "fox " * 60]}
    assert post(server, "/v1/score", **long).json()["error"]["param"] == "text_2"
    assert post(server, "/v1/score", **long).json()["error"]["message"].startswith("text_2[1]: ")
    long = {"model": "embedder", "queries": "fox " * 60, "text_2": ["fox", "fox"]}
    assert post(server, "/v1/score", **long).json()["error"]["param"] == "queries"
    pair = {"model": "reranker", "text_1": "fox", "text_2": "fox " * 60}
    assert post(server, "/v1/score", **pair).status_code == 400
    assert post(server, "/v1/score", **pair, truncate_prompt_tokens=20).json()["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "documents": [""]}, "documents"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "adder"}, "model"),
        ("/classify", {"input": [], "model": "classifier"}, "input"),
        ("/classify", {"input": "a", "model": "classifier", "what": 1}, "what"),
        ("/classify", {"input": "a", "model": "embedder"}, "model"),
        ("/pooling", {"input": "a", "model": "embedder", "task": "classify"}, "task"),
        ("/pooling", {"input": "a", "model": "classifier", "task": "token_embed"}, "task"),
        ("/pooling", {"input": "a", "model": "embedder", "dimensions": 9}, "dimensions"),
        ("/pooling", {"input": "a", "model": "classifier", "dimensions": 1}, "dimensions"),
        ("/pooling", {"input": "a", "model": "embedder", "task": "token_embed", "dimensions": 2}, "dimensions"),
        ("/pooling", {"input": "a", "model": "embedder", "encoding_format": "x"}, "encoding_format"),
        ("/pooling", {"input": "a", "model": "embedder", "use_activation": False}, "use_activation"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "embedder", "activation": False}, "activation"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_values_are_refused_by_name(server: Listening, path: str, body: dict[str, Any], param: str) -> None:
    refused = post(server, path, **({"model": "reranker"} | body))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text

"""TEI's smaller routes, and what Hugging Face's own client sends."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.items_harness import (
    DIMENSIONS,
    MAX_TOKENS,
    Listening,
    classifier,
    embedder,
    embedding,
    encoder,
    function,
    ids_of,
    listening,
    reranker,
    threads_of,
)

from chairlift import __version__
from chairlift.errors import InvalidRequest
from chairlift.runners.items import ItemInfo
from chairlift.server.http import exchange
from chairlift.server.http.exchange import INLINE_SIZE
from chairlift.server.items import embeddings, pooling, tei, texts
from chairlift.server.models.item_host import about_of
from chairlift.text import encoding


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    with listening(reranker()[0], embedder()[0], classifier()[0], function()[0]) as it:
        yield it


def post(server: Listening, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


def test_parameters_of_a_prediction(server: Listening) -> None:
    def predict(**parameters: Any) -> Any:
        return post(server, "/predict", inputs="fox", model="classifier", parameters=parameters).json()

    logits = np.array([each["score"] for each in predict(function_to_apply="none")])
    assert sorted(logits) == sorted([-9, *(sign * (6 - len(ids_of("fox"))) for sign in (1, -1))])
    assert [each["score"] for each in predict(function_to_apply="sigmoid")] == pytest.approx(1 / (1 + np.exp(-logits)))
    assert [each["score"] for each in predict()] == pytest.approx(np.exp(logits) / np.exp(logits).sum())
    assert predict(function_to_apply="softmax") == predict()
    assert predict(top_k=1) == predict()[:1]
    for parameters, field in (({"top_k": 0}, "top_k"), ({"function_to_apply": "x"}, "'x'"), ({"what": 1}, "what")):
        refused = post(server, "/predict", inputs="fox", model="classifier", parameters=parameters)
        assert (refused.status_code, field in refused.json()["error"]) == (422, True), refused.text


def test_hugging_faces_client_classifies_and_embeds() -> None:
    hub = pytest.importorskip("huggingface_hub")
    with listening(classifier()[0]) as alone:
        found = hub.InferenceClient(f"{alone.url}/predict").text_classification("fox", top_k=2)
        # It takes the first of what comes, and TEI has no list around that.
        assert found.label in ("short", "long")
    with listening(embedder()[0]) as alone:
        vectors = hub.InferenceClient(f"{alone.url}/embed").feature_extraction("fox", normalize=True)
        np.testing.assert_allclose(vectors[0], embedding(ids_of("fox")), rtol=1e-6)


def test_the_root_does_what_the_model_is_for(server: Listening) -> None:
    assert np.shape(post(server, "/", inputs=["fox", "hello"], model="embedder").json()) == (2, DIMENSIONS)
    assert post(server, "/", inputs="fox", model="classifier").json()[0]["label"] in ("short", "long")
    ranks = post(server, "/", query="fox", texts=["hello", "the fox"], model="reranker").json()
    assert [rank["index"] for rank in ranks] == [1, 0]
    assert post(server, "/", inputs="fox").json()["error_type"] == "Validation"
    assert post(server, "/", inputs="fox", model="function").status_code == 424
    assert httpx.post(server.url, content=b"[]", headers={"content-type": "application/json"}).status_code == 422


def test_the_server_shows_life_where_clients_look(server: Listening) -> None:
    for path in ("/", "/ping", "/health"):
        assert httpx.get(server.url + path).status_code == 200
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/ping", "/version"])
def test_probes_bring_no_key(path: str) -> None:
    with listening(embedder()[0], api_key="secret") as server:
        assert httpx.get(server.url + path).status_code == 200
        assert httpx.get(server.url).status_code == 401


def test_the_start_line_says_what_bfloat16_costs() -> None:
    info = ItemInfo(task="embed", device="cpu", dtype="bfloat16", ops="native")
    assert "0.99996" in about_of(info, asked=False)
    assert about_of(info, asked=True) == "bfloat16 on cpu, native operations"
    assert "0.99996" not in about_of(ItemInfo(task="rerank", device="cpu", dtype="bfloat16"), asked=False)
    assert "0.99996" not in about_of(ItemInfo(task="embed", device="cpu", dtype="float32"), asked=False)


def test_embeddings_of_all_tokens(server: Listening) -> None:
    made = post(server, "/embed_all", inputs=["fox", "the quick fox"], model="embedder").json()
    for text, rows in zip(("fox", "the quick fox"), made, strict=True):
        np.testing.assert_allclose(rows, [embedding([each]) for each in ids_of(text)], rtol=1e-6)
    (prompted,) = post(server, "/embed_all", inputs="fox", prompt_name="query", model="embedder").json()
    assert len(prompted) == len(ids_of("hello fox"))
    assert post(server, "/embed_all", inputs=[[1, 2]], model="embedder").status_code == 200
    assert post(server, "/embed_all", inputs="fox", model="classifier").status_code == 424


def test_embeddings_of_all_tokens_are_bounded(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 100)
    refused = post(server, "/embed_all", inputs=["the quick brown fox"] * 3, model="embedder")
    assert (refused.status_code, "more than 100 numbers" in refused.text) == (413, True)
    service, _ = embedder()
    assert service.info is not None
    # What a Dense module makes of a text says nothing of its tokens.
    service.info.dimensions, service.info.hidden_size = 1, 60
    with listening(service) as alone:
        assert "2 tokens of 60 numbers" in post(alone, "/embed_all", inputs=[[1, 2]]).text
        assert post(alone, "/embed_all", inputs=[1]).status_code == 200


def test_large_answers_are_written_beside_the_loop(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of(monkeypatch, (tei, "_words"), (tei, "_predictions"), (pooling, "_labelled"))
    monkeypatch.setattr(exchange, "INLINE_SIZE", 2)
    service, _ = embedder("splade")
    assert service.info is not None
    service.info.pooling = "splade"
    with listening(service) as alone:
        assert post(alone, "/embed_sparse", inputs="fox").status_code == 200
    assert post(server, "/predict", inputs="fox", model="classifier").status_code == 200
    assert post(server, "/classify", input="fox", model="classifier").status_code == 200
    assert len(threads) == 3
    assert all(name.startswith("asyncio_") for name in threads)


def test_what_is_too_long_is_called_by_its_name(server: Listening) -> None:
    long = "fox " * MAX_TOKENS
    inputs = {"source_sentence": "fox", "sentences": ["fox", long]}
    assert "inputs.sentences[1]: " in post(server, "/similarity", inputs=inputs, model="embedder").text
    inputs = {"source_sentence": long, "sentences": ["fox"]}
    assert "inputs.source_sentence: " in post(server, "/similarity", inputs=inputs, model="embedder").text
    mixed = [["fox", "fox"], ["fox"], [long], ["fox", long]]
    assert "inputs[2]: " in post(server, "/predict", inputs=mixed, model="classifier").text
    assert "inputs[2]: " in post(server, "/predict", inputs=[*mixed[:2], mixed[3]], model="classifier").text


def test_sparse_embeddings(server: Listening) -> None:
    service, dispatcher = embedder("splade")
    assert service.info is not None
    service.info.pooling = "splade"
    dispatcher.compute = lambda payloads: [np.array([0, 0.5, 0, 2], dtype=np.float32) for _ in payloads]
    with listening(service) as alone:
        made = post(alone, "/embed_sparse", inputs=["fox", "hello"]).json()
        assert made == [[{"index": 1, "value": 0.5}, {"index": 3, "value": 2.0}]] * 2
        many = post(alone, "/embed_sparse", inputs=["fox"] * 513)
        assert (many.status_code, "more than the 512" in many.text) == (413, True)
        for path, name in (("/embed", "inputs"), ("/v1/embeddings", "input"), ("/pooling", "input")):
            dense = post(alone, path, **{name: "fox"})
            assert (dense.status_code, "/embed_sparse" in dense.text) == (424 if path == "/embed" else 400, True)
    refused = post(server, "/embed_sparse", inputs="fox", model="embedder")
    assert (refused.status_code, "no SPLADE model" in refused.text) == (424, True)


def test_similarity(server: Listening) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def cosine(one: str, other: str) -> float:
        return float(embedding(ids_of(one)) @ embedding(ids_of(other)))

    inputs = {"source_sentence": "fox", "sentences": ["hello", "fox"]}
    assert post(server, "/similarity", inputs=inputs, model="embedder").json() == pytest.approx(
        [cosine("fox", "hello"), 1], abs=1e-6
    )
    how = {"prompt_name": "query", "truncate": True, "truncation_direction": "Left"}
    made = post(server, "/similarity", inputs=inputs, parameters=how, model="embedder").json()
    assert made[0] == pytest.approx(cosine("hello fox", "hello hello"), abs=1e-6)
    with listening(embedder()[0]) as alone:
        client = hub.InferenceClient(f"{alone.url}/similarity")
        assert client.sentence_similarity("fox", ["hello"]) == pytest.approx([cosine("fox", "hello")], abs=1e-6)
    for wrong in ({"source_sentence": "", "sentences": ["a"]}, {"source_sentence": "a", "sentences": []}):
        refused = post(server, "/similarity", inputs=wrong, model="embedder")
        assert (refused.status_code, refused.json()["error_type"]) == (400, "Empty")
    assert post(server, "/similarity", inputs="fox", model="embedder").status_code == 422


@pytest.mark.parametrize("text", ["the naïve fox", "fox <|end|> fox"])
def test_tokens_and_texts(server: Listening, text: str) -> None:
    (tokens,) = post(server, "/tokenize", inputs=text, model="embedder").json()
    assert [token["id"] for token in tokens] == ids_of(text)
    first, *middle, last = tokens
    assert (first["text"], first["special"], first["start"]) == ("<s>", True, None)
    assert (last["text"], last["special"], last["stop"]) == ("<|end|>", True, None)
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in middle)
    assert "".join(token["text"] for token in middle) == text.replace(" ", "")
    bare = post(server, "/tokenize", inputs=[text], add_special_tokens=False, model="embedder").json()
    assert bare == [middle]
    (prompted,) = post(server, "/tokenize", inputs="fox", prompt_name="query", model="embedder").json()
    assert [token["id"] for token in prompted] == ids_of("hello fox")
    ids = ids_of("the quick fox")
    assert post(server, "/decode", ids=ids, model="embedder").json() == ["the quick fox"]
    both = post(server, "/decode", ids=[ids, ids[1:2]], skip_special_tokens=False, model="embedder").json()
    assert both == ["<s> the quick fox <|end|>", "the"]


def test_many_ids_are_decoded_beside_the_loop(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, threads = encoding.TextEncoder.decode, []

    def watched(*given: Any) -> str:
        threads.append(threading.get_ident())
        return plain(*given)

    monkeypatch.setattr(encoding.TextEncoder, "decode", watched)
    few, many = ids_of("fox")[1:2], ids_of("fox")[1:2] * (INLINE_SIZE // 2)
    assert post(server, "/decode", ids=few, model="embedder").json() == ["fox"]
    (text, _, _) = post(server, "/decode", ids=[many] * 3, model="embedder").json()
    assert text.split() == ["fox"] * len(many)
    assert threads[1:] == [threads[1]] * 3
    assert threads[1] != threads[0]


def test_the_ids_that_are_decoded_are_bounded_and_their_texts_written_beside_the_loop(
    server: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch, (tei, "as_json"))
    monkeypatch.setattr(exchange, "INLINE_SIZE", 5)
    monkeypatch.setattr(tei, "MAX_TOKENS_TOLD", 6)
    fox = ids_of("fox")[1]
    for ids, status in (([fox] * 6, 200), ([[fox] * 3] * 2, 200), ([fox] * 7, 413), ([[fox] * 4] * 2, 413)):
        answer = post(server, "/decode", ids=ids, model="embedder")
        assert (answer.status_code, "more than 6" in answer.text) == (status, status == 413), answer.text
    assert [name.startswith("asyncio_") for name in threads] == [True, True]


def test_ids_are_counted_before_they_are_looked_at(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of(monkeypatch, (texts, "are_ids"))
    monkeypatch.setattr(exchange, "INLINE_SIZE", 2)
    for wrong in (10**6, "a"):
        ids = [1] * MAX_TOKENS + [wrong]
        for path, name, status in (("/embed", "inputs", 413), ("/v1/embeddings", "input", 400)):
            refused = post(server, path, **{name: ids}, model="embedder")
            assert (refused.status_code, f"has {len(ids)} tokens" in refused.text) == (status, True), refused.text
    assert not threads
    cut = post(server, "/embed", inputs=ids, truncate=True, model="embedder")
    assert (cut.status_code, "not a mixture" in cut.text) == (422, True)
    assert post(server, "/embed", inputs=[1] * 99, truncate=True, model="embedder").status_code == 200
    assert [name.startswith("asyncio_") for name in threads] == [True, True]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"inputs": ""}, 400),
        ("/tokenize", {"inputs": []}, 400),
        ("/tokenize", {"inputs": ["a"] * 2049}, 413),
        ("/tokenize", {"inputs": "a", "prompt_name": "what"}, 422),
        ("/tokenize", {"inputs": "a", "what": 1}, 422),
        ("/decode", {"ids": []}, 400),
        ("/decode", {"ids": [[]]}, 400),
        ("/decode", {"ids": [1, [2]]}, 422),
        ("/decode", {"ids": [-1]}, 422),
        ("/decode", {"ids": [10**6]}, 422),
        ("/decode", {"ids": "x"}, 422),
        ("/embed_all", {"inputs": []}, 400),
        ("/embed_all", {"inputs": [1, "a"]}, 422),
        ("/embed_all", {"inputs": [1, [2]]}, 422),
        ("/embed_all", {"inputs": [[1], []]}, 400),
        ("/embed_all", {"inputs": "fox " * MAX_TOKENS}, 413),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_as_tei_does(server: Listening, path: str, body: Any, status: int) -> None:
    refused = post(server, path, **body, model="embedder")
    assert (refused.status_code, set(refused.json())) == (status, {"error", "error_type"}), refused.text


def test_tokens_told_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_TOKENS_TOLD", 6)
    assert len(encoder().tokens(["fox", "fox"])) == 2
    with pytest.raises(InvalidRequest, match="more than 6"):
        encoder().tokens(["fox", "fox fox"])
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        encoder().tokens(["\ud800"])

"""TEI's smaller routes, and what Hugging Face's own client sends."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.items_harness import (
    DIMENSIONS,
    Listening,
    classifier,
    embedder,
    embedding,
    function,
    ids_of,
    listening,
    reranker,
)

from chairlift import __version__
from chairlift.runners.items import ItemInfo
from chairlift.server.models.item_host import about_of


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

"""Real clients on real models in worker processes: a Python class, one that streams, an ONNX file and an encoder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.encoder_factory import encoder_folder
from support.items_harness import Listening, in_worker, listening
from support.text_tokenizers import build

from chairlift.config.items import ItemConfig
from chairlift.text.encoding import TextEncoder

onnx_models = pytest.importorskip("support.onnx_models")
MODELS = Path(__file__).parents[1] / "support" / "worker_models.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    folder = tmp_path_factory.mktemp("models")
    build("wordpiece").save(str(folder / "tokenizer.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(MODELS.parents[2]))
        services = [
            in_worker("doubles", ItemConfig(model=f"{MODELS}:Doubles")),
            in_worker("counts", ItemConfig(model=f"{MODELS}:Counts")),
            in_worker("linear", ItemConfig(model=onnx_models.linear(folder / "linear.onnx"))),
            in_worker("bert", ItemConfig(model=str(encoder_folder("bert"))), TextEncoder(folder, 32)),
        ]
        with listening(*services, grpc=True) as it:
            yield it


def test_python_class(server: Listening) -> None:
    url = f"{server.url}/v1/models/doubles:predict"
    assert httpx.post(url, json={"instances": [1, 2.5, "ab"]}).json() == {"predictions": [2, 5.0, "abab"]}
    poisoned = httpx.post(url, json={"instances": ["poison"]})
    assert (poisoned.status_code, "poisoned" in poisoned.json()["error"]) == (500, True)


def test_streaming_class(server: Listening) -> None:
    url = f"{server.url}/v1/models/counts:predict"
    lines = httpx.post(url, json={"instances": [3]}, headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert [json.loads(line)["part"][0] for line in lines] == [0, 1, 2]
    broken = httpx.post(url, json={"instances": [5, -2]}, headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert "broke" in json.loads(broken[-1])["error"]


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_triton_clients_on_onnx(server: Listening, kind: str) -> None:
    module = pytest.importorskip(f"tritonclient.{kind}")
    port = server.port if kind == "http" else server.grpc_port
    client: Any = module.InferenceServerClient(f"127.0.0.1:{port}")
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    tensor = module.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    np.testing.assert_allclose(client.infer("linear", [tensor]).as_numpy("y"), x @ onnx_models.WEIGHT)
    assert client.is_model_ready("linear")
    client.close()


def test_openai_client_on_an_encoder(server: Listening) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    texts = ["hello world", "the quick brown fox", "hello world"]
    made = client.embeddings.create(model="bert", input=texts)
    vectors = np.array([each.embedding for each in made.data])
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[0], vectors[2], rtol=1e-4, atol=1e-5)
    assert not np.allclose(vectors[0], vectors[1], atol=1e-3)
    plain = client.embeddings.create(model="bert", input=texts, encoding_format="float")
    np.testing.assert_allclose(np.array([each.embedding for each in plain.data]), vectors, rtol=1e-4, atol=1e-5)
    client.close()

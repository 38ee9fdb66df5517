"""Real clients on real models in worker processes: a Python class, one that streams, an ONNX file and an encoder."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
from support.serve_process import Server


@pytest.fixture
def server(models_server: Server) -> Server:
    return models_server


def test_python_class(server: Server) -> None:
    url = f"{server.url}/v1/models/doubles:predict"
    assert httpx.post(url, json={"instances": [1, 2.5, "ab"]}).json() == {"predictions": [2, 5.0, "abab"]}
    poisoned = httpx.post(url, json={"instances": ["poison"]})
    assert (poisoned.status_code, "poisoned" in poisoned.json()["error"]) == (500, True)


def test_streaming_class(server: Server) -> None:
    url = f"{server.url}/v1/models/counts:predict"
    lines = httpx.post(url, json={"instances": [3]}, headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert [json.loads(line)["part"][0] for line in lines] == [0, 1, 2]
    broken = httpx.post(url, json={"instances": [5, -2]}, headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert "broke" in json.loads(broken[-1])["error"]


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_triton_clients_on_onnx(server: Server, kind: str) -> None:
    from support.onnx_models import WEIGHT

    module = pytest.importorskip(f"tritonclient.{kind}")
    port = server.port if kind == "http" else server.grpc_port
    client: Any = module.InferenceServerClient(f"127.0.0.1:{port}")
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    tensor = module.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    np.testing.assert_allclose(client.infer("linear", [tensor]).as_numpy("y"), x @ WEIGHT)
    assert client.is_model_ready("linear")
    client.close()


def test_openai_client_on_an_encoder(server: Server) -> None:
    texts = ["hello world", "the quick brown fox", "hello world"]
    made = server.openai.embeddings.create(model="bert", input=texts)
    vectors = np.array([each.embedding for each in made.data])
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[0], vectors[2], rtol=1e-4, atol=1e-5)
    assert not np.allclose(vectors[0], vectors[1], atol=1e-3)
    plain = server.openai.embeddings.create(model="bert", input=texts, encoding_format="float")
    np.testing.assert_allclose(np.array([each.embedding for each in plain.data]), vectors, rtol=1e-4, atol=1e-5)

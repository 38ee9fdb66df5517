"""OIP v2 over HTTP by Triton's client, KServe v1's predict, and what both refuse."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from support.items_harness import (
    Listening,
    LocalDispatcher,
    adder,
    classifier,
    embedder,
    embedding,
    function,
    ids_of,
    listening,
    pair_of,
    relevance,
    reranker,
    threads_of,
)
from support.oip_tensors import WORDS, Shelf, check, tensors
from support.server_harness import Front

from chairlift.errors import DeadlineExceeded, InvalidRequest, QueueFull, RequestFailed, Unavailable
from chairlift.runners.items import ItemInfo, TensorSpec
from chairlift.server.http.exchange import INLINE_SIZE
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models
from chairlift.server.oip import http_routes, tensor_items
from chairlift.server.oip.statistics import model_config
from chairlift.server.oip.tensor_items import bare_input

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    models = (adder()[0], embedder()[0], reranker()[0], classifier()[0], function()[0])
    with listening(*models, model_control=True) as it:
        yield it


@pytest.fixture
def triton(server: Listening) -> Iterator[Any]:
    yield from client_of(server)


def client_of(server: Listening) -> Iterator[Any]:
    http = pytest.importorskip("tritonclient.http")
    client = http.InferenceServerClient(server.url.removeprefix("http://"))
    yield client
    client.close()


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_triton_client_infers(triton: Any, binary_in: bool, binary_out: bool | None) -> None:
    http = pytest.importorskip("tritonclient.http")
    outputs = None
    if binary_out is not None:
        outputs = [http.InferRequestedOutput(name, binary_data=binary_out) for name in ("loud", "mean", "sum")]
    result = triton.infer("adder", tensors(http, binary_in), outputs=outputs, request_id="my id", model_version="1")
    check(result)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("my id", "adder", "1")
    assert [output["shape"] for output in response["outputs"] if output["name"] == "sum"] == [[2, 3]]


def test_one_value_an_item_may_have_two_dimensions(triton: Any) -> None:
    http = pytest.importorskip("tritonclient.http")
    check(triton.infer("adder", tensors(http, True, WORDS.reshape(2, 1))))


def test_items_are_batched_one_by_one_and_bound_to_terms() -> None:
    http = pytest.importorskip("tritonclient.http")
    service, dispatcher = adder()
    with listening(service) as server:
        for triton in client_of(server):
            triton.infer("adder", tensors(http, True), priority=3, timeout=2_500_000)
            triton.infer("adder", tensors(http, True), priority=1, headers={"X-Request-Timeout-Ms": "100"})
        first, _, third, _ = dispatcher.submitted
        assert dispatcher.batches == [2, 2]
        assert (first["priority"], first["timeout"]) == (2, 2.5)
        assert (third["priority"], third["timeout"]) == (0, 0.1)
        assert first["payload"]["a"].shape == (3,)
        assert first["payload"]["word"].shape == ()
        assert first["shape_key"] == (("a", (3,)), ("b", (3,)), ("word", ()))


def test_metadata_and_health(triton: Any) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("adder")
    assert triton.is_model_ready("adder", "1")
    assert not triton.is_model_ready("nothing")
    about = triton.get_server_metadata()
    assert about["name"] == "chairlift"
    assert "binary_tensor_data" in about["extensions"]
    model = triton.get_model_metadata("adder")
    assert model["versions"] == ["1"]
    assert model["inputs"][0] == {"name": "a", "datatype": "FP32", "shape": [-1, -1]}
    assert model["inputs"][2] == {"name": "word", "datatype": "BYTES", "shape": [-1]}
    assert [output["name"] for output in model["outputs"]] == ["sum", "mean", "loud"]
    embed = triton.get_model_metadata("embedder", "1")
    assert embed["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert embed["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, 8]}]


def test_what_kserves_client_reads(server: Listening) -> None:
    for path, name in (
        ("/v2/health/live", "live"),
        ("/v2/health/ready", "ready"),
        ("/v2/models/adder/ready", "ready"),
        ("/v2/models/adder/versions/1/ready", "ready"),
        ("/v1/models/adder", "ready"),
    ):
        answer = httpx.get(server.url + path)
        assert (answer.status_code, answer.json()[name]) == (200, True)
    assert httpx.get(f"{server.url}/v1/models/adder").json()["name"] == "adder"


@pytest.mark.parametrize("path", ["/v2/models/adder/nothing", "/v2/models/adder/versions/1/what", "/v1/models/adder/x"])
def test_a_route_that_there_is_not_is_no_model(server: Listening, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 404
    assert f"there is no {path} here" in answer.text
    missing = httpx.get(server.url + path.replace("adder", "other"))
    assert (missing.status_code, "does not exist" in missing.text) == (404, True)


def test_parameters_of_the_clients_own_change_nothing(triton: Any, server: Listening) -> None:
    http = pytest.importorskip("tritonclient.http")
    check(triton.infer("adder", tensors(http, True), parameters={"trace": "a", "n": 3, "flag": True, "x": 0.5}))
    inputs = [each | {"parameters": {"content_type": "np"}} for each in BODY["inputs"]]
    outputs = [{"name": "sum", "parameters": {"note": "x", "classification": 0}}]
    answer = httpx.post(f"{server.url}/v2/models/adder/infer", json={"inputs": inputs, "outputs": outputs[:0]})
    assert [output["name"] for output in answer.json()["outputs"]] == ["sum", "mean", "loud"], "none named means all"
    for parameters, word in (
        ({str(i): 1 for i in range(65)}, "more than 64"),
        ({"x": "y" * 5000}, "'x' must be"),
        ({"x": [1]}, "'x' must be"),
        ({"triton_x": 1}, "'triton_x' is not supported"),
        ({"sequence_id": "a"}, "'sequence_id' is not supported"),
    ):
        refused = httpx.post(f"{server.url}/v2/models/adder/infer", json=BODY | {"parameters": parameters})
        assert (refused.status_code, word in refused.text) == (400, True), refused.text
    refused = httpx.post(f"{server.url}/v2/models/adder/infer", json=BODY | {"outputs": outputs})
    assert "'classification' is not supported" in refused.text


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_tritons_client_may_compress(triton: Any, how: str) -> None:
    http = pytest.importorskip("tritonclient.http")
    for binary in (True, False):
        more = {"request_compression_algorithm": how, "response_compression_algorithm": how}
        check(triton.infer("adder", tensors(http, binary), **more))


def image(size: int) -> tuple[ItemService, LocalDispatcher]:
    """The mean of an image of so many pixels a side."""
    info = ItemInfo(
        task="tensors",
        device="cpu",
        dtype="",
        inputs=(TensorSpec("pixels", "FP32", (3, size, size)),),
        outputs=(TensorSpec("mean", "FP32", ()),),
    )
    dispatcher = LocalDispatcher(lambda payloads: [{"mean": each["pixels"].mean()} for each in payloads])
    return ItemService("image", dispatcher, info=info), dispatcher


def test_images_fit_by_default_and_no_limit_of_texts_grows() -> None:
    http = pytest.importorskip("tritonclient.http")
    pixels = np.random.default_rng(0).random((16, 3, 224, 224), dtype=np.float32)
    with listening(image(224)[0], function()[0]) as server:
        for triton in client_of(server):
            tensor = http.InferInput("pixels", pixels.shape, "FP32")
            tensor.set_data_from_numpy(pixels)
            means = triton.infer("image", [tensor]).as_numpy("mean")
        np.testing.assert_allclose(means, pixels.mean(axis=(1, 2, 3)), rtol=1e-5)
        body = b'{"instances": %b}' % msgspec.json.encode([{"pixels": each} for each in pixels[:4].tolist()])
        assert len(body) > 2**23
        made = httpx.post(f"{server.url}/v1/models/image:predict", content=body, headers=JSON, timeout=60)
        np.testing.assert_allclose(made.json()["predictions"], pixels[:4].mean(axis=(1, 2, 3)), rtol=1e-5)
        text = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON)
        assert (text.status_code, "4194304 bytes (max_body_bytes)" in text.text) == (413, True)
    with listening(image(2)[0], max_tensor_bytes=1000) as server:
        for path in ("/v1/models/image:predict", "/v2/models/image/infer"):
            refused = httpx.post(server.url + path, content=b" " * 1001, headers=JSON)
            assert (refused.status_code, "1000 bytes (max_tensor_bytes)" in refused.text) == (413, True)
    with listening(embedder()[0], max_body_bytes=1000) as server:
        for path in ("/v1/models/embedder:predict", "/v2/models/embedder/infer"):
            refused = httpx.post(server.url + path, content=b" " * 1001, headers=JSON)
            assert (refused.status_code, "1000 bytes (max_body_bytes)" in refused.text) == (413, True)


def test_lists_and_objects_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_items, "_MOST_LISTS", 10)
    with listening(function()[0]) as server:

        def predict(*instances: Any, headers: Any = None) -> httpx.Response:
            url = f"{server.url}/v1/models/function:predict"
            return httpx.post(url, json={"instances": instances}, headers=headers)

        def infer(document: str) -> httpx.Response:
            tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [document]}
            return httpx.post(f"{server.url}/v2/models/function/infer", json={"inputs": [tensor]})

        for headers in ({}, {"Sec-Fetch-Site": "same-origin"}):
            refused = predict(*[[]] * 9, headers=headers)
            assert (refused.status_code, "more than 10 lists and objects" in refused.text) == (400, True)
            assert predict(*[[]] * 8, headers=headers).status_code == 200
            assert predict("[" * 20, '"\\"[{' * 9, "\\[" * 20, headers=headers).status_code == 200
        for body in (b'{"instances": [' + b"[" * 20, b'{"instances": ["' + b'\\"[' * 20 + b"[" * 20):
            answer = httpx.post(f"{server.url}/v1/models/function:predict", content=body, headers=JSON)
            assert answer.status_code == 400
        assert infer('"[[[[[[[[[["').status_code == 200
        assert infer("[[[[[[]]]]]]").status_code == 200
        refused = infer("[" + "[]," * 10 + "[]]")
        assert (refused.status_code, "input 'input' has more than 10" in refused.text) == (400, True)


def test_long_documents_are_written_beside_the_loop(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of(monkeypatch, (http_routes, "_write"))
    for size in (10, INLINE_SIZE):
        tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [f'"{"a" * size}"']}
        made = httpx.post(f"{server.url}/v2/models/function/infer", json={"inputs": [tensor]}).json()
        assert made["outputs"][0]["data"] == [f'"{"a" * 2 * size}"']
    assert [name.startswith("asyncio_") for name in threads] == [False, True]


def test_answers_of_texts_are_bounded(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_items, "MAX_NUMBERS", 16)
    for number, status in ((2, 200), (3, 400)):
        tensor = {"name": "text", "datatype": "BYTES", "shape": [number], "data": ["fox"] * number}
        for path, body in (
            ("/v2/models/embedder/infer", {"inputs": [tensor]}),
            ("/v1/models/embedder:predict", {"instances": ["fox"] * number}),
        ):
            answer = httpx.post(server.url + path, json=body)
            assert (answer.status_code, "more than 16 numbers" in answer.text) == (status, status == 400)


def test_a_body_may_be_one_inputs_bytes_alone(server: Listening) -> None:
    def send(to: Listening, model: str, raw: bytes) -> httpx.Response:
        headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
        return httpx.post(f"{to.url}/v2/models/{model}/infer", content=raw, headers=headers)

    http = pytest.importorskip("tritonclient.http")
    answer = send(server, "embedder", "the naïve fox".encode())
    result = http.InferResult.from_response_body(
        answer.content, header_length=int(answer.headers["inference-header-content-length"])
    )
    np.testing.assert_array_equal(result.as_numpy("embedding")[0], embedding(ids_of("the naïve fox")))
    assert b'"twice"' in send(server, "function", b'{"x": 2}').content
    assert "this one has 3" in send(server, "adder", b"1234").text
    assert send(server, "embedder", b"\xff").status_code == 400
    with listening(image(-1)[0]) as images:
        assert "several lengths that are open" in send(images, "image", bytes(48)).text


@pytest.mark.parametrize(("shape", "size"), [((3, 2, 2), 12), ((-1, 2), 12), ((-1,), 3), ((), 1), ((0, -1), 0)])
def test_bytes_alone_have_the_shape_that_fits(shape: tuple[int, ...], size: int) -> None:
    info = ItemInfo(task="tensors", device="cpu", dtype="", inputs=(TensorSpec("x", "FP32", shape),))
    array = bare_input(info, bytes(4 * size))["x"]
    assert (array.size, array.shape[0], array.ndim) == (size, 1, len(shape) + 1)
    with pytest.raises(InvalidRequest, match="'x' needs"):
        bare_input(info, bytes(4 * size + 1))


def test_configurations(triton: Any, server: Listening) -> None:
    config = triton.get_model_config("adder")
    assert (config["name"], config["max_batch_size"]) == ("adder", 32)
    assert config["input"] == [
        {"name": "a", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "b", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "word", "data_type": "TYPE_STRING", "dims": [1]},
    ]
    assert config["dynamic_batching"] == {"preferred_batch_size": [32], "max_queue_delay_microseconds": 0}
    assert triton.get_model_config("adder", "1") == config
    whole = ItemInfo(task="tensors", device="", dtype="", batch_axis=False)
    dispatcher = LocalDispatcher(lambda payloads: payloads)
    about = model_config(ItemService("whole", dispatcher, info=whole))
    assert (about["max_batch_size"], "dynamic_batching" in about) == (0, False)


def test_statistics() -> None:
    http = pytest.importorskip("tritonclient.http")
    service, dispatcher = adder()
    with listening(service, function()[0]) as server:
        for triton in client_of(server):
            before = triton.get_inference_statistics("adder")["model_stats"][0]
            assert (before["last_inference"], before["inference_count"], before["batch_stats"]) == (0, 0, [])
            for _ in range(3):
                triton.infer("adder", tensors(http, True))
            dispatcher.refusal = QueueFull("full", 1)
            for utils in [pytest.importorskip("tritonclient.utils")]:
                with pytest.raises(utils.InferenceServerException):
                    triton.infer("adder", tensors(http, True))
            (after,) = triton.get_inference_statistics("adder", "1")["model_stats"]
            assert (after["inference_count"], after["execution_count"]) == (6, 3)
            found = after["inference_stats"]
            assert (found["success"]["count"], found["fail"]["count"], found["queue"]["count"]) == (3, 1, 3)
            assert found["compute_infer"]["ns"] == 3 * 2_000_000
            assert found["success"]["ns"] >= found["compute_infer"]["ns"] + found["queue"]["ns"] - 1
            (batch,) = after["batch_stats"]
            assert (batch["batch_size"], batch["compute_infer"]["count"]) == (2, 3)
            assert after["last_inference"] > 1_600_000_000_000
            names = [each["name"] for each in triton.get_inference_statistics()["model_stats"]]
            assert names == ["adder", "function"]
        assert httpx.get(f"{server.url}/v2/models/other/stats").status_code == 404
        assert httpx.get(f"{server.url}/v2/models/adder/versions/9/stats").status_code == 404


def test_bfloat16_goes_in_as_float32(server: Listening) -> None:
    exact = np.array([[0.5, -3.0, 2.0**100]], dtype=np.float32)
    halves = (exact.view(np.uint32) >> 16).astype("<u2").tobytes()
    about: list[dict[str, Any]] = [
        {"name": name, "shape": [1, 3], "datatype": "BF16", "parameters": {"binary_data_size": 6}}
        for name in ("a", "b")
    ]
    header = msgspec.json.encode(
        {"inputs": [*about, {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
    )
    headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"}
    answer = httpx.post(f"{server.url}/v2/models/adder/infer", content=header + halves + halves, headers=headers)
    assert answer.json()["outputs"][0]["data"] == (2 * exact).ravel().tolist()
    short = httpx.post(f"{server.url}/v2/models/adder/infer", content=header + halves, headers=headers)
    assert short.status_code == 400
    values = {"name": "a", "shape": [1], "datatype": "BF16", "data": [1]}
    refused = httpx.post(f"{server.url}/v2/models/adder/infer", json={"inputs": [values]})
    assert (refused.status_code, "'BF16' has no JSON values" in refused.text) == (400, True), refused.text


def test_text_models_take_bytes(triton: Any) -> None:
    http = pytest.importorskip("tritonclient.http")

    def ask(model: str, **columns: list[str]) -> Any:
        inputs = []
        for name, values in columns.items():
            tensor = http.InferInput(name, [len(values)], "BYTES")
            tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=np.object_))
            inputs.append(tensor)
        return triton.infer(model, inputs)

    vectors = ask("embedder", text=["hello world", "fox"]).as_numpy("embedding")
    np.testing.assert_array_equal(vectors[1], embedding(ids_of("fox")))
    logits = ask("classifier", text=["fox"]).as_numpy("logits")
    assert logits.shape == (1, 3)
    pair = pair_of("fox", "the fox")
    scores = ask("reranker", query=["fox"], text=["the fox"]).as_numpy("score")
    assert scores.tolist() == [relevance(pair).tolist()]


def test_python_models_take_json(triton: Any) -> None:
    http = pytest.importorskip("tritonclient.http")
    tensor = http.InferInput("input", [3], "BYTES")
    tensor.set_data_from_numpy(np.array([b'{"x": 2}', b'"ab"', b"[1]"], dtype=np.object_))
    made = triton.infer("function", [tensor]).as_numpy("output")
    assert [bytes(each) for each in made] == [b'{"twice":4.0,"list":[0,1]}', b'"abab"', b"[1,1]"]


def test_repository(server: Listening) -> None:
    utils = pytest.importorskip("tritonclient.utils")
    shelf = Shelf()
    models = Models([adder()[0]], shelf)
    with listening(registry=models, model_control=True) as server:
        for triton in client_of(server):
            assert triton.get_model_repository_index() == [
                {"name": "adder", "version": "1", "state": "READY", "reason": ""},
                {"name": "spare", "version": "", "state": "UNAVAILABLE", "reason": "not loaded"},
            ]
            old = models.get("adder")
            triton.load_model("spare")
            triton.load_model("adder")
            assert triton.is_model_ready("spare")
            assert models.get("adder") is not old
            triton.unload_model("spare")
            assert not triton.is_model_ready("spare")
            assert shelf.unloaded == ["adder", "spare"]
            with pytest.raises(utils.InferenceServerException, match="no model `what` to load"):
                triton.load_model("what")
            triton.unload_model("spare")
            assert shelf.unloaded == ["adder", "spare"]
            with pytest.raises(utils.InferenceServerException, match="no model `what` to load"):
                triton.unload_model("what")
            for more, message in (
                ({"files": {"file:1/model.onnx": b"x"}, "config": "{}"}, "'file:1/model.onnx' is not supported"),
                ({"config": "[]"}, "config: expected object"),
            ):
                with pytest.raises(utils.InferenceServerException, match=message):
                    triton.load_model("spare", **more)
        only_ready = httpx.post(f"{server.url}/v2/repository/index", json={"ready": True}).json()
        assert [entry["name"] for entry in only_ready] == ["adder"]


def test_a_fixed_set_of_models_loads_nothing(server: Listening) -> None:
    answer = httpx.post(f"{server.url}/v2/repository/models/adder/unload")
    assert (answer.status_code, set(answer.json())) == (400, {"error"})
    assert [entry["state"] for entry in httpx.post(f"{server.url}/v2/repository/index").json()] == ["READY"] * 5


def test_versions() -> None:
    services = [adder()[0], adder()[0], adder()[0]]
    for service, version in zip(services, ("2", "10", "9"), strict=True):
        service.version = version
    with listening(*services) as server:

        def version(path: str) -> Any:
            answer = httpx.post(f"{server.url}/v2/models/adder{path}/infer", json=BODY)
            return answer.json().get("model_version", answer.status_code)

        assert version("") == "10"
        assert version("/versions/9") == "9"
        assert version("/versions/1") == 404
        assert httpx.get(f"{server.url}/v2/models/adder").json()["versions"] == ["2", "9", "10"]


BODY: dict[str, Any] = {
    "inputs": [
        {"name": "a", "shape": [1, 2], "datatype": "FP32", "data": [1, 2.5]},
        {"name": "b", "shape": [1, 2], "datatype": "FP32", "data": [[3, 4]]},
        {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["fox"]},
    ]
}


def changed(index: int, **more: Any) -> dict[str, Any]:
    inputs = [dict(each) for each in BODY["inputs"]]
    inputs[index] |= more
    return {"inputs": inputs}


def test_json_both_ways(server: Listening) -> None:
    answer = httpx.post(f"{server.url}/v2/models/adder/infer", json=BODY)
    assert answer.json() == {
        "model_name": "adder",
        "model_version": "1",
        "outputs": [
            {"name": "sum", "datatype": "FP32", "shape": [1, 2], "data": [4.0, 6.5]},
            {"name": "mean", "datatype": "FP64", "shape": [1], "data": [5.25]},
            {"name": "loud", "datatype": "BYTES", "shape": [1], "data": ["FOX"]},
        ],
    }
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-batch-size"] == "1"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"inputs": BODY["inputs"][:2]}, "'word' is missing"),
        ({"inputs": BODY["inputs"] + BODY["inputs"][:1]}, "there twice"),
        (changed(0, name="c"), "unexpected input 'c'"),
        (changed(0, datatype="FP64"), "must be FP32"),
        (changed(0, datatype="BF16"), "'BF16' has no JSON values"),
        (changed(0, datatype="FP8"), "'FP8' is not one of"),
        (changed(0, shape=[2]), "must have shape [-1, -1]"),
        (changed(0, shape=[2, 1]), "same number of items"),
        (changed(0, shape=[1, 3]), "needs 3 values"),
        (changed(0, shape=[-1, 2]), "no negative"),
        (changed(0, data=[1]), "needs 2 values"),
        (changed(0, data=[[1, 2], [3]]), "different lengths"),
        (changed(0, data=["a", "b"]), "not FP32"),
        (changed(2, data=[5]), "not BYTES"),
        (changed(2, data=["a", "b"]), "needs 1 elements"),
        (changed(0, parameters={"binary_data_size": 8}), "either data or"),
        (
            changed(0, parameters={"shared_memory_region": "x"}),
            "shared_memory_region and shared_memory_byte_size go together",
        ),
        (BODY | {"parameters": {"sequence_id": 1}}, "'sequence_id' is not supported"),
        (BODY | {"parameters": {"priority": "high"}}, "'priority' must be an integer"),
        (BODY | {"parameters": {"priority": -1}}, "priority must not be negative"),
        (BODY | {"parameters": {"timeout": -1}}, "timeout must not be negative"),
        (BODY | {"parameters": {"binary_data_output": 1}}, "must be true or false"),
        (BODY | {"outputs": [{"name": "what"}]}, "no output 'what'"),
        (BODY | {"outputs": [{"name": "sum", "parameters": {"classification": 3}}]}, "'classification' is not supp"),
        (BODY | {"model_name": "other"}, "the path names 'adder'"),
        (BODY | {"wrong": 1}, "unknown field 'wrong'"),
        ({"inputs": []}, "'a' is missing"),
        ({}, "'inputs' is required"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_bad_tensors_are_refused_by_name(server: Listening, body: Any, word: str) -> None:
    answer = httpx.post(f"{server.url}/v2/models/adder/infer", json=body)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert word in answer.json()["error"]


def test_numbers_that_do_not_fit_are_refused() -> None:
    from chairlift.errors import InvalidRequest
    from chairlift.server.oip.codec import from_values

    for datatype, values in (("INT8", [128]), ("UINT8", [-1]), ("INT64", [2**63]), ("INT32", [1.5]), ("BOOL", [1])):
        with pytest.raises(InvalidRequest):
            from_values("x", datatype, [1], values)
    assert from_values("x", "UINT64", [1], [2**64 - 1]).tolist() == [2**64 - 1]
    assert from_values("x", "BOOL", [2], [True, False]).tolist() == [True, False]
    assert from_values("x", "FP16", [0], []).shape == (0,)


@pytest.mark.parametrize(
    ("header", "raw", "word"),
    [
        ("5", b"{}", "Inference-Header-Content-Length"),
        ("x", b"{}", "Inference-Header-Content-Length"),
        (
            None,
            b'{"inputs":[{"name":"a","shape":[1,1],"datatype":"FP32","parameters":{"binary_data_size":4}}]}',
            "ends",
        ),
        (None, b"{", "not valid JSON"),
        (None, b"", "not valid JSON"),
    ],
)
def test_rubbish_is_400(server: Listening, header: str | None, raw: bytes, word: str) -> None:
    headers = {"Inference-Header-Content-Length": header} if header else {}
    answer = httpx.post(f"{server.url}/v2/models/adder/infer", content=raw, headers=headers)
    assert answer.status_code == 400
    assert word in answer.json()["error"]


def test_binary_data_must_add_up(server: Listening) -> None:
    def send(tail: bytes, size: int, datatype: str = "BYTES") -> str:
        head = b'{"inputs":[{"name":"text","shape":[1],"datatype":"%b","parameters":{"binary_data_size":%d}}]}' % (
            datatype.encode(),
            size,
        )
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        return httpx.post(f"{server.url}/v2/models/embedder/infer", content=head + tail, headers=headers).text

    assert "outputs" in send(b"\3\0\0\0fox", 7)
    assert "belong to no input" in send(b"\3\0\0\0fox!", 7)
    assert "ends before" in send(b"\3\0\0\0fo", 7)
    assert "add up" in send(b"\4\0\0\0fox", 7)
    assert "add up" in send(b"\3\0", 2)
    assert "needs 4 bytes" in send(b"123", 3, "FP32")
    assert "not UTF-8" in send(b"\1\0\0\0\xff", 5)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("full", 2), 429),
        (Unavailable("dead"), 503),
        (DeadlineExceeded("late"), 504),
        (RequestFailed("x"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("path", ["/v2/models/function/infer", "/v1/models/function:predict"])
def test_failures_have_their_codes(error: Exception, status: int, path: str) -> None:
    service, dispatcher = function()
    dispatcher.refusal = error
    tensor = {"name": "input", "shape": [1], "datatype": "BYTES", "data": ["1"]}
    body = {"instances": [1]} if path.endswith("predict") else {"inputs": [tensor]}
    with listening(service) as server:
        answer = httpx.post(server.url + path, json=body)
        assert (answer.status_code, answer.json()) == (status, {"error": str(error)})
        assert ("retry-after" in answer.headers) == (status in (429, 503))
        service.state = "draining"
        assert httpx.post(server.url + path, json=body).status_code == 503
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 503
        assert httpx.get(f"{server.url}/v2/models/function/ready").status_code == 503


def test_outputs_that_do_not_match_are_the_models_fault(server: Listening) -> None:
    service, dispatcher = adder()
    bad = changed(0) | {
        "inputs": [each | {"shape": [2, *each["shape"][1:]], "data": each["data"] * 2} for each in BODY["inputs"]]
    }
    with listening(service) as it:
        dispatcher.compute = lambda payloads: [
            {"sum": np.zeros(i + 1), "mean": 1.0, "loud": b""} for i in range(len(payloads))
        ]
        answer = httpx.post(f"{it.url}/v2/models/adder/infer", json=bad)
        assert (answer.status_code, "can't be one tensor" in answer.text) == (500, True)
        dispatcher.compute = lambda payloads: [{"sum": np.zeros(2)} for _ in payloads]
        answer = httpx.post(f"{it.url}/v2/models/adder/infer", json=bad)
        assert (answer.status_code, "no output 'mean'" in answer.text) == (500, True)
        dispatcher.compute = lambda payloads: [{"sum": np.zeros(2), "mean": 0.0, "loud": b"\xff"} for _ in payloads]
        assert "binary data" in httpx.post(f"{it.url}/v2/models/adder/infer", json=bad).json()["error"]


def test_models_without_a_batch_axis_get_tensors_whole() -> None:
    service, _ = adder()
    assert service.info is not None
    service.info.batch_axis = False
    inputs = [
        {"name": "a", "shape": [2], "datatype": "FP32", "data": [1, 2]},
        {"name": "b", "shape": [2], "datatype": "FP32", "data": [1, 2]},
        {"name": "word", "shape": [], "datatype": "BYTES", "data": ["x"]},
    ]
    with listening(service) as server:
        made = httpx.post(f"{server.url}/v2/models/adder/infer", json={"inputs": inputs}).json()["outputs"]
        assert made[0] == {"name": "sum", "datatype": "FP32", "shape": [2], "data": [2.0, 4.0]}
        assert httpx.get(f"{server.url}/v2/models/adder").json()["inputs"][0]["shape"] == [-1]
        instance = {"a": [1, 2], "b": [3, 4], "word": "x"}
        made = httpx.post(f"{server.url}/v1/models/adder:predict", json={"instances": [instance]}).json()
        assert made == {"predictions": [{"sum": [4.0, 6.0], "mean": 5.0, "loud": "X"}]}


def test_language_models_take_no_tensors() -> None:
    import asyncio

    async def go() -> None:
        front = Front()
        answer = await front.post("/v2/models/tiny/infer", BODY)
        assert (answer.status, answer.json()["error"][:26]) == (400, "`tiny` is a language model")
        assert (await front.post("/v2/models/other/infer", BODY)).status == 404
        assert (await front.call("GET", "/v2/models/tiny/ready")).status == 200
        assert (await front.call("GET", "/v2/nowhere")).json() == {"error": "there is no /v2/nowhere here"}

    asyncio.run(go())

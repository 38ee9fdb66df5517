"""Loading a model with another configuration, as Triton's clients do, and tensors of BF16."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from support.items_harness import Listening, LocalDispatcher, adder, listening
from support.oip_tensors import Shelf

from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel, Settings
from chairlift.demo import demo_path
from chairlift.errors import InvalidRequest
from chairlift.runners.function import FunctionRunner
from chairlift.runners.items import ItemInfo, TensorSpec
from chairlift.server.http.tenants import Keys
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.loader import HostLoader
from chairlift.server.models.registry import Models
from chairlift.server.oip.codec import from_raw, to_raw
from chairlift.server.oip.load_config import _CONFIG, _take

LOAD = "/v2/repository/models/adder/load"
CLASS = """
import torch
from chairlift.runners.items import TensorSpec

class Halves:
    inputs = (TensorSpec("x", "BF16", (3,)),)
    outputs = (TensorSpec("y", "BF16", (3,)),)

    def predict(self, batch):
        return [torch.as_tensor(item["x"]).to(torch.bfloat16) / 3 for item in batch]
"""


@pytest.fixture
def case() -> Iterator[tuple[Listening, Shelf]]:
    shelf = Shelf()
    with listening(registry=Models([adder()[0]], shelf), model_control=True) as server:
        yield server, shelf


def load(server: Listening, config: Any, path: str = LOAD) -> httpx.Response:
    text = config if isinstance(config, str) else json.dumps(config)
    return httpx.post(server.url + path, json={"parameters": {"config": text}})


def test_a_load_takes_what_can_be_changed(case: tuple[Listening, Shelf]) -> None:
    server, shelf = case
    present = httpx.get(f"{server.url}/v2/models/adder/config").json()
    batching = present["dynamic_batching"] | {"max_queue_delay_microseconds": "2500"}
    for config, changes in (
        ({}, {}),
        ({"max_batch_size": 16}, {"max_batch_size": 16}),
        ({"max_batch_size": "4", "instance_group": [{"count": 2}]}, {"max_batch_size": 4, "instances": 2}),
        # One that was asked for, and changed.
        (present | {"dynamic_batching": batching}, {"max_batch_size": present["max_batch_size"], "max_wait_ms": 2.5}),
    ):
        answer = load(server, config)
        assert answer.status_code == 200, answer.text
        assert shelf.changes[-1] == changes
    # What is not loaded has only its name.
    spare = "/v2/repository/models/spare/load"
    assert load(server, {"name": "spare", "backend": "chairlift", "max_batch_size": 2}, spare).status_code == 200
    assert shelf.changes[-1] == {"max_batch_size": 2}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_batch_size": 0}, "config.max_batch_size must be a whole number"),
        ({"max_batch_size": "9" * 5000}, "config.max_batch_size"),
        ({"max_batch_size": 10**9}, "config.max_batch_size"),
        ({"max_batch_size": True}, "config.max_batch_size"),
        ({"max_batch_size": 2.5}, "config.max_batch_size"),
        ({"max_batch_size": "²"}, "config.max_batch_size"),
        ({"name": "other"}, "config.name"),
        ({"backend": "onnxruntime"}, "config.backend"),
        ({"x" * 10_000: 1}, "config.xxx"),
        ({"dynamic_batching": None}, "config.dynamic_batching is not what the model has"),
        ({"dynamic_batching": {"preferred_batch_size": [3]}}, "config.dynamic_batching.preferred_batch_size"),
        ({"dynamic_batching": {"max_queue_delay_microseconds": -1}}, "max_queue_delay_microseconds"),
        ({"dynamic_batching": {"priority_levels": 2}}, "config.dynamic_batching.priority_levels"),
        ({"instance_group": []}, "config.instance_group"),
        ({"instance_group": [{"count": 1, "kind": "KIND_GPU"}]}, "config.instance_group"),
        ({"instance_group": [{"count": 10**6}]}, "config.instance_group[0].count"),
        ({"sequence_batching": {}}, "config.sequence_batching"),
        ("{", "JSON"),
        ("[1]", "object"),
        ("[" * 5000, ""),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_can_not_be_changed_is_refused_by_name(case: tuple[Listening, Shelf], config: Any, said: str) -> None:
    server, shelf = case
    refused = load(server, config)
    assert (refused.status_code, set(refused.json())) == (400, {"error"}), refused.text
    assert said in refused.text
    assert shelf.changes == []


def test_a_model_without_a_batch_axis_takes_no_batch_size() -> None:
    now = {"max_batch_size": 0}
    changes: dict[str, Any] = {}
    _take({"max_batch_size": 0}, now, _CONFIG, "config", changes)
    assert changes == {}
    with pytest.raises(InvalidRequest, match=r"config\.max_batch_size is not what the model has"):
        _take({"max_batch_size": 8}, now, _CONFIG, "config", changes)


def test_a_configuration_is_text_and_dependents_are_a_flag(case: tuple[Listening, Shelf]) -> None:
    server, shelf = case
    for config in ({"max_batch_size": 2}, 5):
        refused = httpx.post(server.url + LOAD, json={"parameters": {"config": config}})
        assert (refused.status_code, "JSON text" in refused.text) == (400, True)
    unload = f"{server.url}/v2/repository/models/adder/unload"
    for flag, status in (("yes", 400), (True, 200), (False, 200)):
        answer = httpx.post(unload, json={"parameters": {"unload_dependents": flag}})
        assert answer.status_code == status, answer.text
    assert shelf.unloaded == ["adder"]


def test_changes_go_before_settings_for_one_load() -> None:
    """Only those that its kind of model has, and not what contradicts others."""
    made: list[ServedModel] = []

    class Made(Exception):
        pass

    def host(served: ServedModel) -> Any:
        made.append(served)
        raise Made

    items = ItemConfig(model="some.onnx", target_latency_ms=5)
    models = (ServedModel("a", items), ServedModel("b", SequenceConfig(model=demo_path())))
    loader = HostLoader(Settings(models, ServerConfig()), host)

    async def go(name: str, **changes: Any) -> None:
        await loader.load(name, changes)

    with pytest.raises(Made):
        asyncio.run(go("a", max_batch_size=3))
    assert made[0].config == ItemConfig(model="some.onnx", target_latency_ms=5, max_batch_size=3)
    with pytest.raises(Made):
        asyncio.run(go("a"))
    assert made[1].config is items
    with pytest.raises(InvalidRequest, match="target_latency_ms"):
        asyncio.run(go("a", max_wait_ms=2.5))
    with pytest.raises(InvalidRequest, match="language model"):
        asyncio.run(go("b", max_batch_size=3))
    assert loader.hosts == []


# Tensors of BF16


def halves_of(array: np.ndarray) -> bytes:
    return rounded(array).view(torch.int16).numpy().tobytes()


def rounded(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(torch.bfloat16)


def test_numbers_are_rounded_as_others_round_them() -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, 100_000, dtype=np.uint32)
    special = [0.0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, np.finfo(np.float32).max, 1e-45]
    array = np.concatenate([bits.view(np.float32), np.array(special, np.float32)])
    array = array[~np.isnan(array)]
    raw = to_raw(array, "BF16")
    assert raw == halves_of(array)
    np.testing.assert_array_equal(from_raw("x", "BF16", [array.size], raw), rounded(array).float().numpy())
    nan = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(from_raw("x", "BF16", [3], to_raw(nan, "BF16"))).all()


def test_a_class_takes_and_gives_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(CLASS)
    runner = FunctionRunner(ItemConfig(model=f"{tmp_path}/halves.py:Halves"))
    info = runner.load()
    assert [spec.datatype for spec in (*info.inputs, *info.outputs)] == ["BF16", "BF16"]
    item = np.array([1, 2, 3], np.float32)
    (made,) = runner.run([{"x": item}])
    expected = (rounded(item) / 3).float().numpy()
    assert made["y"].dtype == np.float32
    np.testing.assert_array_equal(made["y"], expected)
    runner.close()


def halver() -> ItemService:
    specs = {side: (TensorSpec(name, "BF16", (3,)),) for side, name in (("inputs", "x"), ("outputs", "y"))}
    dispatcher = LocalDispatcher(lambda payloads: [{"y": each["x"] / 3} for each in payloads])
    return ItemService("halver", dispatcher, info=ItemInfo(task="tensors", device="cpu", dtype="", **specs))


X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def check(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("y").astype(np.float32), rounded(X / 3).float().numpy())


def test_bfloat16_goes_both_ways_over_http() -> None:
    http = pytest.importorskip("tritonclient.http")
    with listening(halver()) as server:
        client = http.InferenceServerClient(server.url.removeprefix("http://"))
        assert client.get_model_metadata("halver")["outputs"][0]["datatype"] == "BF16"
        assert client.get_model_config("halver")["output"][0]["data_type"] == "TYPE_BF16"
        tensor = http.InferInput("x", [2, 3], "BF16")
        tensor.set_data_from_numpy(X.astype(pytest.importorskip("ml_dtypes").bfloat16))
        check(client.infer("halver", [tensor], outputs=[http.InferRequestedOutput("y", binary_data=True)]))
        client.close()
        # Nothing but the bytes of the one input.
        bare = httpx.post(
            f"{server.url}/v2/models/halver/infer",
            content=halves_of(X[0]),
            headers={"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"},
        )
        assert bare.content[int(bare.headers["inference-header-content-length"]) :] == halves_of(X[:1] / 3)
        tensors = [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]
        refused = httpx.post(f"{server.url}/v2/models/halver/infer", json={"inputs": tensors})
        assert (refused.status_code, "ask for it as binary data" in refused.text) == (400, True), refused.text
        answer = httpx.post(
            f"{server.url}/v2/models/halver/infer",
            json={"inputs": tensors, "parameters": {"binary_data_output": True}},
        )
        assert answer.content.endswith(halves_of(X[:1] / 3))
        wrong = [{"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}]
        refused = httpx.post(f"{server.url}/v2/models/halver/infer", json={"inputs": wrong})
        assert (refused.status_code, "must be BF16, got FP64" in refused.text) == (400, True), refused.text


def test_bfloat16_goes_both_ways_over_grpc() -> None:
    triton = pytest.importorskip("tritonclient.grpc.aio")
    from chairlift.server.oip.grpc_server import make_grpc_server

    async def go() -> None:
        config = ServerConfig()
        server, port = make_grpc_server(Models([halver()]), config, 0, Keys(config))
        await server.start()
        try:
            async with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
                tensor = triton.InferInput("x", [2, 3], "BF16")
                tensor.set_data_from_numpy(X.astype(pytest.importorskip("ml_dtypes").bfloat16))
                result = await client.infer("halver", [tensor])
                assert result.get_response().outputs[0].datatype == "BF16"
                check(result)
        finally:
            await server.stop(None)

    asyncio.run(go())


def test_grpc_loads_with_a_configuration_too() -> None:
    triton = pytest.importorskip("tritonclient.grpc.aio")
    utils = pytest.importorskip("tritonclient.utils")
    from chairlift.server.oip.grpc_server import make_grpc_server

    async def go() -> None:
        config, shelf = ServerConfig(model_control=True), Shelf()
        server, port = make_grpc_server(Models([adder()[0]], shelf), config, 0, Keys(config))
        await server.start()
        try:
            async with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
                await client.load_model("adder", config='{"max_batch_size": 5}')
                assert shelf.changes == [{"max_batch_size": 5}]
                for wrong in ({"config": '{"max_batch_size": 0}'}, {"config": "{}", "files": {"file:1/x": b"x"}}):
                    with pytest.raises(utils.InferenceServerException, match="INVALID_ARGUMENT"):
                        await client.load_model("adder", **wrong)
                await client.unload_model("adder", unload_dependents=True)
                assert shelf.unloaded == ["adder", "adder"]
        finally:
            await server.stop(None)

    asyncio.run(go())

"""OIP v2 over gRPC by Triton's client."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
from support.items_harness import (
    Listening,
    LocalDispatcher,
    adder,
    counter,
    embedder,
    embedding,
    function,
    ids_of,
    listening,
    threads_of,
)
from support.key_files import bearer, write_keys
from support.oip_tensors import A, Shelf, check, tensors

from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError, DeadlineExceeded, QueueFull, RequestFailed, Unavailable
from chairlift.runners.items import ItemInfo, TensorSpec
from chairlift.server.http.exchange import INLINE_SIZE
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models

grpc = pytest.importorskip("grpc")
triton_grpc = pytest.importorskip("tritonclient.grpc")
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")
service_pb2_grpc = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")
utils = pytest.importorskip("tritonclient.utils")
grpc_server = pytest.importorskip("chairlift.server.oip.grpc_server")


class Case:
    def __init__(self, server: Listening, dispatcher: LocalDispatcher) -> None:
        self.server, self.dispatcher = server, dispatcher
        self.triton = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.triton.close()
        self.channel.close()


@pytest.fixture
def case() -> Iterator[Case]:
    service, dispatcher = adder()
    models = Models([service, embedder()[0], counter()[0]], Shelf())
    with listening(registry=models, grpc=True, model_control=True) as server:
        it = Case(server, dispatcher)
        yield it
        it.close()


def test_triton_client_infers(case: Case) -> None:
    outputs = [triton_grpc.InferRequestedOutput(name) for name in ("loud", "mean", "sum")]
    for wanted in (None, outputs):
        result = case.triton.infer("adder", tensors(triton_grpc, True), outputs=wanted, request_id="my id")
        check(result)
        response = result.get_response()
        assert (response.id, response.model_name, response.model_version) == ("my id", "adder", "1")
    assert [output.name for output in response.outputs] == ["loud", "mean", "sum"]


def request(**more: Any) -> Any:
    inputs = [
        {"name": "a", "datatype": "FP32", "shape": A.shape, "contents": {"fp32_contents": A.ravel()}},
        {"name": "b", "datatype": "FP32", "shape": A.shape, "contents": {"fp32_contents": A.ravel()}},
        {"name": "word", "datatype": "BYTES", "shape": [2], "contents": {"bytes_contents": [b"x", b"y"]}},
    ]
    return service_pb2.ModelInferRequest(**({"model_name": "adder", "inputs": inputs} | more))


def test_typed_contents_and_times(case: Case) -> None:
    response, call = case.stub.ModelInfer.with_call(request())
    np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], "<f4").reshape(2, 3), A + A)
    times = dict(call.trailing_metadata())
    assert times["x-batch-size"] == "2"
    assert times["x-inference-time-ms"] == "2.000"


def test_large_answers_are_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of(monkeypatch, (grpc_server, "write_response"), (grpc_server, "write_part"))
    service, dispatcher = function()
    with listening(service, counter()[0], grpc=True) as server:
        it = Case(server, dispatcher)
        for size in (10, INLINE_SIZE):
            asked = service_pb2.ModelInferRequest(model_name="function")
            asked.inputs.add(name="input", datatype="BYTES", shape=[1])
            asked.raw_input_contents.append((size + 2).to_bytes(4, "little") + b'"%b"' % (b"a" * size))
            whole = it.stub.ModelInfer(asked)
            (part,) = it.stub.ModelStreamInfer(iter([asked]))
            for made in (whole, part.infer_response):
                assert made.raw_output_contents[0][4:] == b'"%b"' % (b"aa" * size)
        it.close()
    assert [name.startswith("asyncio_") for name in threads] == [False, False, True, True]


def test_terms_reach_the_line(case: Case) -> None:
    case.triton.infer("adder", tensors(triton_grpc, True), priority=3, timeout=2_500_000)
    case.triton.infer("adder", tensors(triton_grpc, True), client_timeout=5)
    case.stub.ModelInfer(request(), metadata=(("x-request-timeout-ms", "100"), ("x-request-priority", "7")))
    first, _, second, _, third, _ = case.dispatcher.submitted
    assert (first["priority"], first["timeout"]) == (2, 2.5)
    assert 0 < second["timeout"] < 6
    assert (third["priority"], third["timeout"]) == (7, 0.1)


def test_metadata_and_health(case: Case) -> None:
    assert case.triton.is_server_live()
    assert case.triton.is_server_ready()
    assert case.triton.is_model_ready("adder")
    about = case.triton.get_server_metadata()
    assert (about.name, "model_repository" in about.extensions) == ("chairlift", True)
    model = case.triton.get_model_metadata("adder", "1")
    assert next((i.name, i.datatype, list(i.shape)) for i in model.inputs) == ("a", "FP32", [-1, -1])
    assert list(model.versions) == ["1"]
    case.server.models.get("adder").state = "draining"  # type: ignore[union-attr]
    assert not case.triton.is_server_ready()
    assert not case.triton.is_model_ready("adder")


def test_texts_go_in_as_bytes(case: Case) -> None:
    tensor = triton_grpc.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"fox"], dtype=np.object_))
    made = case.triton.infer("embedder", [tensor]).as_numpy("embedding")
    np.testing.assert_array_equal(made[0], embedding(ids_of("fox")))


def test_repository(case: Case) -> None:
    states = {model.name: model.state for model in case.triton.get_model_repository_index().models}
    assert states == {"adder": "READY", "embedder": "READY", "counter": "READY", "spare": "UNAVAILABLE"}
    case.triton.load_model("spare")
    assert case.triton.is_model_ready("spare")
    case.triton.unload_model("spare")
    assert not case.triton.is_model_ready("spare")
    assert not case.triton.is_model_ready("nothing")
    case.triton.unload_model("spare")
    with pytest.raises(utils.InferenceServerException, match="INVALID_ARGUMENT"):
        case.triton.load_model("spare", config='{"max_batch_size": 0}')


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full", 2.5), "RESOURCE_EXHAUSTED"),
        (Unavailable("it died"), "UNAVAILABLE"),
        (DeadlineExceeded("late"), "DEADLINE_EXCEEDED"),
        (RequestFailed("boom"), "INTERNAL"),
        (RuntimeError("secret"), "INTERNAL"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_have_their_codes(case: Case, error: Exception, code: str) -> None:
    case.dispatcher.refusal = error
    with pytest.raises(grpc.RpcError) as caught:
        case.stub.ModelInfer(request())
    assert caught.value.code().name == code
    assert "secret" not in caught.value.details()
    if isinstance(error, QueueFull):
        assert dict(caught.value.trailing_metadata())["retry-after"] == "3"


INPUT = {"name": "a", "datatype": "FP32", "shape": [1, 1], "contents": {"fp32_contents": [1]}}
SIZED = {"name": "a", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": {"int64_param": 8}}}


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        ({"model_name": "other"}, "NOT_FOUND", "does not exist"),
        ({"model_version": "7"}, "NOT_FOUND", "no version '7'"),
        ({"inputs": [INPUT, INPUT]}, "INVALID_ARGUMENT", "there twice"),
        ({"inputs": [INPUT]}, "INVALID_ARGUMENT", "'b' is missing"),
        ({"inputs": [INPUT | {"datatype": "FP16"}]}, "INVALID_ARGUMENT", "no typed contents"),
        ({"inputs": [INPUT | {"datatype": "INT32"}]}, "INVALID_ARGUMENT", "needs 1 values"),
        ({"inputs": [INPUT], "raw_input_contents": [b"1234"]}, "INVALID_ARGUMENT", "both contents"),
        ({"raw_input_contents": [b"1234"]}, "INVALID_ARGUMENT", "1 entries for 3 inputs"),
        ({"outputs": [{"name": "what"}]}, "INVALID_ARGUMENT", "no output 'what'"),
        ({"parameters": {"sequence_id": {"int64_param": 3}}}, "INVALID_ARGUMENT", "'sequence_id' is not supported"),
        ({"parameters": {"timeout": {"string_param": "x"}}}, "INVALID_ARGUMENT", "must be an integer"),
        ({"inputs": [SIZED]}, "INVALID_ARGUMENT", "is to have 8 bytes of raw data, got none"),
        ({"inputs": [SIZED], "raw_input_contents": [b"1234"]}, "INVALID_ARGUMENT", "got 4 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_are_refused_by_name(case: Case, more: Any, code: str, word: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        case.stub.ModelInfer(request(**more))
    assert (caught.value.code().name, word in caught.value.details()) == (code, True), caught.value.details()


def test_configuration_and_statistics(case: Case) -> None:
    config = case.triton.get_model_config("adder").config
    assert [(each.name, each.data_type, list(each.dims)) for each in config.input][2] == ("word", 13, [1])
    assert (config.max_batch_size, config.backend) == (32, "chairlift")
    assert case.triton.get_model_config("counter").config.model_transaction_policy.decoupled
    case.stub.ModelInfer(request())
    (stats,) = case.triton.get_inference_statistics("adder").model_stats
    assert (stats.inference_count, stats.inference_stats.success.count, stats.batch_stats[0].batch_size) == (2, 1, 2)
    assert len(case.triton.get_inference_statistics().model_stats) == 3
    for ask in (case.triton.get_model_config, case.triton.get_inference_statistics):
        with pytest.raises(utils.InferenceServerException, match="NOT_FOUND"):
            ask("other")


def test_what_kserves_client_sends(case: Case) -> None:
    message = request(outputs=[{"name": "sum", "parameters": {"binary_data": {"bool_param": True}}}])
    raw = [np.float32([1]).tobytes(), np.float32([2]).tobytes(), b"\x01\0\0\0x"]
    for tensor, data in zip(message.inputs, raw, strict=True):
        tensor.ClearField("contents")
        tensor.parameters["binary_data_size"].int64_param = len(data)
        del tensor.shape[:]
        tensor.shape.extend([1] if tensor.datatype == "BYTES" else [1, 1])
        message.raw_input_contents.append(data)
    message.parameters["binary_data_output"].bool_param = True
    message.parameters["own"].string_param = "x"
    answer = case.stub.ModelInfer(message)
    assert answer.raw_output_contents[0] == np.float32([3]).tobytes()


def test_cancelling_takes_items_out_of_the_line(case: Case) -> None:
    case.dispatcher.held = True
    with pytest.raises(grpc.RpcError) as caught:
        case.stub.ModelInfer(request(), timeout=0.3)
    assert caught.value.code().name == "DEADLINE_EXCEEDED"
    while case.dispatcher.waiting:
        pass
    assert len(case.dispatcher.submitted) == 2


def test_streams_of_requests_and_of_parts(case: Case) -> None:
    answers: Queue[Any] = Queue()
    case.triton.start_stream(callback=lambda result, error: answers.put((result, error)))
    for number in range(3):
        case.triton.async_stream_infer("adder", tensors(triton_grpc, True), request_id=str(number))
    results = [answers.get(timeout=20)[0] for _ in range(3)]
    assert sorted(result.get_response().id for result in results) == ["0", "1", "2"]
    for result in results:
        check(result)
        assert result.get_response().parameters["triton_final_response"].bool_param
    tensor = triton_grpc.InferInput("input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"2"], dtype=np.object_))
    case.triton.async_stream_infer("counter", [tensor], enable_empty_final_response=True)
    parts = [answers.get(timeout=20)[0] for _ in range(3)]
    assert [part.as_numpy("output")[0][:10] for part in parts[:2]] == [b'{"count":0', b'{"count":1']
    finals = [part.get_response().parameters["triton_final_response"].bool_param for part in parts]
    assert finals == [False, False, True]
    case.triton.async_stream_infer("other", [tensor])
    _, error = answers.get(timeout=20)
    assert "does not exist" in str(error)
    case.triton.stop_stream()


def test_the_key_is_asked_for() -> None:
    with listening(adder()[0], grpc=True, api_key="secret") as server:
        case = Case(server, LocalDispatcher(lambda payloads: payloads))
        assert case.triton.is_server_live()
        with pytest.raises(utils.InferenceServerException, match="UNAUTHENTICATED"):
            case.triton.get_model_metadata("adder")
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert case.triton.get_model_metadata("adder", headers=headers).name == "adder"
        with pytest.raises(utils.InferenceServerException, match="'x-api-key: KEY'"):
            case.triton.get_model_metadata("adder", headers={"x-api-key": "other"})
        answers: Queue[Any] = Queue()
        case.triton.start_stream(callback=lambda result, error: answers.put(error))
        assert "secret" not in str(answers.get(timeout=20))
        case.triton.stop_stream()
        case.close()


def test_rights_and_limits_of_keys(tmp_path: Path) -> None:
    path = write_keys(
        tmp_path / "keys.toml",
        user={"rights": ["infer"], "priorities": [0, 5]},
        admin={"rights": ["admin"]},
        few={"requests_per_minute": 3},
    )

    def code(call: Callable[..., Any], name: str, *arguments: Any, **more: str) -> str:
        try:
            call(*arguments, headers=bearer(name) | more)
        except utils.InferenceServerException as error:
            return str(error.status()).removeprefix("StatusCode.")
        return "OK"

    service, dispatcher = adder()
    registry = Models([service, embedder()[0]], Shelf())
    with listening(registry=registry, grpc=True, model_control=True, api_keys=str(path)) as server:
        case = Case(server, dispatcher)
        inputs = tensors(triton_grpc, True)
        infer, load = case.triton.infer, case.triton.load_model
        assert code(infer, "stranger", "adder", inputs) == "UNAUTHENTICATED"
        assert code(infer, "admin", "adder", inputs) == "PERMISSION_DENIED"
        assert code(infer, "user", "adder", inputs) == "OK"
        assert code(load, "user", "spare") == "PERMISSION_DENIED"
        assert code(load, "admin", "spare") == "OK"
        assert code(case.triton.get_model_metadata, "admin", "adder") == "OK"
        priority = {"x-request-priority": "6"}
        assert code(infer, "user", "adder", inputs, **priority) == "PERMISSION_DENIED"
        assert [code(infer, "few", "adder", inputs) for _ in range(4)] == ["OK"] * 3 + ["RESOURCE_EXHAUSTED"]
        with pytest.raises(grpc.RpcError) as caught:
            case.stub.ModelInfer(request(), metadata=tuple(bearer("few").items()))
        assert "requests_per_minute" in caught.value.details()
        assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 1
        case.close()


def test_every_request_of_a_stream_counts(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", few={"requests_per_minute": 2}, admin={"rights": ["admin"]})
    with listening(adder()[0], grpc=True, api_keys=str(path)) as server:
        for name, count in (("few", 3), ("admin", 0)):
            case = Case(server, LocalDispatcher(lambda payloads: payloads))
            answers: Queue[Any] = Queue()
            put = partial(_put, answers)
            case.triton.start_stream(callback=put, headers=bearer(name))
            for _ in range(count):
                case.triton.async_stream_infer("adder", tensors(triton_grpc, True))
            errors = [str(answers.get(timeout=20)[1] or "") for _ in range(count or 1)]
            if count:
                assert sorted("requests_per_minute" in error for error in errors) == [False, False, True]
            else:
                assert "the right 'infer'" in errors[0]
            case.triton.stop_stream()
            case.close()


def _put(answers: "Queue[Any]", result: Any, error: Any) -> None:
    answers.put((result, error))


def test_nobody_loads_models_unless_it_is_asked_for() -> None:
    with listening(registry=Models([adder()[0]], Shelf()), grpc=True) as server:
        case = Case(server, LocalDispatcher(lambda payloads: payloads))
        for change in (case.triton.load_model, case.triton.unload_model):
            with pytest.raises(utils.InferenceServerException, match=r"PERMISSION_DENIED.*model_control"):
                change("adder")
        assert case.triton.is_model_ready("adder")
        case.close()


def test_large_requests_are_refused() -> None:
    with listening(adder()[0], grpc=True, max_tensor_bytes=1000) as server:
        case = Case(server, LocalDispatcher(lambda payloads: payloads))
        with pytest.raises(grpc.RpcError) as caught:
            case.stub.ModelInfer(request(id="x" * 2000))
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"
        case.close()


def test_a_port_that_is_taken_is_a_config_error(case: Case) -> None:
    import asyncio

    from chairlift.server.http.tenants import Keys
    from chairlift.server.oip.grpc_server import make_grpc_server

    async def go() -> None:
        for port in (case.server.port, case.server.grpc_port):
            with pytest.raises(ConfigError, match="--grpc-port"):
                make_grpc_server(Models(), ServerConfig(), port, Keys(ServerConfig()))

    asyncio.run(go())


def test_the_descriptor_is_what_the_proto_says(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    from compile_proto import FOLDER, compile_proto
    from google.protobuf import descriptor_pb2

    compile_proto(tmp_path / "new.binpb")
    made, kept = (
        descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
        for path in (tmp_path / "new.binpb", FOLDER / "oip.binpb")
    )
    assert made == kept


def test_our_messages_are_tritons_on_the_wire() -> None:
    """Every field that both know has one number and one type."""
    from chairlift.server.oip import protobuf

    def compare(ours: Any, theirs: Any) -> None:
        for field in ours.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type) == (other.number, other.type), field.full_name
            if field.message_type is not None:
                compare(field.message_type, other.message_type)

    for method in protobuf.methods():
        other = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method.name]
        compare(method.input_type, other.input_type)
        compare(method.output_type, other.output_type)
        assert method.client_streaming == other.client_streaming


def test_a_model_that_streams_tensors_has_no_one_answer() -> None:
    info = ItemInfo(
        task="tensors",
        device="cpu",
        dtype="",
        inputs=(TensorSpec("n", "INT64", (1,)),),
        outputs=(TensorSpec("y", "INT64", (1,)),),
        streams=True,
    )
    dispatcher = LocalDispatcher(
        lambda payloads: [[{"y": np.array([i], np.int64)} for i in range(each["n"].item())] for each in payloads]
    )
    request = service_pb2.ModelInferRequest(model_name="parts")
    request.inputs.add(name="n", datatype="INT64", shape=[1, 1]).contents.int64_contents.append(3)
    with listening(ItemService("parts", dispatcher, info=info), grpc=True) as server:
        case = Case(server, dispatcher)
        with pytest.raises(grpc.RpcError) as refused:
            case.stub.ModelInfer(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "`parts` streams" in refused.value.details()
        assert "ModelStreamInfer over gRPC, or :predict" in refused.value.details()
        tensor = {"name": "n", "shape": [1, 1], "datatype": "INT64", "data": [3]}
        answer = httpx.post(f"{server.url}/v2/models/parts/infer", json={"inputs": [tensor]})
        assert (answer.status_code, "`parts` streams" in answer.json()["error"]) == (400, True)
        assert dispatcher.submitted == []
        parts = [part.infer_response.raw_output_contents[0] for part in case.stub.ModelStreamInfer(iter([request]))]
        assert [int.from_bytes(part, "little") for part in parts] == [0, 1, 2]
        answer = httpx.post(f"{server.url}/v1/models/parts:predict", json={"instances": [[3]]})
        assert answer.json() == {"predictions": [[[0], [1], [2]]]}
        case.close()

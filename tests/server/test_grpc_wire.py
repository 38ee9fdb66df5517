"""How much a gRPC message may hold before it is made of its bytes."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.items_harness import function, listening

from chairlift.errors import InvalidRequest

grpc = pytest.importorskip("grpc")
protobuf = pytest.importorskip("chairlift.server.oip.protobuf")
wire = pytest.importorskip("chairlift.server.oip.wire")
ModelInferRequest = protobuf.message("ModelInferRequest")
INPUTS = {method.name: method.input_type for method in protobuf.methods()}

EMPTY = {"inputs": b"\x2a\x00", "outputs": b"\x32\x00", "parameters": b"\x22\x00", "raw_input_contents": b"\x3a\x00"}


def field(number: int, raw: bytes) -> bytes:
    size = len(raw)
    return bytes([number << 3 | 2, *((size >> 7 * place) & 0x7F | 0x80 for place in range(4)), size >> 28]) + raw


def infer_parser() -> Callable[[bytes], Any]:
    made: Callable[[bytes], Any] = wire.parser_of(INPUTS["ModelInfer"])
    return made


@pytest.mark.parametrize("name", EMPTY)
def test_no_message_has_more_fields_than_it_may(name: str) -> None:
    parse = infer_parser()
    parse(EMPTY[name] * wire.MAX_FIELDS)
    with pytest.raises(InvalidRequest, match=f"more than {wire.MAX_FIELDS} fields"):
        parse(EMPTY[name] * (wire.MAX_FIELDS + 1))


@pytest.mark.parametrize(("outer", "inner"), [(5, b"\x22\x00"), (5, b"\x18\x01"), (6, b"\x12\x00")])
def test_the_fields_of_inputs_and_outputs_count_too(outer: int, inner: bytes) -> None:
    parse = infer_parser()
    half = wire.MAX_FIELDS // 2
    parse(field(outer, inner * (half - 1)) * 2)
    with pytest.raises(InvalidRequest, match="inputs, outputs and parameters included"):
        parse(field(outer, inner * half) * 2)


def test_contents_may_have_as_many_elements_as_fit() -> None:
    request = ModelInferRequest()
    request.inputs.add(name="x").contents.bytes_contents.extend([b"a"] * (wire.MAX_FIELDS + 1))
    request.inputs.add(name="y").contents.uint64_contents.extend(range(wire.MAX_FIELDS + 1))
    assert infer_parser()(request.SerializeToString()) == request


def full() -> Any:
    request = ModelInferRequest(model_name="é", model_version="1", id="x" * 300, raw_input_contents=[b"", b"a" * 200])
    for index in range(3):
        tensor = request.inputs.add(name=f"i{index}", datatype="FP64", shape=[-1, 2**40])
        tensor.parameters["a"].double_param = 1.5
        tensor.parameters["b"].int64_param = -1
        tensor.contents.fp64_contents.extend([0.5, 2.0])
        request.outputs.add(name=f"o{index}").parameters["c"].string_param = "text"
    request.parameters["d"].bool_param = True
    request.parameters["e"].uint64_param = 2**64 - 1
    return request


def test_a_message_is_what_protobuf_makes_of_it() -> None:
    parse, raw = infer_parser(), full().SerializeToString(deterministic=True)
    assert parse(raw) == full()
    assert parse(b"") == ModelInferRequest()
    # Fields that nobody knows, of every type.
    unknown = b"\x78\x01" + b"\x79" + bytes(8) + b"\x7a\x01a" + b"\x7d" + bytes(4)
    assert parse(unknown + raw).inputs == full().inputs
    for end in range(len(raw)):
        try:
            expected = ModelInferRequest.FromString(raw[:end])
        except Exception:
            with pytest.raises(InvalidRequest, match="can't be decoded"):
                parse(raw[:end])
        else:
            assert parse(raw[:end]) == expected


@pytest.mark.parametrize(
    "raw", [b"\x2a\x05\x22", b"\x2a", b"\x80" * 11, b"\x0b\x0c", b"\x0f\x00", b"\x09\x00", b"\x0d\x00", b"\x0a\x01\xff"]
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="can't be decoded"):
        infer_parser()(raw)


def test_every_methods_messages_are_looked_at() -> None:
    for descriptor in INPUTS.values():
        with pytest.raises(InvalidRequest, match="more than"):
            wire.parser_of(descriptor)(b"\x7a\x00" * (wire.MAX_FIELDS + 1))


def test_a_hostile_message_is_the_clients_error_and_a_large_one_is_parsed_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def parser_of(descriptor: Any) -> Callable[[bytes], Any]:
        parse = wire.parser_of(descriptor)

        def noted(raw: bytes) -> Any:
            threads.append(threading.current_thread().name)
            return parse(raw)

        return noted

    monkeypatch.setattr("chairlift.server.oip.grpc_server.parser_of", parser_of)
    with (
        listening(function()[0], grpc=True) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        raw = b"\x0a\x08function" + EMPTY["inputs"] * 2**20
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{protobuf.SERVICE}/ModelInfer")(raw, timeout=30)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"more than {wire.MAX_FIELDS} fields" in refused.value.details()
        (answer,) = channel.stream_stream(f"/{protobuf.SERVICE}/ModelStreamInfer")(iter([raw]), timeout=30)
        assert b"more than" in answer
        assert server._thread.name not in threads
        assert len(threads) == 2

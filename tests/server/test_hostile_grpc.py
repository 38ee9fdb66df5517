"""The same over gRPC: INVALID_ARGUMENT or NOT_FOUND, and never UNKNOWN."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.items_harness import Listening, adder, function, listening

grpc = pytest.importorskip("grpc")
protobuf = pytest.importorskip("chairlift.server.oip.protobuf")
ModelInferRequest = protobuf.message("ModelInferRequest")

LONG = "x" * 10_240
CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    with listening(adder()[0], function()[0], grpc=True) as it:
        yield it


def request(model: str = "function", raw: bytes | None = None, **fields: Any) -> Any:
    made = ModelInferRequest(model_name=model)
    made.inputs.add(**({"name": "input", "datatype": "BYTES", "shape": [1]} | fields))
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


def bytes_of(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


REQUESTS = [
    request(raw=bytes_of("[" * 500 + "]" * 500)),
    request(raw=bytes_of("[" * 50_000)),
    request(raw=bytes_of("9" * 30)),
    request(raw=bytes_of(LONG)),
    request(raw=b"\xff\xff\xff\xff"),
    request(raw=b"", shape=[0]),
    request(raw=b"", shape=[0, 2**62, 2**62]),
    request(raw=b"", shape=[1] * 100),
    request(raw=b"", shape=[-1]),
    request(raw=b"", datatype="FP32", shape=[0, 2**62]),
    request(raw=b"", datatype=LONG),
    request(raw=b"", name=LONG),
    request(model=LONG),
    request(model="adder"),
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_a_hostile_request_is_the_clients_error(server: Listening, number: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(
            f"/{protobuf.SERVICE}/ModelInfer",
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=protobuf.ModelInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            call(REQUESTS[number], timeout=30)
    assert refused.value.code() in CODES, refused.value
    assert len(refused.value.details()) <= 2048

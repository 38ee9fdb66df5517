"""What gRPC calls may hold, and how many there may be: beside HTTP, and out of the same room."""

import contextlib
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from support.items_harness import Listening, LocalDispatcher, adder, counter, function, listening
from support.key_files import bearer, write_keys

from chairlift.server.http.buffered import share_of
from chairlift.server.http.tenants import OWNER, Tenant
from chairlift.server.models.registry import Models

grpc = pytest.importorskip("grpc")
client_of = pytest.importorskip("chairlift.server.oip.grpc_calls").client_of
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")
service_pb2_grpc = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Case:
    def __init__(self, server: Listening, dispatcher: LocalDispatcher) -> None:
        self.server, self.dispatcher = server, dispatcher
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    @property
    def held(self) -> int:
        return self.server.buffered.held


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[Case]:
    service, dispatcher = function()
    with listening(registry=Models([service, adder()[0], counter()[0]]), grpc=True, **settings) as server:
        case = Case(server, dispatcher)
        yield case
        case.channel.close()
        until(lambda: case.held == 0)


def request(size: int = 10, model: str = "function", document: str | None = None) -> Any:
    raw = (document or f'"{"a" * (size - 2)}"').encode()
    made = service_pb2.ModelInferRequest(model_name=model, id="mine")
    made.inputs.add(name="input", datatype="BYTES", shape=[1])
    made.raw_input_contents.append(np.uint32(len(raw)).tobytes() + raw)
    return made


def code_of(future: Any) -> str:
    return str(future.exception().code().name) if future.exception() is not None else "OK"


def test_where_others_hold_the_bytes_a_call_comes_too_soon() -> None:
    with serving() as case:
        others = case.server.buffered.limit - 1_000_000
        case.server.buffered.add(others)
        with pytest.raises(grpc.RpcError) as caught:
            case.stub.ModelInfer(request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "(max_buffered_bytes)" in caught.value.details()
        assert dict(caught.value.trailing_metadata())["retry-after"] == "1"
        assert case.stub.ServerLive(service_pb2.ServerLiveRequest()).live
        assert case.stub.ServerReady(service_pb2.ServerReadyRequest()).ready
        case.server.buffered.give(others)
        assert case.stub.ModelInfer(request()).id == "mine"


def test_many_small_calls_at_once_are_all_answered() -> None:
    with serving(max_buffered_bytes=2**23, max_body_bytes=2**20) as case:
        calls = [case.stub.ModelInfer.future(request()) for _ in range(300)]
        assert {code_of(call) for call in calls} == {"OK"}


def test_calls_that_wait_hold_their_bytes_and_others_are_refused() -> None:
    with serving(max_buffered_bytes=10_000_000, max_body_bytes=1_100_000) as case:
        case.dispatcher.held = True
        calls = [case.stub.ModelInfer.future(request(1_000_000)) for _ in range(40)]
        until(lambda: sum(call.done() for call in calls) + case.dispatcher.waiting == 40)
        assert case.held <= case.server.buffered.limit
        refused = [call for call in calls if call.done()]
        assert {code_of(call) for call in refused} == {"RESOURCE_EXHAUSTED"}
        assert 3 <= case.dispatcher.waiting <= 5
        for call in calls[:20]:
            call.cancel()
        case.dispatcher.held = False
        assert {code_of(call) for call in calls[20:] if call not in refused} <= {"OK", "RESOURCE_EXHAUSTED"}


def test_answers_without_room_are_refused() -> None:
    with serving(max_buffered_bytes=3_000_000, max_body_bytes=1_100_000) as case:
        with pytest.raises(grpc.RpcError) as caught:
            case.stub.ModelInfer(request(1_000_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answers = list(case.stub.ModelStreamInfer(iter([request(1_000_000), request(100)])))
        assert sorted(
            (answer.infer_response.id, "max_buffered_bytes" in answer.error_message) for answer in answers
        ) == [
            ("mine", False),
            ("mine", True),
        ]


def test_a_compressed_message_is_unpacked_up_to_the_limit() -> None:
    """grpcio before 1.84 unpacks all of it, and then says `Received message larger than max`."""
    with serving(max_buffered_bytes=4_000_000, max_body_bytes=1_000_000) as case:
        for size in (900_000, 20_000_000):
            call = case.stub.ModelInfer.future(request(size), compression=grpc.Compression.Gzip)
            assert code_of(call) == ("OK" if size < 1_000_000 else "RESOURCE_EXHAUSTED")
        assert call.exception().details() == "Decompressed message larger than max"
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, about["optional-dependencies"]["grpc"])
    assert not any("1.83.0" in each.specifier for each in wanted if each.name == "grpcio")


def test_the_key_is_asked_for_before_a_message_is_read() -> None:
    with serving(api_key="secret") as case:
        others = case.server.buffered.limit
        case.server.buffered.add(others)
        with pytest.raises(grpc.RpcError) as caught:
            case.stub.ModelInfer(request())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        case.server.buffered.give(others)


def test_what_is_no_message_is_the_clients_mistake() -> None:
    with serving() as case:
        infer = case.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            infer(b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream = case.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        (answer,) = stream(iter([b"\xff\xff\xff"]))
        assert "can't be decoded" in service_pb2.ModelStreamInferResponse.FromString(answer).error_message


def test_calls_beyond_the_limit_come_too_soon() -> None:
    with serving(max_connections=2) as case:
        case.dispatcher.held = True
        calls = [case.stub.ModelInfer.future(request()) for _ in range(2)]
        until(lambda: case.dispatcher.waiting == 2)
        with pytest.raises(grpc.RpcError) as caught:
            case.stub.ModelInfer(request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "(max_connections)" in caught.value.details()
        assert case.stub.ServerLive(service_pb2.ServerLiveRequest()).live
        calls[0].cancel()
        case.dispatcher.held = False
        assert code_of(calls[1]) == "OK"
        assert case.stub.ModelInfer(request()).id == "mine"


def test_a_message_that_does_not_come_is_not_waited_for() -> None:
    with serving(body_timeout_s=0.2) as case:
        infer = case.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        never: Queue[bytes] = Queue()
        call = infer.future(iter(never.get, b""))
        assert code_of(call) == "DEADLINE_EXCEEDED"
        assert "(body_timeout_s)" in call.exception().details()
        never.put(b"")


def test_no_call_takes_for_ever() -> None:
    with serving(request_timeout_s=0.2) as case:
        case.dispatcher.held = True
        call = case.stub.ModelInfer.future(request())
        assert code_of(call) == "DEADLINE_EXCEEDED"
        assert "(request_timeout_s)" in call.exception().details()
        (answer,) = case.stub.ModelStreamInfer(iter([request()]))
        assert "(request_timeout_s)" in answer.error_message
        case.dispatcher.held = False


def test_streams_beyond_the_room_for_their_messages_come_too_soon() -> None:
    with serving(max_buffered_bytes=400_000, max_body_bytes=100_000) as case:
        queues: list[Queue[Any]] = [Queue() for _ in range(2)]
        streams = [case.stub.ModelStreamInfer(iter(each.get, None)) for each in queues]
        for queue, stream in zip(queues, streams, strict=True):
            queue.put(request())
            assert next(stream).infer_response.id == "mine"
        with pytest.raises(grpc.RpcError) as caught:
            list(case.stub.ModelStreamInfer(iter([request()])))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 streams already" in caught.value.details()
        for queue in queues:
            queue.put(None)
        assert [list(stream) for stream in streams] == [[], []]
        assert len(list(case.stub.ModelStreamInfer(iter([request()])))) == 1


def test_a_stream_that_nobody_reads_ends_and_its_answers_are_dropped() -> None:
    with serving(write_timeout_s=0.3) as case:
        requests: Queue[Any] = Queue()
        stream = case.stub.ModelStreamInfer(iter(requests.get, None))
        for _ in range(8):
            requests.put(request(3_000_000))
        until(lambda: case.held > 3_000_000)
        until(lambda: case.held == 0)
        stream.cancel()
        requests.put(None)


def test_streams_cut_off_leave_nothing_counted() -> None:
    with serving(max_buffered_bytes=20_000_000, max_body_bytes=2_000_000) as case:
        for turn in range(12):
            case.dispatcher.held = turn % 3 == 0
            requests: Queue[Any] = Queue()
            stream = case.stub.ModelStreamInfer(iter(requests.get, None))
            for size in (10, 1_000_000, 1_900_000, 500):
                requests.put(request(size))
            requests.put(request(model="counter", document="3000"))
            if turn % 2:
                next(stream)
            stream.cancel()
            requests.put(None)
        case.dispatcher.held = False
        until(lambda: case.held == 0)


def by(name: str) -> list[tuple[str, str]]:
    return list(bearer(name).items())


def idle_calls(case: Case, number: int, **more: Any) -> tuple[list[Any], Callable[[], None]]:
    """Calls that never send their message, and what ends them."""
    infer = case.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
    never: Queue[bytes] = Queue()
    calls = [infer.future(iter(never.get, b""), **more) for _ in range(number)]

    def end() -> None:
        for call in calls:
            call.cancel()
            never.put(b"")

    return calls, end


def test_calls_that_send_nothing_leave_room_for_those_of_another_key(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", anna={}, ben={})
    with serving(api_keys=str(keys)) as case:
        _, end = idle_calls(case, 8, metadata=by("anna"))
        until(lambda: case.held >= 3 * 2 * 2**24)
        case.stub.ServerLive(service_pb2.ServerLiveRequest())
        assert case.held == 3 * 2 * 2**24
        for _ in range(3):
            assert case.stub.ModelInfer(request(), metadata=by("ben"), timeout=20).id == "mine"
        end()
        assert case.stub.ModelInfer(request(), metadata=by("anna"), timeout=20).id == "mine"


def test_calls_that_send_nothing_make_room_for_those_of_another_key(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", anna={}, ben={})
    with serving(api_keys=str(keys), max_connections=4) as case:
        calls, end = idle_calls(case, 5, metadata=by("anna"))
        # The others have all places.
        until(lambda: sum(call.done() for call in calls) == 1)
        assert case.stub.ModelInfer(request(), metadata=by("ben"), timeout=20).id == "mine"
        until(lambda: sum(call.done() for call in calls) == 2)
        refused = [call for call in calls if call.done()]
        assert {code_of(call) for call in refused} == {"RESOURCE_EXHAUSTED"}
        assert all("(max_connections)" in call.exception().details() for call in refused)
        end()


def test_the_messages_of_one_key_leave_room_for_those_of_another(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", anna={}, ben={})
    with serving(api_keys=str(keys), max_buffered_bytes=10_000_000, max_body_bytes=1_300_000) as case:
        case.dispatcher.held = True
        calls = []
        for count in range(1, 4):
            calls.append(case.stub.ModelInfer.future(request(1_200_000), metadata=by("anna")))
            until(lambda count=count: case.dispatcher.waiting == count)
        assert code_of(case.stub.ModelInfer.future(request(1_200_000), metadata=by("anna"))) == "RESOURCE_EXHAUSTED"
        (answer,) = case.stub.ModelStreamInfer(iter([request(1_200_000)]), metadata=by("anna"))
        assert "(max_buffered_bytes)" in answer.error_message
        calls.append(case.stub.ModelInfer.future(request(100), metadata=by("ben")))
        until(lambda: case.dispatcher.waiting == 4)
        for call in calls:
            call.cancel()
        case.dispatcher.held = False


def test_who_calls_is_told_by_key_or_address() -> None:
    class Context:
        def peer(self) -> str:
            return "ipv4:10.0.0.7:5000"

    for tenant in (None, OWNER):
        assert client_of(tenant, Context()) == "ipv4:10.0.0.7"
    assert [client_of(Tenant(name), Context()) for name in ("anna", "ben")] == ["anna", "ben"], "at one address"
    assert [share_of(places) for places in (1, 2, 3, 4, 8)] == [1, 2, 3, 3, 6]


def test_a_message_has_the_time_that_its_rate_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.http.exchange.BODY_GRACE_S", 0.1)
    with serving(min_body_rate=2**40, body_timeout_s=3600, request_timeout_s=3600) as case:
        (call,), end = idle_calls(case, 1, timeout=20)
        assert code_of(call) == "DEADLINE_EXCEEDED"
        assert "(min_body_rate)" in call.exception().details()
        end()


def test_a_stream_that_is_idle_gives_its_place_to_another() -> None:
    with serving(max_buffered_bytes=400_000, max_body_bytes=100_000, body_timeout_s=0.2) as case:
        case.dispatcher.held = True
        queues: list[Queue[Any]] = [Queue() for _ in range(2)]
        busy, idle = (case.stub.ModelStreamInfer(iter(each.get, None)) for each in queues)
        queues[0].put(request())
        until(lambda: case.dispatcher.waiting == 1)
        queues[1].put(request(model="counter", document="1"))
        assert next(idle).infer_response.id == "mine"
        third: list[Any] = []

        def comes() -> bool:
            with contextlib.suppress(grpc.RpcError):
                third.extend(case.stub.ModelStreamInfer(iter([request(model="counter", document="1")])))
            return bool(third)

        until(comes)
        assert len(third) == 1
        with pytest.raises(grpc.RpcError) as caught:
            next(idle)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "(body_timeout_s), and another stream needs the place" in caught.value.details()
        case.dispatcher.held = False
        assert next(busy).infer_response.id == "mine"
        for queue in queues:
            queue.put(None)
        assert list(busy) == []


def test_the_streams_of_one_key_leave_places_for_another(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", anna={}, ben={})
    with serving(max_buffered_bytes=800_000, max_body_bytes=100_000, api_keys=str(keys)) as case:
        queues: list[Queue[Any]] = [Queue() for _ in range(4)]
        streams = []
        for queue, name in zip(queues, ("anna", "anna", "anna", "ben"), strict=True):
            streams.append(case.stub.ModelStreamInfer(iter(queue.get, None), metadata=by(name)))
            queue.put(request())
            assert next(streams[-1]).infer_response.id == "mine"
            if queue is queues[2]:
                with pytest.raises(grpc.RpcError) as caught:
                    next(case.stub.ModelStreamInfer(iter([request()]), metadata=by("anna")))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "3 streams already (of one client" in caught.value.details()
        for queue in queues:
            queue.put(None)
        assert [list(stream) for stream in streams] == [[], [], [], []]

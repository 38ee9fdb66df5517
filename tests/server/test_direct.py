"""Requests that come in one piece are answered like those that don't, whatever is wrong with them or happens next."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.items_harness import Listening, LocalDispatcher, adder, counter, function, listening, threads_of

from chairlift.errors import QueueFull, RequestFailed
from chairlift.server import direct
from chairlift.server.direct import MAX_BYTES
from chairlift.server.http.exchange import INLINE_SIZE
from chairlift.server.models.item_service import ItemService

Model = tuple[ItemService, LocalDispatcher]


@pytest.fixture
def model() -> Model:
    return function()


@pytest.fixture
def server(model: Model) -> Iterator[Listening]:
    with listening(model[0], adder()[0], counter()[0]) as it:
        yield it


def head_and_body(body: bytes, name: str = "function", headers: str = "") -> tuple[bytes, bytes]:
    head = f"POST /v1/models/{name}:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode(), body


def connect(server: Listening) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def answer(stream: Any) -> tuple[int, dict[str, str], bytes]:
    """One answer from a connection's file."""
    status = int(stream.readline().split()[1])
    headers = {}
    while line := stream.readline().strip():
        name, _, value = line.decode().partition(": ")
        headers[name.lower()] = value
    return status, headers, stream.read(int(headers["content-length"]))


def ask(server: Listening, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request in these pieces, each read by the server before the next comes."""
    with connect(server) as client, client.makefile("rb") as stream:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(0.05 if len(pieces) > 1 else 0)
        return answer(stream)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


JSON = "Content-Type: application/json\r\n"
CASES = {
    "one": (b'{"instances": [2]}', "function", JSON),
    "several": (b'{"instances": [1, {"x": 2.5}, "ab"]}', "function", JSON + "Connection: close\r\n"),
    "no type": (b'{"instances": [2]}', "function", ""),
    "tensors": (b'{"instances": [{"a": [1], "b": [2], "word": "x"}]}', "adder", JSON),
    "parts": (b'{"instances": [2]}', "counter", JSON),
    "no JSON": (b'{"instances": [2]', "function", JSON),
    "no instances": (b'{"instances": []}', "function", JSON),
    "unknown field": (b'{"instances": [1], "extra": 2}', "function", JSON),
    "unknown model": (b'{"instances": [1]}', "nobody", JSON),
    "wrong type": (b'{"instances": [1]}', "function", "Content-Type: text/plain\r\n"),
    "compressed": (b'{"instances": [1]}', "function", JSON + "Content-Encoding: gzip\r\n"),
    "stream": (b'{"instances": [1]}', "function", JSON + "Accept: text/event-stream\r\n"),
    "wrong term": (b'{"instances": [1]}', "function", JSON + "X-Request-Timeout-Ms: soon\r\n"),
    "refused": (b'{"instances": ["full"]}', "function", JSON),
    "failed": (b'{"instances": [1, "bad"]}', "function", JSON),
    "unprintable": (b'{"instances": ["odd"]}', "function", JSON),
    "large": (json.dumps({"instances": ["a" * MAX_BYTES]}).encode(), "function", JSON),
    "too large": (b" " * 300_000, "function", JSON),
}


@pytest.mark.parametrize("case", CASES)
def test_in_one_piece_or_two_the_answer_is_the_same(case: str, model: Model) -> None:
    service, dispatcher = model
    double = dispatcher.compute

    def compute(payloads: list[Any]) -> list[Any]:
        odd = {"bad": RequestFailed("broke"), "odd": object(), "full": QueueFull("no room", 3)}
        return [odd[each] if each in ("bad", "odd", "full") else double([each])[0] for each in payloads]

    dispatcher.compute = compute
    with listening(service, adder()[0], counter()[0], max_body_bytes=200_000) as server:
        request = head_and_body(*CASES[case])
        whole, apart = ask(server, b"".join(request)), ask(server, *request)
        assert whole[0] == apart[0]
        assert whole[2] == apart[2]
        told = [set(headers.items()) for _, headers, _ in (whole, apart)]
        differing = {name for name, _ in told[0] ^ told[1]}
        assert differing <= {"date", "x-queue-time-ms", "x-inference-time-ms", "x-request-id"}
        counts = {}
        for (_, _, code), count in server.server.config.app.direct._count.items():
            counts[code] = counts.get(code, 0) + count
        assert counts == {whole[0]: 2}


def test_both_ways_were_taken(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    direct = server.server.config.app.direct
    take = direct.take
    monkeypatch.setattr(direct, "take", lambda *given: taken.append(take(*given) is not None) or (lambda: None))
    request = head_and_body(*CASES["one"])
    assert ask(server, b"".join(request))[0] == 200
    assert taken == [True]
    assert ask(server, *request)[0] == 200
    assert taken == [True]


def test_pipelined_requests_are_answered_in_order(server: Listening) -> None:
    with connect(server) as client, client.makefile("rb") as stream:
        client.sendall(b"".join(b"".join(head_and_body(b'{"instances": [%d]}' % n, headers=JSON)) for n in range(5)))
        assert [json.loads(answer(stream)[2])["predictions"] for _ in range(5)] == [[2 * n] for n in range(5)]


def test_many_pipelined_requests_are_answered_in_order(server: Listening) -> None:
    """Some are refused at once, and some are long, so that there is not room for all at a time."""
    lists = [b"[%d%b]" % (n, b" " * (n % 5 * 8000)) if n % 3 else b"[]" for n in range(100)]
    with connect(server) as client, client.makefile("rb") as stream:
        sent = b"".join(b"".join(head_and_body(b'{"instances": %b}' % each, headers=JSON)) for each in lists)
        sender = threading.Thread(target=client.sendall, args=(sent,))
        sender.start()
        for n in range(100):
            status, _, body = answer(stream)
            assert json.loads(body)["predictions"] == [2 * n] if n % 3 else status == 400
        sender.join()


def test_a_connection_is_kept_or_closed_as_asked(server: Listening) -> None:
    with connect(server) as client, client.makefile("rb") as stream:
        for headers in (JSON, JSON, JSON + "Connection: close\r\n"):
            client.sendall(b"".join(head_and_body(b'{"instances": [1]}', headers=headers)))
            assert answer(stream)[0] == 200
        assert stream.read() == b""


def test_who_hangs_up_is_forgotten(server: Listening, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    service, dispatcher = model
    dispatcher.held = True
    with connect(server) as client:
        client.sendall(b"".join(head_and_body(b'{"instances": [1, 2, 3]}', headers=JSON)))
        until(lambda: dispatcher.waiting == 3)
    until(lambda: dispatcher.waiting == 0)
    assert service.metrics._finished["abort"] == 1
    dispatcher.held = False
    assert ask(server, b"".join(head_and_body(b'{"instances": [4]}', headers=JSON)))[2] == b'{"predictions":[8]}'
    assert "never retrieved" not in caplog.text


def test_a_large_answer_to_a_small_request_is_written_beside_the_loop(
    server: Listening, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch, (direct, "write_predictions"))
    for size in (INLINE_SIZE // 2, INLINE_SIZE + 1):
        model[1].compute = lambda payloads, size=size: ["a" * size for _ in payloads]
        status, headers, body = ask(server, b"".join(head_and_body(b'{"instances": [1]}', headers=JSON)))
        assert (status, body) == (200, b'{"predictions":["%b"]}' % (b"a" * size))
        assert headers["x-batch-size"] == "1"
    model[1].compute = lambda payloads: [["a" * INLINE_SIZE, object()] for _ in payloads]
    status, _, body = ask(server, b"".join(head_and_body(b'{"instances": [1]}', headers=JSON)))
    assert (status, "can't be written as JSON" in json.loads(body)["error"]) == (500, True)
    assert [name.startswith("asyncio_") for name in threads] == [False, True, True]


def test_who_hangs_up_while_the_answer_is_written_is_forgotten(
    server: Listening, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gone = threading.Event(), threading.Event()
    write = direct.write_predictions

    def held(values: Any) -> bytes:
        begun.set()
        assert gone.wait(10)
        return write(values)

    service, dispatcher = model
    dispatcher.compute = lambda payloads: ["a" * INLINE_SIZE for _ in payloads]
    monkeypatch.setattr(direct, "write_predictions", held)
    with connect(server) as client:
        client.sendall(b"".join(head_and_body(b'{"instances": [1]}', headers=JSON)))
        assert begun.wait(10)
    until(lambda: service.metrics._finished["abort"] == 1)
    gone.set()
    assert ask(server, b"".join(head_and_body(b'{"instances": [1]}', headers=JSON)))[0] == 200
    until(lambda: service.metrics._finished["done"] == 1)
    assert service.metrics._finished["abort"] == 1
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("instances", [b"[1]", b"[1, 2]"])
def test_at_the_deadline_nobody_waits_any_longer(
    instances: bytes, server: Listening, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = model[1]
    dispatcher.held = True
    headers = JSON + "X-Request-Timeout-Ms: 50\r\n"
    status, _, body = ask(server, b"".join(head_and_body(b'{"instances": %b}' % instances, headers=headers)))
    assert (status, "deadline passed" in json.loads(body)["error"]) == (504, True)
    until(lambda: dispatcher.waiting == 0)
    dispatcher.held = False
    assert ask(server, b"".join(head_and_body(b'{"instances": [4]}', headers=JSON)))[0] == 200
    assert "never retrieved" not in caplog.text


def test_the_key_is_asked_for(model: Model) -> None:
    with listening(model[0], api_key="secret") as server:
        request = b"".join(head_and_body(b'{"instances": [1]}', headers=JSON))
        assert ask(server, request)[0] == 401
        keyed = head_and_body(b'{"instances": [1]}', headers=JSON + "Authorization: Bearer secret\r\n")
        assert ask(server, b"".join(keyed))[0] == 200


def test_what_is_under_way_is_answered_before_the_server_leaves(server: Listening, model: Model) -> None:
    dispatcher = model[1]
    dispatcher.held = True
    with connect(server) as client, client.makefile("rb") as stream:
        client.sendall(b"".join(head_and_body(b'{"instances": [1]}', headers=JSON)))
        until(lambda: dispatcher.waiting == 1)
        server.server.should_exit = True
        time.sleep(0.3)
        dispatcher.held = False
        status, headers, _ = answer(stream)
        assert (status, headers["connection"]) == (200, "close")
        assert stream.read() == b""

"""What all connections together may hold and do: bytes, connections, uploads, rates and times, over real sockets."""

import asyncio
import contextlib
import errno
import json
import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.items_harness import Listening, LocalDispatcher, counter, embedder, function, listening
from support.key_files import bearer, write_keys
from support.server_harness import INFO, FakeClient, tokenizer

from chairlift.config.server import ServerConfig
from chairlift.engine.sequences.client import Stream
from chairlift.errors import ConfigError
from chairlift.server import front
from chairlift.server.http import exchange, protocol
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.buffered import Buffered, HeldBody
from chairlift.server.http.places import BUSY, COMING, IDLE, Places
from chairlift.server.models import sequence_service
from chairlift.server.models.sequence_service import SequenceService

PREDICT = "/v1/models/function:predict"
JSON = "Content-Type: application/json\r\n"


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def at_rest(server: Listening) -> bool:
    return server.buffered.held == 0 and not server.server.server_state.connections


def head(path: str, size: int, more: str = JSON) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n{more}\r\n".encode()


def connect(server: Listening, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20, source_address=(address, 0))


def read_all(client: socket.socket) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture
def model() -> tuple[Any, LocalDispatcher]:
    return function()


# Bytes


@pytest.mark.parametrize("path", [PREDICT, "/v1/embeddings"])
@pytest.mark.parametrize("size", [2000, 300_000])
def test_where_others_hold_the_bytes_a_request_comes_too_soon(path: str, size: int, model: Any) -> None:
    body: Any = {"instances": ["a" * size]} if path == PREDICT else {"input": "a" * size}
    with listening(model[0], embedder()[0]) as server, httpx.Client(base_url=server.url) as client:
        others = server.buffered.limit - size
        server.buffered.add(others)
        for _ in range(2):
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1"), answer.text
            assert "(max_buffered_bytes)" in answer.text
        assert client.get("/health/live").status_code == 200
        server.buffered.give(others)
        assert "max_buffered_bytes" not in client.post(path, json=body).text
        until(lambda: server.buffered.held == 0)


@pytest.mark.parametrize("cut", [0, 30, -5])
def test_a_client_that_offers_http2_is_answered_and_its_bytes_are_counted(cut: int, model: Any) -> None:
    body = b'{"instances": [21]}'
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    raw = head(PREDICT, len(body), JSON + offer) + body
    with listening(model[0]) as server:
        with connect(server) as client:
            client.sendall(raw[:cut])
            client.sendall(raw[cut:] + head(PREDICT, len(body), JSON + "Connection: close\r\n") + body)
            assert read_all(client).count(b'{"predictions":[42]}') == 2
        until(lambda: at_rest(server))


def test_what_can_never_fit_is_too_large(model: Any) -> None:
    with listening(model[0], max_buffered_bytes=1000) as server, httpx.Client(base_url=server.url) as client:
        answer = client.post(PREDICT, json={"instances": ["a" * 2000]})
        assert answer.status_code == 413
        assert "1000 bytes (max_buffered_bytes)" in answer.text
        assert client.post(PREDICT, json={"instances": [1]}).status_code == 200
        until(lambda: server.buffered.held == 0)


@pytest.mark.parametrize("cut", [0, 70_000, 199_000])
def test_bytes_are_held_until_the_request_is_over(cut: int, model: Any) -> None:
    service, dispatcher = model
    dispatcher.held = True
    body = json.dumps({"instances": ["a" * 200_000]}).encode()
    with listening(service) as server:
        with connect(server) as client:
            client.sendall(head(PREDICT, len(body)) + body[: cut or None])
            until(lambda: server.buffered.held == (cut or len(body)))
        until(lambda: at_rest(server))
        dispatcher.held = False


@pytest.mark.parametrize("size", [50_000, 200_000])
def test_the_bytes_of_one_client_leave_room_for_another(size: int, tmp_path: Path, model: Any) -> None:
    service, dispatcher = model
    dispatcher.held = True
    keys = write_keys(tmp_path / "keys.toml", anna={}, ben={})
    body = json.dumps({"instances": ["a" * size]}).encode()
    with listening(service, max_buffered_bytes=4 * len(body), api_keys=str(keys)) as server:

        def send(name: str, body: bytes = body) -> socket.socket:
            client = connect(server)
            more = f"{JSON}Connection: close\r\nAuthorization: {bearer(name)['authorization']}\r\n"
            client.sendall(head(PREDICT, len(body), more) + body)
            return client

        clients = [send("anna") for _ in range(3)]
        until(lambda: dispatcher.waiting == 3)
        with send("anna") as client:
            assert b"(max_buffered_bytes)" in read_all(client)
        clients.append(send("ben"))
        until(lambda: dispatcher.waiting == 4)
        for client in clients:
            client.close()
        until(lambda: at_rest(server))
        # One alone may have all there is.
        whole = json.dumps({"instances": ["a" * (server.buffered.limit - 100)]}).encode()
        with send("ben", whole):
            until(lambda: dispatcher.waiting == 1)
        dispatcher.held = False


def test_nothing_stays_counted_whatever_happens(model: Any) -> None:
    """Requests in pieces, some answered, some refused, some cut off, two on one connection, over too small a pool."""
    service, dispatcher = model
    dice = random.Random(7)
    with listening(service, counter()[0], max_buffered_bytes=300_000, max_body_bytes=200_000) as server:
        for turn in range(120):
            dispatcher.held = dice.random() < 0.3
            clients = []
            for _ in range(4):
                client = connect(server)
                clients.append(client)
                size = dice.choice([3, 500, 60_000, 130_000, 250_000])
                body = json.dumps({"instances": ["a" * size]}).encode()
                path = dice.choice([PREDICT, PREDICT, "/v1/nothing", "/v1/models/counter:predict"])
                raw = (head(path, len(body)) + body) * dice.choice([1, 1, 2])
                with contextlib.suppress(ConnectionError):
                    client.sendall(raw[: dice.choice([len(raw), len(raw), len(body) // 2])])
            if dice.random() < 0.5:
                until(lambda: server.buffered.held <= server.buffered.limit)
            for client in clients:
                client.close()
            dispatcher.held = False
            if turn % 20 == 0:
                until(lambda: at_rest(server))
        until(lambda: at_rest(server))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("path", [PREDICT, "/v1/embeddings"])
def test_who_sends_another_request_and_hangs_up_is_missed(path: str, apart: bool) -> None:
    service, dispatcher = function()
    encoder, other = embedder()
    line = dispatcher if path == PREDICT else other
    line.held = True
    body = b'{"instances": [1]}' if path == PREDICT else b'{"input": "fox"}'
    raw = head(path, len(body)) + body
    with listening(service, encoder) as server:
        with connect(server) as client:
            client.sendall(raw if apart else raw * 2)
            until(lambda: line.waiting == 1)
            if apart:
                client.sendall(raw)
            until(lambda: any(each.pipeline for each in list(server.server.server_state.connections)))
        until(lambda: line.waiting == 0)
        until(lambda: at_rest(server))
        assert len(line.submitted) == 1
        line.held = False


@pytest.mark.parametrize(("path", "count", "expected"), [("/v1/nothing", 2000, 17), ("/" + "a" * 40_000, 20, 3)])
def test_few_requests_wait_for_the_one_before_them(
    path: str, count: int, expected: int, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    most = 0
    begin = protocol.BoundedProtocol.on_headers_complete

    def counting(self: protocol.BoundedProtocol) -> Any:
        nonlocal most
        found = begin(self)
        most = max(most, len(self.pipeline))
        return found

    monkeypatch.setattr(protocol.BoundedProtocol, "on_headers_complete", counting)
    with listening(model[0]) as server, connect(server) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode() * count + head(path, 0, "Connection: close\r\n"))
        assert read_all(client).count(b"HTTP/1.1 404") == count + 1
        until(lambda: at_rest(server))
    # Of one a piece may have had the last byte of its head.
    assert 1 <= most <= expected


@pytest.mark.parametrize("path", [PREDICT, "/v1/embeddings"])
def test_what_comes_behind_a_request_is_counted_and_answered_when_there_is_room(path: str) -> None:
    service, dispatcher = function()
    encoder, other = embedder()
    line = dispatcher if path == PREDICT else other
    line.held = True
    body = b'{"instances": [1]}' if path == PREDICT else b'{"input": "fox"}'
    with listening(service, encoder) as server:
        with connect(server) as client:
            client.sendall(head(path, len(body)) + body)
            until(lambda: line.waiting == 1)
            client.sendall(b"GET /version HTTP/1.1\r\n\r\n" * 4000 + head("/v1/nothing", 0, "Connection: close\r\n"))
            until(lambda: server.buffered.held > 30_000)
            line.held = False
            answers = read_all(client)
            assert answers.count(b"HTTP/1.1 200") == 4001
            assert answers.rindex(b"HTTP/1.1 404") > answers.rindex(b"HTTP/1.1 200")
        until(lambda: at_rest(server))
        line.held = True
        server.buffered.add(server.buffered.limit - 1000)
        with connect(server) as client:
            client.sendall(head(path, len(body)) + body + b"GET /version HTTP/1.1\r\n\r\n" * 4000)
            assert read_all(client) == b"", "there is no room for what it sent"
        until(lambda: server.buffered.held == server.buffered.limit - 1000)
        line.held = False


def test_a_body_that_nobody_reads_takes_no_room(model: Any) -> None:
    with listening(model[0], max_buffered_bytes=1_000_000) as server, connect(server) as client:
        client.sendall(b"GET /v1/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n" + b"a" * 900_000)
        until(lambda: any(each._body_bytes == 900_000 for each in list(server.server.server_state.connections)))
        assert b"text/event-stream" in client.recv(65536)
        body = {"instances": ["a" * 200_000]}
        assert httpx.post(server.url + PREDICT, json=body).status_code == 200


def test_the_count_of_a_body() -> None:
    buffered = Buffered(100)
    first, second = HeldBody(buffered), HeldBody(buffered)
    assert first.take(60)
    assert not second.take(50)
    assert (second.refused, second.dropped, buffered.held) == (True, 50, 60)
    assert not second.take(1)
    first.give(20)
    assert first.take(10)
    assert not first.take(60)
    assert (first.refused, buffered.held) == (True, 0)
    first.release()
    assert buffered.held == 0


def test_room_for_messages_of_unknown_size() -> None:
    async def go() -> None:
        buffered = Buffered(100)
        await buffered.expect(25)
        await buffered.expect(25)
        third, fourth = (asyncio.create_task(buffered.expect(25)) for _ in range(2))
        await asyncio.sleep(0)
        assert not third.done()
        assert buffered.take(50)
        buffered.arrived(25, 5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert third.done() is False
        assert buffered.held == 80
        buffered.give(50)
        await third
        fourth.cancel()
        await asyncio.wait([fourth])
        buffered.arrived(25, 0)
        buffered.arrived(25, 0)
        assert buffered.held == 5
        assert buffered.take(90)
        with pytest.raises(ApiError, match="max_buffered_bytes"):
            await buffered.expect(25)
        buffered.give(95)
        assert buffered.held == 0
        await buffered.expect(100)
        buffered.arrived(100, 0)
        assert buffered.held == 0

    asyncio.run(asyncio.wait_for(go(), 20))


# Rates and times


@pytest.mark.parametrize("path", [PREDICT, "/v1/files"])
def test_who_drips_is_closed(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(exchange, "BODY_GRACE_S", 0.1)
    kind = 'Content-Type: multipart/form-data; boundary="x"\r\n' if path == "/v1/files" else JSON
    with listening(model[0], min_body_rate=10**6, data_dir=str(tmp_path)) as server, connect(server) as client:
        client.sendall(head(path, 100_000, kind) + b"  ")
        answer = read_all(client)
        assert b"HTTP/1.1 408" in answer
        assert b"(min_body_rate)" in answer
        until(lambda: at_rest(server))


def test_a_slow_body_that_keeps_its_rate_is_taken(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(exchange, "BODY_GRACE_S", 0.1)
    body = b'{"instances": [1]' + b" " * 20_000 + b"}"
    with listening(model[0], min_body_rate=4000) as server, connect(server) as client:
        client.sendall(head(PREDICT, len(body), JSON + "Connection: close\r\n") + body[:10_000])
        time.sleep(0.3)
        client.sendall(body[10_000:])
        assert b"HTTP/1.1 200" in read_all(client)


class EndlessClient(FakeClient):
    """Generates until it is told to stop."""

    def __init__(self, reply: list[int]) -> None:
        super().__init__(reply)
        self.info = msgspec.structs.replace(INFO, max_model_len=10**8, num_blocks=10**7)

    async def _answer(self, streams: list[Stream]) -> None:
        step = 0
        while any(stream.request.id not in self.cancelled for stream in streams):
            for stream in streams:
                for _ in range(50):
                    stream.push(self._update(stream.request, step))
                    step += 1
            await asyncio.sleep(0)


def test_who_does_not_read_is_closed_and_the_sequence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # Or that would end it before.
    monkeypatch.setattr(sequence_service, "_MOST_UNREAD", 2**40)
    words = tokenizer()
    client = EndlessClient(words.encode("hello world! "))
    service = SequenceService(client, words, "tiny", ServerConfig())
    body = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 10**7}).encode()
    with listening(service, write_timeout_s=0.2) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connect(server) as reader:
            reader.sendall(head("/v1/completions", len(body)) + body)
            until(lambda: server.buffered.held > len(body))
            until(lambda: bool(client.cancelled))
            until(lambda: at_rest(server))


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_who_does_not_read_an_answer_is_closed(more: str, model: Any) -> None:
    body = json.dumps({"instances": ["a" * 1_000_000]}).encode()
    with listening(model[0], write_timeout_s=0.2) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connect(server) as reader:
            reader.sendall(head(PREDICT, len(body), JSON + more) + body)
            until(lambda: server.buffered.held > len(body))
            until(lambda: at_rest(server))


def test_who_reads_slowly_gets_it_all(model: Any) -> None:
    body = json.dumps({"instances": ["a" * 400_000]}).encode()
    with listening(model[0], write_timeout_s=0.2) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(20)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(head(PREDICT, len(body), JSON + "Connection: close\r\n") + body)
            got = 0
            while part := reader.recv(40_000):
                got += len(part)
                time.sleep(0.02)
            assert got > 800_000


def test_unsent_answers_beyond_the_room_there_is_close_their_connection(model: Any) -> None:
    body = json.dumps({"instances": ["a" * 1_000_000]}).encode()
    with listening(model[0]) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        others = server.buffered.limit - len(body) - 10
        server.buffered.add(others)
        with connect(server) as client:
            client.sendall(head(PREDICT, len(body)) + body)
            assert len(read_all(client)) < 2_000_000
        until(lambda: server.buffered.held == others)


@pytest.mark.parametrize("headers", [{}, {"X-Request-Timeout-Ms": "100000"}])
def test_no_request_takes_for_ever(headers: dict[str, str]) -> None:
    service, dispatcher = function()
    encoder, other = embedder()
    dispatcher.held = other.held = True
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    with (
        listening(service, encoder, request_timeout_s=0.2) as server,
        httpx.Client(base_url=server.url, headers=headers) as client,
    ):
        for path, body in (
            (PREDICT, {"instances": [1]}),
            (PREDICT, {"instances": ["a" * 100_000]}),
            ("/v1/embeddings", {"input": "fox", "model": "embedder"}),
            (
                "/v2/models/embedder/infer",
                {"inputs": [text]},
            ),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 504, answer.text
            assert "0.2 s (request_timeout_s)" in answer.text
        until(lambda: server.buffered.held == 0)
        dispatcher.held = other.held = False


def test_a_stream_ends_with_the_error_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # It comes faster than anybody reads.
    monkeypatch.setattr(sequence_service, "_MOST_UNREAD", 2**40)
    words = tokenizer()
    client = EndlessClient(words.encode("hello world! "))
    service = SequenceService(client, words, "tiny", ServerConfig())
    body = {"prompt": "hello", "stream": True, "max_tokens": 10**7}
    with listening(service, request_timeout_s=0.3) as server:
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).text
        last = json.loads(text.rstrip().rpartition("data: ")[2])
        assert last["error"]["code"] == "deadline_exceeded"
        assert "(request_timeout_s)" in last["error"]["message"]
        until(lambda: bool(client.cancelled))


# Connections and uploads


def test_connections_beyond_the_limit_are_told_so(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(protocol, "SPARE_CONNECTIONS", 1)
    body = b'{"instances": [1]}'
    with listening(model[0], max_connections=2) as server:
        connections = server.server.server_state.connections
        kept = [connect(server) for _ in range(2)]
        until(lambda: len(connections) == 2)
        with connect(server) as third:
            third.sendall(head(PREDICT, len(body)) + body)
            answer = read_all(third)
            assert b"HTTP/1.1 429" in answer
            assert b"2 connections already (max_connections)" in answer
        until(lambda: len(connections) == 2)
        with connect(server) as probe:
            probe.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP/1.1 200" in read_all(probe)
        until(lambda: len(connections) == 2)
        with connect(server) as spare, connect(server) as beyond:
            assert read_all(beyond) == b""
            spare.close()
        for each in kept:
            each.sendall(head(PREDICT, len(body), JSON + "Connection: close\r\n") + body)
            assert b"HTTP/1.1 200" in read_all(each)
            each.close()
        assert httpx.post(server.url + PREDICT, json={"instances": [1]}).status_code == 200
        until(lambda: at_rest(server))


def test_one_address_may_have_all_connections_until_another_comes(model: Any) -> None:
    service, dispatcher = model
    dispatcher.held = True
    body = b'{"instances": [1]}'
    raw = head(PREDICT, len(body), JSON + "Connection: close\r\n") + body
    with listening(service, max_connections=4) as server, contextlib.ExitStack() as stack:

        def new(address: str = "127.0.0.1") -> socket.socket:
            return stack.enter_context(connect(server, address))

        connections = server.server.server_state.connections
        coming, busy, idle, late = [new() for _ in range(4)]
        coming.sendall(raw[:-5])
        busy.sendall(raw)
        idle.sendall(b"G")
        until(lambda: any(each._body_bytes for each in list(connections)) and dispatcher.waiting == 1)
        until(lambda: len(connections) == 4)
        fifth = new()
        fifth.sendall(raw)
        assert b"4 connections already (max_connections)" in read_all(fifth)
        until(lambda: len(connections) == 4)
        other = new("127.0.0.2")
        other.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" in other.recv(65536)
        assert read_all(idle) == b"", "it had asked nothing"
        third = new("127.0.0.3")
        third.sendall(raw)
        assert b"HTTP/1.1 429" in read_all(third), "the first has no more than its share now"
        dispatcher.held = False
        coming.sendall(raw[-5:])
        late.sendall(raw)
        for each in (coming, busy, late):
            assert b"HTTP/1.1 200" in read_all(each)


class Holding:
    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.gone = False

    def give_way(self) -> None:
        self.gone = True


def test_who_has_more_than_a_share_makes_room_and_nobody_is_cut_off() -> None:
    places = Places(8)
    own = [Holding(stage) for stage in (BUSY, COMING, IDLE, BUSY, BUSY, BUSY, BUSY, BUSY)]
    assert [places.enter("a", each) for each in own] == [*range(-7, 1)]
    assert places.enter("a", Holding(IDLE)) == 1
    others = [Holding(IDLE) for _ in range(3)]
    # The ninth of the first client goes as well.
    assert places.enter("b", others[0]) == 0
    assert [each.gone for each in own[:4]] == [False, False, True, False]
    assert places.enter("b", others[1]) == 0
    assert [each.gone for each in own[:4]] == [False, True, True, False]
    assert places.enter("b", others[2]) == 1, "six of eight are no more than a share"
    for each in (*own, *own, *others):
        places.leave(each)
    assert places.beyond == -8
    for each in own:
        each.stage = BUSY
        places.enter("a", each)
    assert places.enter("b", others[0]) == 1, "what is being answered is not cut off"


@pytest.fixture
def files(tmp_path: Path, model: Any) -> Iterator[Listening]:
    with listening(model[0], data_dir=str(tmp_path / "data"), max_uploads=1) as server:
        yield server


def upload(server: Listening, size: int) -> httpx.Response:
    form = {"file": ("a.jsonl", b"x" * size)}
    return httpx.post(f"{server.url}/v1/files", files=form, data={"purpose": "batch"}, timeout=20)


def test_uploads_beyond_the_limit_come_too_soon(files: Listening) -> None:
    start = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 3_000_000
    end = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    kind = 'Content-Type: multipart/form-data; boundary="x"\r\nConnection: close\r\n'
    assert upload(files, 10).status_code == 200
    with connect(files) as first:
        first.sendall(head("/v1/files", len(start) + len(end), kind) + start)
        folder = files.batches._folder
        until(lambda: folder.uploads.total() == 1)
        for size in (10, 500_000):
            second = upload(files, size)
            assert second.status_code == 429
            assert "(max_uploads)" in second.json()["error"]["message"]
            assert second.headers["Retry-After"] == "1"
        until(lambda: files.buffered.held < 2**20 + 300_000)
        first.sendall(end)
        assert b'"bytes":3000000' in read_all(first)
    assert upload(files, 2_000_000).status_code == 200
    with connect(files) as cut:
        cut.sendall(head("/v1/files", len(start) + len(end), kind) + start)
        until(lambda: folder.uploads.total() == 1)
    until(lambda: folder.uploads.total() == 0)
    until(lambda: at_rest(files))


def test_an_upload_without_room_is_refused(files: Listening) -> None:
    assert upload(files, 10).status_code == 200
    others = files.buffered.limit - 1000
    files.buffered.add(others)
    answer = upload(files, 50_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "buffers_full")
    files.buffered.give(others)
    until(lambda: at_rest(files))
    assert len(httpx.get(f"{files.url}/v1/files").json()["data"]) == 1


# What the system allows


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What this process is said to be allowed to have open, softly and at most, and what that is raised to."""
    said = [(256, 1536)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: said[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: said.append(limits))
    return said


def test_no_more_connections_are_let_in_than_may_be_open(
    open_files: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert front.allow_connections(ServerConfig()).max_connections == 1024
    assert open_files[-1] == (1536, 1536)
    assert "max_connections is 1024 instead" in caplog.text
    caplog.clear()
    assert front.allow_connections(ServerConfig(max_connections=1000)).max_connections == 1000
    assert not caplog.text


def test_connections_that_were_asked_for_and_may_not_be_open_are_refused(open_files: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match=r"max_connections: 1025 .* take 1537 .* have 1536; .* 1024 or fewer"):
        front.allow_connections(ServerConfig(max_connections=1025))
    with pytest.raises(ConfigError, match="set it to 512 or fewer"):
        front.allow_connections(ServerConfig(max_connections=1000, grpc_port=8001))
    open_files.append((100, 100))
    with pytest.raises(ConfigError, match="this process may have 100; raise that limit"):
        front.allow_connections(ServerConfig())


def test_an_address_of_a_kind_that_the_system_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*kind: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(ConfigError, match=r"can't listen on :: port 8000: Address family not supported .* see --host"):
        front.bind(ServerConfig(host="::"))

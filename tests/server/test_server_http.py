"""What the HTTP protocol class adds: bounds on the request line and headers, in bytes and in time."""

import asyncio
import contextlib
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chairlift.config.server import ServerConfig
from chairlift.server.http import protocol


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@contextlib.asynccontextmanager
async def _connected(
    app: Any = _hello, keep_alive: float = 75
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = protocol.make_server(app, ServerConfig())
    server.config.port, server.config.timeout_keep_alive = 0, keep_alive
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await task


def test_uvicorn_has_what_is_hooked() -> None:
    """Those before 0.45 begin a request without asking, and then nothing lets go of its body."""
    assert callable(HttpToolsProtocol._start_asgi_task)
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (wanted,) = (each for each in map(Requirement, about["dependencies"]) if each.name == "uvicorn")
    assert "0.44.0" not in wanted.specifier
    assert "0.45.0" in wanted.specifier


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def _post(body: bytes, more: bytes = OFFER) -> bytes:
    return b"POST /a HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (more, len(body), body)


LINE, HEADER = b"GET / HT", b"GET / HTTP/1.1\r\nHost: "


# One that was used before and then says nothing is idle: keep_alive_s is its limit.
@pytest.mark.parametrize(
    ("before", "start"),
    [(b"", b""), (b"", LINE), (b"", HEADER), (GET, LINE), (GET, HEADER), (GET * 2, LINE), (GET * 2, HEADER)],
)
def test_slow_head_is_dropped(before: bytes, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)

    async def go() -> None:
        async with _connected() as (reader, writer):
            writer.write(before + start)
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.count(b"200 OK") == len(before) // len(GET)

    asyncio.run(go())


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
def test_large_head_is_refused(before: bytes) -> None:
    async def go() -> None:
        async with _connected() as (reader, writer):
            writer.write(before)
            writer.write(b"GET / HTTP/1.1\r\nX: ")
            for _ in range(70):
                with contextlib.suppress(ConnectionError):
                    writer.write(b"a" * 1000)
                    await writer.drain()
            answer = await asyncio.wait_for(reader.read(), 5)
            assert b"HTTP/1.1 400" in answer

    asyncio.run(go())


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is sent comes in one segment, up to an X; and how many bytes the parser is given at a time."""
    come, parse = protocol.BoundedProtocol.data_received, protocol.BoundedProtocol._parse
    seen, pieces = bytearray(), []

    def gather(connection: protocol.BoundedProtocol, data: bytes) -> None:
        seen.extend(data)
        if seen.endswith(b"X"):
            whole = bytes(seen[:-1])
            seen.clear()
            come(connection, whole)

    def note(connection: protocol.BoundedProtocol, piece: bytes | memoryview) -> None:
        pieces.append(len(piece))
        parse(connection, piece)

    monkeypatch.setattr(protocol.BoundedProtocol, "data_received", gather)
    monkeypatch.setattr(protocol.BoundedProtocol, "_parse", note)
    return pieces


@pytest.mark.parametrize(("beyond", "status"), [(0, b"200"), (1, b"400"), (200_000, b"400")])
def test_a_head_is_as_large_as_it_is_however_it_comes(beyond: int, status: bytes, gathered: list[int]) -> None:
    start, end = b"GET / HTTP/1.1\r\nConnection: close\r\nA: ", b"\r\n\r\n"
    size = protocol.MAX_HEAD_BYTES + beyond - len(start) - len(end)

    async def go() -> None:
        async with _connected() as (reader, writer):
            writer.write(start + b"a" * size + end + b"X")
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 " + status)

    asyncio.run(go())


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Says what came."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    answer = b"<%b %b %b>" % (scope["method"].encode(), scope["raw_path"], body)
    length = (b"content-length", b"%d" % len(answer))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": answer})


def test_a_small_request_is_parsed_at_once_and_so_is_a_body(gathered: list[int]) -> None:
    small, large = _post(b'{"prompt": "a"}', b""), _post(b"ab" * 500_000, b"")
    head = large.index(b"\r\n\r\n") + 4

    async def go() -> None:
        async with _connected(_echo) as (reader, writer):
            writer.write(small + b"X")
            await reader.readuntil(b">")
            assert gathered == [len(small)]
            writer.write(large + GET + b"X")
            assert len(await reader.readexactly(1_000_000)) == 1_000_000
            await reader.readuntil(b"<GET / >")
            assert gathered[1:] == [protocol.PIECE_BYTES, len(large) - protocol.PIECE_BYTES, len(GET)]
            assert head < protocol.PIECE_BYTES

    asyncio.run(go())


def test_requests_in_one_segment_are_taken_in_as_there_is_room(gathered: list[int]) -> None:
    """Few of them are there at a time, and all are answered, in their order, whatever size they have."""
    sent = [_post(b"%d " % number + b"a\n\n" * (number % 7 * 1000), b"") for number in range(200)]

    async def go() -> None:
        async with _connected(_echo) as (reader, writer):
            writer.write(b"".join(sent) + b"X")
            for number, one in enumerate(sent):
                answer = await reader.readuntil(b">")
                assert b"<POST /a %d " % number in answer
                assert len(answer) > len(one) - 100

    asyncio.run(go())


def test_what_comes_after_a_body_is_no_header() -> None:
    scopes: list[Any] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        await _echo(scope, receive, send)
        scopes.append(scope)

    trailers = b"x-request-priority: -5\r\nhost: y\r\nexpect: 100-continue\r\n"
    head = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def go() -> None:
        async with _connected(note) as (reader, writer):
            writer.write(head + b"3\r\nabc\r\n0\r\n" + trailers + b"\r\n" + GET)
            assert b"<POST /b abc>" in await reader.readuntil(b">")
            assert b"<GET / >" in await reader.readuntil(b">")
        assert scopes[0]["headers"] == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]
        assert scopes[1]["headers"] == [(b"host", b"x")]

    asyncio.run(go())


@pytest.mark.parametrize("line", [b"ab: cd\r\n", b"a", b"0"], ids=["many", "long", "size"])
@pytest.mark.parametrize("path", [b"GET /", b"POST /"])
def test_there_is_an_end_to_what_comes_after_a_body(path: bytes, line: bytes) -> None:
    """Before an answer that is a 400; after it nobody asked for another."""
    app = _hello if path.startswith(b"GET") else _echo

    async def go() -> None:
        async with _connected(app) as (reader, writer):
            writer.write(path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0")
            if app is _hello:
                await reader.readuntil(b"hi")
            writer.write(b"\r\n" * (line != b"0"))
            for _ in range(100):
                with contextlib.suppress(ConnectionError):
                    writer.write(line * (2000 // len(line)))
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(), 20)
                assert answer == b"" if app is _hello else answer.startswith(b"HTTP/1.1 400")

    asyncio.run(go())


def test_what_nobody_reads_is_no_head(gathered: list[int]) -> None:
    """What comes behind a connection's last request, and what came around the body before a head."""
    last = GET.replace(b"Host", b"Connection: close\r\nHost")
    chunked = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    trailers = b"a: %b\r\n" % (b"b" * 6000) * 10 + b"\r\n"

    async def go() -> None:
        async with _connected(_echo) as (reader, writer):
            writer.write(chunked + trailers + GET.replace(b"Host", b"A: " + b"a" * 20_000 + b"\r\nHost"))
            writer.write(last + b"a" * 100_000 + b"X")
            assert (await asyncio.wait_for(reader.read(), 20)).count(b"HTTP/1.1 200") == 3

    asyncio.run(go())


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "told"),
    [(b"nonsense\r\n\r\n", True), (CHUNKED + b"zz\r\n", True), (CHUNKED + b"0\r\n\r\nnonsense\r\n\r\n", False)],
    ids=["head", "body", "behind another"],
)
def test_what_is_no_request_is_not_taken_for_the_answer_to_another(sent: bytes, told: bool) -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def go() -> None:
        async with _connected(never) as (reader, writer):
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), 20)
            assert answer.startswith(b"HTTP/1.1 400") if told else answer == b""

    asyncio.run(go())


@pytest.mark.parametrize("before", [GET * 16, _post(b"a" * 70_000, b"")], ids=["many", "large"])
def test_where_there_is_no_room_a_head_has_the_time_that_it_needs(
    before: bytes, gathered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    go_on = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await _hello(scope, receive, send)

    async def go() -> None:
        async with _connected(wait) as (reader, writer):
            writer.write(GET + before + GET[:-5] + b"X")
            await asyncio.sleep(0.2)
            monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 30.0)
            go_on.set()
            for _ in range(1 + (before.count(GET) or 1)):
                await asyncio.wait_for(reader.readuntil(b"hi"), 20)
            writer.write(GET[-5:] + b"X")
            await asyncio.wait_for(reader.readuntil(b"hi"), 20)

    asyncio.run(go())


def test_a_body_may_have_more_around_it_than_a_head() -> None:
    async def go() -> None:
        async with _connected(_echo) as (reader, writer):
            writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"1;a=b\r\na\r\n" * 20_000 + b"0\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b">"), 20)).endswith(b"a" * 20_000 + b">")

    asyncio.run(go())


@pytest.mark.parametrize(
    ("start", "more"),
    [(GET, b"\r\n"), (GET.replace(b"Host", b"Content-Length: 10\r\nHost"), b"1"), (_post(b"ab", b"")[:-1], b"")],
    ids=["empty line", "body", "no body"],
)
def test_a_connection_is_idle_until_a_request_begins(start: bytes, more: bytes) -> None:
    async def go() -> None:
        async with _connected(keep_alive=0.2) as (reader, writer):
            writer.write(start)
            await reader.readuntil(b"hi")
            writer.write(more)
            assert await asyncio.wait_for(reader.read(), 20) == b""

    asyncio.run(go())


def test_a_connection_is_not_idle_once_a_request_has_begun() -> None:
    """Its head may have begun to come before the answer to the one before it was complete."""
    go_on = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await asyncio.sleep(0.2 if scope["path"] == "/slow" else 0)
        await _hello(scope, receive, send)

    async def go() -> None:
        async with _connected(wait, keep_alive=0.05) as (reader, writer):
            slow = GET.replace(b"/ ", b"/slow ")
            writer.write(GET + slow[:-5])
            await asyncio.sleep(0.01)
            go_on.set()
            await reader.readuntil(b"hi")
            writer.write(slow[-5:])
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"hi"), 20)

    asyncio.run(go())


def test_ordinary_requests_are_not_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)

    async def go() -> None:
        async with _connected() as (reader, writer):
            for _ in range(3):
                writer.write(GET)
                assert b"200 OK" in await reader.readuntil(b"hi")
                await asyncio.sleep(0.3)

    asyncio.run(go())


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_whoever_offers_another_protocol_is_answered_in_this_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes in one segment with what, and bodies are as they were."""
    whole = protocol.BoundedProtocol.data_received

    def in_pieces(connection: protocol.BoundedProtocol, data: bytes) -> None:
        for start in range(0, len(data), size):
            whole(connection, data[start : start + size])

    monkeypatch.setattr(protocol.BoundedProtocol, "data_received", in_pieces)
    heads: list[list[bytes]] = []

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        heads.append([name for name, _ in scope["headers"]])
        await _echo(scope, receive, send)

    chunked = b"POST /b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" % OFFER
    sent = [
        _post(b"first"),
        _post(b"\r\n\r\n" + OFFER + b"\r\n"),
        GET.replace(b"Host", b"Connection: keep-alive, upgrade\r\nUPGRADE: websocket, h2c\r\nHost"),
        chunked,
        _post(b"plain", b"Upgrade: h2c\r\n"),
        _post(b"", b""),
        _post(b"last", b"Connection: upgrade, close\r\nupgrade:x\r\n"),
    ]

    async def go() -> bytes:
        async with _connected(echo) as (reader, writer):
            writer.write(b"".join(sent))
            return await asyncio.wait_for(reader.read(), 20)

    assert re.findall(rb"<(.*?)>", asyncio.run(go()), re.DOTALL) == [
        b"POST /a first",
        b"POST /a \r\n\r\n" + OFFER + b"\r\n",
        b"GET / ",
        b"POST /b abc",
        b"POST /a plain",
        b"POST /a ",
        b"POST /a last",
    ]
    assert heads[0] == [b"host", b"connection", b"http2-settings", b"content-length"]
    assert heads[3] == [b"connection", b"http2-settings", b"transfer-encoding"]


def test_nobody_is_connected_to_others() -> None:
    async def go() -> None:
        async with _connected() as (reader, writer):
            writer.write(b"CONNECT http://x/ HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.count(b"HTTP/1.1") == answer.count(b"HTTP/1.1 400") == 1

    asyncio.run(go())


def test_it_ends_when_told_and_not_at_its_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, while it sleeps for what would be an hour."""
    monkeypatch.setattr(protocol, "_DATE_S", 3600.0)

    async def go() -> None:
        server = protocol.make_server(_hello, ServerConfig())
        server.config.port = 0
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await asyncio.to_thread(setattr, server, "should_exit", True)
        await task
        # It is told nothing any more.
        server.should_exit = True

    asyncio.run(go())


def test_the_date_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_DATE_S", 0.01)

    async def go() -> None:
        async with _connected() as (reader, writer):
            seen = set()
            while len(seen) < 2:
                writer.write(GET)
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await reader.readexactly(2)
                seen.add(next(line for line in head.splitlines() if line.startswith("date:")))

    asyncio.run(go())

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
async def _connected(app: Any = _hello) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = protocol.make_server(app, ServerConfig())
    server.config.port = 0
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


@pytest.mark.parametrize("before", [b"", GET, GET * 2], ids=["new", "second", "third"])
@pytest.mark.parametrize("start", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: "], ids=["nothing", "line", "header"])
def test_slow_head_is_dropped(before: bytes, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    if before and not start:
        return  # an idle connection that was used before: keep_alive_s is its limit

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


def test_ordinary_requests_are_not_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)

    async def go() -> None:
        async with _connected() as (reader, writer):
            for _ in range(3):
                writer.write(GET)
                assert b"200 OK" in await reader.readuntil(b"hi")
                await asyncio.sleep(0.3)

    asyncio.run(go())


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def _post(body: bytes, more: bytes = OFFER) -> bytes:
    return b"POST /a HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (more, len(body), body)


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
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        answer = b"<%b %b %b>" % (scope["method"].encode(), scope["raw_path"], body)
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})

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

"""What the HTTP protocol class adds: bounds on the request line and headers, in bytes and in time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chairlift.config.server import ServerConfig
from chairlift.server.http import protocol


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@contextlib.asynccontextmanager
async def _connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = protocol.make_server(_hello, ServerConfig())
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

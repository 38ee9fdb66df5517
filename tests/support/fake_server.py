"""A server that gives what a test wants, for load generators to meet."""

import asyncio
import json
import socket
import threading
from typing import Any

from chairlift.bench.completion_stream import Target


class FakeServer:
    """Answers every request with the same pieces, each one chunk; keeps the bodies that it got."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.status = "200 OK"
        self.content_type = ""
        self.heads: list[str] = []
        self.hangs = False
        self.bodies: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._loop.run_until_complete(asyncio.start_server(self._answer, sock=listener))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def target(self, **extra: Any) -> Target:
        return Target.of(f"http://127.0.0.1:{self.port}/v1/", "m", extra)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head.decode())
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        if self.hangs:
            await reader.read()
        kind = f"Content-Type: {self.content_type}\r\n" if self.content_type else ""
        writer.write(f"HTTP/1.1 {self.status}\r\n{kind}Transfer-Encoding: chunked\r\n\r\n".encode())
        for piece in self.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

"""Parts of an answer written to its connection without the task that answers being woken for each."""

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# A key of an ASGI scope, whose value is a PartWriter: an HTTP server of ours has put it there, so no client can.
WRITER = "chairlift.writer"


class PartQueue:
    """Parts for the connections of one server, written together once the running callback has made all of them.

    A client on the same cores runs as soon as something is written for it. Between two parts that are being made it
    would take their program out of the nearest caches, each time.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, part: bytes) -> None:
        """Have a part written before anything that is only now called soon; not if the connection closes before."""
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._write)
        self._parts.append((transport, part))

    def _write(self) -> None:
        parts, self._parts = self._parts, []
        for transport, part in parts:
            if not transport.is_closing():
                transport.write(part)


class PartWriter:
    """Writes what follows the first part of an answer, as the server's own `send` would.

    Only while nobody waits in that, and only parts that others are to follow.
    """

    __slots__ = ("_begun", "_cycle", "_flow", "_queue")

    def __init__(self, cycle: RequestResponseCycle, queue: PartQueue) -> None:
        self._cycle, self._flow, self._queue = cycle, cycle.flow, queue
        self._begun = False

    @property
    def is_ready(self) -> bool:
        """Whether a part can be written now: its answer is under way, and its client reads as fast as it comes."""
        cycle = self._cycle
        if not self._begun:
            # Chunks are what an answer has that has started and does not say its length.
            self._begun = bool(cycle.response_started and cycle.chunked_encoding)
        return self._begun and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, *parts: bytes) -> None:
        """Have parts, of which not all are empty, written as one chunk, before whoever is woken from now on writes."""
        part = b"".join(parts)
        self._queue.add(self._cycle.transport, b"%x\r\n%b\r\n" % (len(part), part))

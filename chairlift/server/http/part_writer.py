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
        self._parts: list[tuple[RequestResponseCycle, bytes]] = []

    def add(self, cycle: RequestResponseCycle, part: bytes) -> None:
        """Have a part of an answer written before anything that is only now called soon.

        Not if the connection closes, or the answer is complete, before.
        """
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append((cycle, part))

    def flush(self) -> None:
        """Write all that there is."""
        parts, self._parts = self._parts, []
        for cycle, part in parts:
            if not (cycle.response_complete or cycle.transport.is_closing()):
                cycle.transport.write(part)


class PartWriter:
    """Writes what follows the first part of an answer, as the server's own `send` would.

    Only while nobody waits in that, and only parts that others are to follow. Whoever sends the first part says so by
    `follows`: what goes out before it may be none. `written` is how many parts went out by this way.
    """

    __slots__ = ("_begun", "_cycle", "_flow", "_queue", "follows", "written")

    def __init__(self, cycle: RequestResponseCycle, queue: PartQueue) -> None:
        self._cycle, self._flow, self._queue = cycle, cycle.flow, queue
        self._begun = self.follows = False
        self.written = 0

    @property
    def is_ready(self) -> bool:
        """Whether a part can be written now: its answer is under way, and its client reads as fast as it comes."""
        cycle = self._cycle
        if not self._begun:
            # Chunks are what an answer has that has started and does not say its length.
            self._begun = bool(self.follows and cycle.response_started and cycle.chunked_encoding)
        return self._begun and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, *parts: bytes) -> None:
        """Have parts, of which not all are empty, written as one chunk, before whoever is woken from now on writes."""
        part = b"".join(parts)
        self.written += 1
        self._queue.add(self._cycle, b"%x\r\n%b\r\n" % (len(part), part))

    def flush(self) -> None:
        """Write now what is yet to be written."""
        self._queue.flush()

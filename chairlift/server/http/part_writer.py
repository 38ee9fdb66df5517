"""Parts of an answer written to its connection at once, without the task that answers being woken for each."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# A key of an ASGI scope, whose value is a PartWriter: an HTTP server of ours has put it there, so no client can.
WRITER = "chairlift.writer"


class PartWriter:
    """Writes what follows the first part of an answer, as the server's own `send` would.

    Only while nobody waits in that, and only parts that others are to follow.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether a part can be written now: its answer is under way, and its client reads as fast as it comes."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        return bool(cycle.response_started and cycle.chunked_encoding) and not cycle.transport.is_closing()

    def write(self, part: bytes) -> None:
        """Write a part that is not empty, as one chunk."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

"""What a client leaves unread of its answers: counted, and for so long."""

import asyncio
import logging

from uvicorn.protocols.http.flow_control import FlowControl

from chairlift.server.http.buffered import Buffered

log = logging.getLogger(__name__)


class Unsent:
    """The bytes that wait for the client of one connection, which is closed where it reads too slowly or too little."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, buffered: Buffered, timeout_s: float) -> None:
        self._transport, self._flow, self._buffered, self._timeout_s = transport, flow, buffered, timeout_s
        # Bytes that are counted, those that waited when somebody looked, and whether some went since.
        self._counted = self._seen = 0
        self._wrote = False
        self._timer: asyncio.TimerHandle | None = None

    def grow(self) -> None:
        """More waits than the connection takes."""
        self._count(self._transport.get_write_buffer_size())
        if self._buffered.held > self._buffered.limit:
            self.drop("it leaves more of its answer unread than there is room for (max_buffered_bytes)")
        else:
            self.watch()

    def shrink(self) -> None:
        """The client has read most of it."""
        self._wrote = True
        self._count(0)

    def end(self) -> None:
        """The connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._count(0)

    def watch(self) -> None:
        """Run the clock by which the client has to have read something."""
        if self._timer is None:
            self._seen, self._wrote = self._transport.get_write_buffer_size(), False
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def drop(self, why: str) -> None:
        """Close the connection without waiting for the client; not at once, as the transport may be in a write."""
        log.info("closing a connection: %s", why)
        asyncio.get_running_loop().call_soon(self._transport.abort)

    def _count(self, size: int) -> None:
        self._buffered.give(self._counted)
        self._buffered.add(size)
        self._counted = size

    def _check(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if not left or not (self._flow.write_paused or self._transport.is_closing()):
            return
        if self._wrote or left < self._seen:
            self.watch()
        else:
            self.drop(f"it read nothing for {self._timeout_s:g} s (write_timeout_s)")

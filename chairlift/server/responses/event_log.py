"""The events of a response in the background: kept as they come, for whoever follows them."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from chairlift.server.http.exchange import off_loop

_END = b"\n\n"
# Most events that are sent at once, and bytes that are unpacked at once.
_AT_ONCE, _PIECE = 256, 2**18


class EventLog:
    """Server-sent events, numbered from 0. All methods belong to the event loop."""

    def __init__(self) -> None:
        self.size = 0
        self._events: list[bytes] = []
        self._packed: bytes | None = None
        self._count = 0
        self._over = False
        self._waiting: set[asyncio.Future[None]] = set()

    def add(self, events: Sequence[bytes]) -> None:
        """More of them came."""
        self._events += events
        self.size += sum(map(len, events))
        self._notify()

    def end(self) -> None:
        """No more will come."""
        self._over = True
        self._notify()

    async def packed(self) -> bytes:
        """All events, in far fewer bytes."""
        events = self._events
        return await off_loop(self.size, lambda: zlib.compress(b"".join(events), 1))

    def replace(self, packed: bytes) -> None:
        """Keep the events, of which there will be no more, as `packed` has them."""
        self._packed, self._count = packed, len(self._events)
        self._events, self.size = [], len(packed)

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events after that one, those that are yet to come included; several at a time where they are there."""
        place = number + 1
        while self._packed is None:
            if some := self._events[place : place + _AT_ONCE]:
                place += len(some)
                yield b"".join(some)
            elif self._over:
                return
            else:
                await self._more()
        if place >= self._count:
            return
        async for events in _unpacked(self._packed):
            some, place = events[place:], max(place - len(events), 0)
            if some:
                yield b"".join(some)

    async def _more(self) -> None:
        """Wait until something changes."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def _notify(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


async def _unpacked(packed: bytes) -> AsyncGenerator[list[bytes], None]:
    """The events that were packed, a piece after the other, each made beside the event loop."""
    reader, held = zlib.decompressobj(), b""
    # Of an event whose end has not come. One may have many pieces, so each is looked through once.
    begun: list[bytes] = []
    while not reader.eof:
        raw = held + await off_loop(_PIECE, partial(reader.decompress, packed, _PIECE))
        packed = reader.unconsumed_tail
        # What may be half an end belongs to the next piece.
        whole = raw if reader.eof else raw.rstrip(b"\n")
        held = raw[len(whole) :]
        *ended, rest = whole.split(_END)
        events = []
        for event in ended:
            events.append(b"".join([*begun, event, _END]))
            begun = []
        begun.append(rest)
        yield events

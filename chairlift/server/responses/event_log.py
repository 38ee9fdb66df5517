"""The events of a response in the background: kept as they come, for whoever follows them."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from chairlift.server.http.exchange import off_loop

_END = b"\n\n"
# About how many bytes become one: events are much alike.
_PACKED_BY = 20


class EventLog:
    """Server-sent events, numbered from 0. All methods belong to the event loop."""

    def __init__(self) -> None:
        self.size = 0
        self._events: list[bytes] = []
        self._packed: bytes | None = None
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
        raw = b"".join(self._events)
        return await off_loop(len(raw), lambda: zlib.compress(raw, 1))

    def replace(self, packed: bytes) -> None:
        """Keep the events, of which there will be no more, as `packed` has them."""
        self._packed, self._events, self.size = packed, [], len(packed)

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events after that one, those that are yet to come included; several at a time where they are there."""
        place = number + 1
        while True:
            if self._packed is not None:
                unpack = partial(zlib.decompress, self._packed)
                raw = await off_loop(_PACKED_BY * self.size, unpack)
                events = [event + _END for event in raw.split(_END)[:-1]]
            else:
                events = self._events
            if more := b"".join(events[place:]):
                place = len(events)
                yield more
            elif self._over:
                return
            else:
                await self._more()

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

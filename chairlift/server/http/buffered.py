"""The bytes that the server holds for all connections together: what is counted, whose it is, and what is refused."""

import asyncio
from weakref import WeakValueDictionary

from chairlift.server.http.api_errors import ApiError, try_later


def share_of(places: int) -> int:
    """How many of so many places, or bytes, one client may have, so that some are left for others."""
    return places - places // 4


class _Client:
    """What one client holds of bodies, over all its requests."""

    def __init__(self) -> None:
        self.held = 0


class Buffered:
    """Counts the bytes held for all connections together: bodies until they are answered, and answers not yet sent.

    `held` is never more than `limit` but for what `add` counts. Everything happens on one event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        # Those of whom something is held.
        self._clients: WeakValueDictionary[str, _Client] = WeakValueDictionary()
        # Of `held`: what messages may turn out to have that are still on their way in.
        self._expected = 0
        self._door = asyncio.Lock()
        self._change: asyncio.Future[None] | None = None

    def take(self, size: int) -> bool:
        """Count so many bytes more, or none of them if there is no room."""
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def add(self, size: int) -> None:
        """Count bytes that are there already, whether there is room or not."""
        self.held += size

    def give(self, size: int) -> None:
        """Bytes that were counted are held no more."""
        self.held -= size
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def client(self, name: str) -> _Client:
        """What is counted as this client's."""
        return self._clients.setdefault(name, _Client())

    async def expect(self, most: int) -> None:
        """Make room for a message that is yet to be read, of at most so many bytes; `arrived` takes the rest back.

        Waits while others that are still being read may turn out to be small. Raises ApiError (429) if there is no
        room beside what is held for certain.
        """
        if not self._door.locked() and self._expect(most):
            return
        async with self._door:
            while not self._expect(most):
                self._change = asyncio.get_running_loop().create_future()
                await self._change

    def arrived(self, most: int, size: int) -> None:
        """A message that was expected has so many bytes, 0 if none came."""
        self._expected -= most
        self.give(most - size)

    def _expect(self, most: int) -> bool:
        if self.held - self._expected + most > self.limit:
            raise buffers_full()
        # Messages that never come must not keep out bodies whose bytes are known, so they get half of it all.
        if self.held + most > self.limit or (self._expected and self._expected + most > self.limit // 2):
            return False
        self._expected += most
        self.held += most
        return True


class HeldBody:
    """What is held of one request's body, `size` bytes.

    `refused` says that other bytes left no room for all of it; `dropped` are those that came since.
    """

    __slots__ = ("_all", "_client", "dropped", "refused", "size")

    def __init__(self, buffered: Buffered) -> None:
        self._all = buffered
        self._client: _Client | None = None
        self.size = self.dropped = 0
        self.refused = False

    def charge(self, client: str) -> bool:
        """Count it as this client's from now on. False if other bytes leave no room for it, of all or the client's."""
        if self._client is None:
            self._client = self._all.client(client)
            self._client.held += self.size
            if not self._may_have(0):
                self.refused = True
                self.release()
        return not self.refused

    def take(self, size: int) -> bool:
        """Count another piece, or have it dropped: without it the rest is of no use, so nothing stays counted."""
        if not self.refused and self._may_have(size) and self._all.take(size):
            self.size += size
            if self._client is not None:
                self._client.held += size
            return True
        self.refused = True
        self.dropped += size
        self.release()
        return False

    def give(self, size: int) -> None:
        """So many bytes have been dealt with."""
        size = min(size, self.size)
        self.size -= size
        if self._client is not None:
            self._client.held -= size
        self._all.give(size)

    def release(self) -> None:
        """Nothing of it is needed any more."""
        self.give(self.size)

    def _may_have(self, more: int) -> bool:
        """Whether its client's others leave as much of one client's share; a single one may have all there is."""
        if self._client is None:
            return True
        held = self._client.held
        return held == self.size or held + more <= share_of(self._all.limit)


def buffers_full(close: bool = False) -> ApiError:
    """The refusal of a request that has to wait for the bytes of others."""
    most = "all the bytes of requests and answers that it may, or three quarters of that for one client"
    return try_later(f"the server holds {most} (max_buffered_bytes); try again", "buffers_full", close=close)


def too_many(what: str, limit: int, setting: str, close: bool = True) -> ApiError:
    """The refusal of a connection, call, stream or upload for which `limit` others leave no place."""
    return try_later(f"there are {limit} {what} already ({setting}); try again", f"too_many_{what}", close=close)

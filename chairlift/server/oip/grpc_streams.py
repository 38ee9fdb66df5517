"""The streams of gRPC: how many there may be, which of them has to go, and what is yet to be written to one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from chairlift.config.server import ServerConfig
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.buffered import Buffered, buffers_full, share_of, too_many
from chairlift.server.oip.grpc_calls import RpcContext, most_bytes

# Requests of one stream that may be under way at once; more are read as these end.
STREAM_WIDTH = 64
_SETTING = "half of max_buffered_bytes, by what a message may have"


class RpcStream:
    """A stream of some client, and since when nothing has come or gone."""

    def __init__(self, client: str, timer: asyncio.Timeout) -> None:
        self.client = client
        self._timer = timer
        self._under_way = 0
        self.touch()

    @property
    def idle_since(self) -> float | None:
        """None while one of its requests is under way."""
        return None if self._under_way else self._since

    def touch(self) -> None:
        """Something came or went."""
        self._since = asyncio.get_running_loop().time()

    def begin(self) -> None:
        """A request came."""
        self._under_way += 1

    def finish(self) -> None:
        """A request has all its answers."""
        self._under_way -= 1
        self.touch()

    def end(self) -> None:
        """Give up its place."""
        self._timer.reschedule(asyncio.get_running_loop().time())


class RpcStreams:
    """The streams that there are.

    While nothing comes of one nobody knows whether it is idle or has sent most of a message, so there are only as many
    as such messages would have half of the room.
    """

    def __init__(self, config: ServerConfig, buffered: Buffered) -> None:
        self._patience = config.body_timeout_s
        self._most = max(buffered.limit // 2 // most_bytes(config), 1)
        self._share = share_of(self._most)
        self._all: set[RpcStream] = set()

    @contextlib.asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[RpcStream]:
        """A place for a stream for as long as the block runs. Raises ApiError: 429 without one, 408 where it is lost.

        Where all are taken, the stream that was idle longest has to go, if that was as long as a message may take.
        """
        self._make_room(client)
        stream: RpcStream | None = None
        try:
            async with asyncio.timeout(None) as timer:
                stream = RpcStream(client, timer)
                self._all.add(stream)
                yield stream
        except TimeoutError:
            if not timer.expired():
                raise
            idle = f"nothing came or went for {self._patience:g} s (body_timeout_s)"
            raise ApiError(408, f"{idle}, and another stream needs the place") from None
        finally:
            if stream is not None:
                self._all.discard(stream)

    def _make_room(self, client: str) -> None:
        own = [each for each in self._all if each.client == client]
        if len(own) >= self._share:
            rivals, refusal = own, too_many("streams", self._share, f"of one client; {_SETTING}, less a quarter")
        elif len(self._all) >= self._most:
            rivals, refusal = list(self._all), too_many("streams", self._most, _SETTING)
        else:
            return
        now = asyncio.get_running_loop().time()
        idle = [(since, each) for each in rivals if (since := each.idle_since) is not None]
        since, longest = min(idle, key=lambda pair: pair[0], default=(now, None))
        if longest is None or now - since < self._patience:
            raise refusal
        # Its place is free from now on, though it takes a moment to end.
        self._all.discard(longest)
        longest.end()


class Answers:
    """What is yet to be written to a stream, a few messages of it, counted."""

    def __init__(self, context: RpcContext, buffered: Buffered, stream: RpcStream) -> None:
        self._context = context
        self._buffered = buffered
        self._stream = stream
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(STREAM_WIDTH)

    async def put(self, raw: bytes, force: bool = False) -> None:
        """Another, serialized. Raises ApiError (429) if there is no room for its bytes, unless forced."""
        if force:
            self._buffered.add(len(raw))
        elif not self._buffered.take(len(raw)):
            raise buffers_full()
        try:
            await self._queue.put(raw)
        except asyncio.CancelledError:
            self._buffered.give(len(raw))
            raise

    async def end(self) -> None:
        """Let `send` return when it has sent the rest."""
        await self._queue.put(None)

    async def send(self, timeout: float) -> None:
        """Write whatever comes. Is cancelled where the client takes nothing for so many seconds."""
        while (raw := await self._queue.get()) is not None:
            try:
                async with asyncio.timeout(timeout):
                    await self._context.write(raw)
            except TimeoutError:
                # Nothing can be said to such a client: the call just ends.
                raise asyncio.CancelledError from None
            finally:
                self._buffered.give(len(raw))
                self._stream.touch()

    def drop(self) -> None:
        """Forget what was not written."""
        while not self._queue.empty():
            self._buffered.give(len(self._queue.get_nowait() or b""))

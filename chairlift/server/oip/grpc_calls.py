"""What a gRPC call may hold, and when it may send its message."""

import asyncio
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from chairlift.config.server import ServerConfig
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.buffered import Buffered, HeldBody, buffers_full, share_of, too_many
from chairlift.server.http.exchange import time_for, too_slow
from chairlift.server.http.places import BUSY, COMING
from chairlift.server.http.tenants import Tenant

RpcContext = Any

# A message is there twice, and so it counts: in gRPC's own buffers while it comes or goes, and as what is made of it.
COPIES = 2
# Of the largest messages so many are to fit into what all may hold.
_MESSAGES = 16


class Rpc(NamedTuple):
    """A call: gRPC's view of it, and what is held of its message."""

    context: RpcContext
    held: HeldBody

    @property
    def size(self) -> int:
        """The bytes of its message."""
        return self.held.size // COPIES


class RpcPlace:
    """A call's place among all. Until its message has come, the call may lose it to that of another client."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.stage = COMING
        self.lost = False
        self._timer: asyncio.Timeout | None = None

    def time(self, seconds: float) -> asyncio.Timeout:
        """The time that the message has, which ends sooner where the place is lost."""
        self._timer = asyncio.timeout(seconds)
        return self._timer

    def settle(self) -> None:
        """From now on the place is safe."""
        self.stage = BUSY

    def give_way(self) -> None:
        """Lose the place."""
        self.lost = True
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())


def most_bytes(config: ServerConfig) -> int:
    """Bytes that a message may have.

    For each that comes there must be room for the largest, so many of which there is to be room for.
    """
    shared = max(config.max_body_bytes, config.max_buffered_bytes // _MESSAGES)
    return min(config.max_tensor_bytes, shared, config.max_buffered_bytes // COPIES)


def client_of(tenant: Tenant | None, context: RpcContext) -> str:
    """Whose call it is: a key's, or that of all who call from one address."""
    if tenant is not None and tenant.name:
        return tenant.name
    return str(context.peer()).rpartition(":")[0]


def calls_full(config: ServerConfig) -> ApiError:
    """The refusal of a call for which others leave no place."""
    return too_many("calls", config.max_connections, "max_connections")


class Door:
    """Lets calls send their messages, as many at once as there is room for, and not only those of one client."""

    def __init__(self, config: ServerConfig, buffered: Buffered) -> None:
        self._config = config
        self._buffered = buffered
        self._size = most_bytes(config)
        self._share = share_of(max(buffered.limit // 2 // (COPIES * self._size), 1))
        # Those of clients that have a message on its way; others need none.
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, rpc: Rpc, place: RpcPlace) -> bytes:
        """A call's message, read when there is room for it, and counted. Raises ApiError: 408 or 429."""
        raw, most = b"", COPIES * self._size
        share = self._shares.setdefault(place.client, asyncio.Semaphore(self._share))
        try:
            async with place.time(self._config.body_timeout_s), share:
                await self._buffered.expect(most)
                try:
                    async with asyncio.timeout(min(self._config.body_timeout_s, time_for(self._size, self._config))):
                        raw = await rpc.context.read() or b""
                finally:
                    rpc.held.size = COPIES * len(raw)
                    self._buffered.arrived(most, rpc.held.size)
        except TimeoutError:
            raise calls_full(self._config) if place.lost else too_slow("the message", self._config) from None
        finally:
            place.settle()
        if not rpc.held.charge(place.client):
            raise buffers_full()
        return raw

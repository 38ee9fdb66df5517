"""The models of a server as running things: started, waited for, drained and stopped."""

import contextlib
from typing import TYPE_CHECKING, Protocol

from chairlift.config import EngineConfig
from chairlift.engine.client import EngineClient
from chairlift.engine.machine import Machine
from chairlift.errors import InvalidRequest
from chairlift.server.config import ServerConfig
from chairlift.server.oneshot_host import OneShotHost
from chairlift.server.settings import Served

if TYPE_CHECKING:
    from chairlift.server.oneshot import OneShotService
    from chairlift.server.service import Service


class Host(Protocol):
    """One model with its workers, behind a service."""

    served: Served

    async def start(self) -> None:
        """Start loading, and return at once."""
        ...

    def prepare(self) -> "Service | OneShotService":
        """Make the service; slow the first time, since it imports and reads files, and so best done in a thread."""
        ...

    async def wait_ready(self) -> None:
        """Return once requests are taken in. Raises Unavailable if the model can't be loaded."""
        ...

    @property
    def about(self) -> str:
        """What was loaded, in a few words."""
        ...

    @property
    def restarts(self) -> int:
        """How many workers have died and been replaced."""
        ...

    def close_line(self) -> None:
        """Say that nobody else will come, so that no batch waits to be full."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take no more requests; give those that are here up to `timeout` seconds to end."""
        ...

    async def stop(self) -> None:
        """End the workers; whatever still runs gets Unavailable."""
        ...


class LanguageModel:
    """A decoder behind a continuous (or any other) scheduler in its own worker."""

    def __init__(self, served: Served, config: EngineConfig, server: ServerConfig, machine: Machine | None) -> None:
        self.served = served
        self._config = config
        self._server = server
        self._client = EngineClient(config, server.max_waiting, machine, served.share.weight)

    async def start(self) -> None:
        """Start the worker."""
        await self._client.start()

    def prepare(self) -> "Service":
        """Read the tokenizer, and pay now for what the first chat would otherwise wait for."""
        from chairlift.server.service import Service
        from chairlift.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder(self._config.model)
        with contextlib.suppress(InvalidRequest):
            tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "hello"}]))
        version, seats = self.served.share.version, self._config.seats
        return Service(self._client, tokenizer, self.served.name, self._server, version, seats)

    async def wait_ready(self) -> None:
        """Wait for the worker."""
        await self._client.wait_ready()

    @property
    def about(self) -> str:
        """Type, device and kernels, and what a static batch means for those who wait."""
        info = self._client.info
        about = f"{info.dtype} on {info.device}, {info.ops} operations" if info else ""
        if self._config.strategy == "static":
            size = self._config.batch_size
            about += f"; static: nobody is served until {size} requests wait, and dynamic suits live traffic"
        return about

    @property
    def restarts(self) -> int:
        """Workers that died."""
        return self._client.restarts

    def close_line(self) -> None:
        """Let batches leave as they are."""
        self._client.close_line()

    async def drain(self, timeout: float) -> None:
        """Let what runs end."""
        await self._client.drain(timeout)

    async def stop(self) -> None:
        """End the worker."""
        await self._client.stop()


def host(served: Served, server: ServerConfig, machine: Machine | None) -> Host:
    """Make a model's host. With a `machine` it takes turns with the others that have one, unless its weight is 0."""
    if served.share.weight == 0:
        machine = None
    if isinstance(served.config, EngineConfig):
        return LanguageModel(served, served.config, server, machine)
    return OneShotHost(served, served.config, machine)

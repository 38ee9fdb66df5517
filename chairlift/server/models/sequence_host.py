"""A language model as a running thing: its worker, and the service in front of it."""

import contextlib
from typing import TYPE_CHECKING

from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel
from chairlift.engine.machine import Machine
from chairlift.engine.sequences.client import SequenceClient
from chairlift.errors import InvalidRequest

if TYPE_CHECKING:
    from chairlift.server.models.sequence_service import SequenceService


class SequenceHost:
    """A decoder behind a continuous (or any other) scheduler in its own worker."""

    def __init__(
        self, served: ServedModel, config: SequenceConfig, server: ServerConfig, machine: Machine | None
    ) -> None:
        self.served = served
        self._config = config
        self._server = server
        self._client = SequenceClient(config, server.max_waiting, machine, served.share.weight)

    async def start(self) -> None:
        """Start the worker."""
        await self._client.start()

    def prepare(self) -> "SequenceService":
        """Read the tokenizer, and pay now for what the first chat would otherwise wait for."""
        from chairlift.server.models.sequence_service import SequenceService
        from chairlift.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder(self._config.model)
        with contextlib.suppress(InvalidRequest):
            tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": "hello"}]))
        version, slots = self.served.share.version, self._config.slots
        return SequenceService(self._client, tokenizer, self.served.name, self._server, version, slots)

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

    def close_queue(self) -> None:
        """Let batches leave as they are."""
        self._client.close_queue()

    async def drain(self, timeout: float) -> None:
        """Let what runs end."""
        await self._client.drain(timeout)

    async def stop(self) -> None:
        """End the worker."""
        await self._client.stop()

"""A language model as a running thing: its worker, and the service in front of it."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel
from chairlift.engine.machine import Machine
from chairlift.engine.sequences.client import SequenceClient
from chairlift.engine.worker_messages import load_failed
from chairlift.errors import InvalidRequest

if TYPE_CHECKING:
    from chairlift.server.models.sequence_service import SequenceService


class SequenceHost:
    """A decoder behind a continuous (or any other) scheduler in its own worker."""

    def __init__(
        self,
        served: ServedModel,
        config: SequenceConfig,
        server: ServerConfig,
        machine: Machine | None,
        load_attempts: int = 1,
    ) -> None:
        self.served = served
        self._config = config
        self._server = server
        self._client = SequenceClient(config, server.max_waiting, machine, served.share.weight, load_attempts)
        self._unreadable: str | None = None
        self._sampling_defaults: dict[str, Any] = {}

    async def start(self) -> None:
        """Start the worker."""
        await self._client.start()

    def prepare(self) -> "SequenceService":
        """Read the tokenizer, and pay now for what the first chat would otherwise wait for.

        If it can't be read, `wait_ready` says so.
        """
        from chairlift.server.models.sequence_service import SequenceService
        from chairlift.text.model_dialect import ModelDialect, model_dialect_of
        from chairlift.text.sampling_defaults import sampling_defaults
        from chairlift.text.tokenizer import Tokenizer

        tokenizer: Tokenizer | None = None
        model_dialect = ModelDialect()
        try:
            if self._config.generation_config == "auto":
                self._sampling_defaults = sampling_defaults(Path(self._config.model))
            tokenizer = Tokenizer.from_folder(self._config.model)
            model_dialect = model_dialect_of(tokenizer, self._config.tool_dialect)
            with contextlib.suppress(InvalidRequest):
                tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": "hello"}]))
        except Exception as error:
            self._unreadable = load_failed(error).message
        return SequenceService(
            self._client,
            tokenizer,
            self.served.name,
            self._server,
            self.served.share.version,
            self._config.slots,
            model_dialect,
            self._sampling_defaults,
        )

    async def wait_ready(self) -> None:
        """Wait for the worker."""
        if self._unreadable is not None:
            self.give_up(self._unreadable)
        await self._client.wait_ready()

    def give_up(self, reason: str) -> None:
        """End the worker and start no other."""
        self._client.give_up(reason)

    @property
    def about(self) -> str:
        """Type, device and kernels, what a static batch means for those who wait, and what requests need not say."""
        info = self._client.info
        about = f"{info.dtype} on {info.device}, {info.ops} operations" if info else ""
        if self._config.strategy == "static":
            size = self._config.batch_size
            about += f"; static: nobody is served until {size} requests wait, and dynamic suits live traffic"
        if self._sampling_defaults:
            told = ", ".join(f"{name} {value:g}" for name, value in self._sampling_defaults.items())
            about += f"; sampled with {told}, as its folder says, where requests don't"
        return about

    @property
    def problem(self) -> str | None:
        """What keeps the front from minding its worker."""
        return self._client.problem

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

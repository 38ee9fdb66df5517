"""A model that answers in one call as a running thing: its queue, its workers, and the service in front of them."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.config.items import ItemConfig
from chairlift.config.settings import ServedModel
from chairlift.engine.items.dispatcher import Dispatcher
from chairlift.engine.items.process_executor import ProcessExecutor
from chairlift.engine.items.standby import Standby
from chairlift.engine.machine import Machine, MachineTurns, soon_asleep
from chairlift.engine.worker_messages import load_failed
from chairlift.errors import Unavailable
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.runners.host_memory import host_available_bytes, process_bytes
from chairlift.runners.items import ItemInfo

if TYPE_CHECKING:
    from chairlift.server.models.item_service import ItemService
    from chairlift.text.encoding import TextEncoder


class ItemHost:
    """An encoder, ONNX file or Python class behind a dispatcher, with one worker process for each instance.

    The model is ready as long as one instance is, or is about to be after an item has ended it. Who that was is found
    out with a standby worker beside it, if settings and memory allow, so that others need not wait for the restarts.
    """

    def __init__(
        self, served: ServedModel, config: ItemConfig, machine: Machine | None, load_attempts: int = 1
    ) -> None:
        self.served = served
        self._config = config
        environment = None if machine is None else soon_asleep()
        self._executors = [
            ProcessExecutor(config, partial(self._instance_changed, number), environment, load_attempts)
            for number in range(config.instances)
        ]
        self._standby = _standby_of(config, environment, self._standby_changed)
        self._searching = False
        self._worker_bytes = 0
        turns = None if machine is None else MachineTurns(machine, served.name, served.share.weight)
        self._dispatcher = Dispatcher(
            config.limits(),
            self._executors,
            turns=turns,
            standby=self._standby,
            on_search=self._search_changed,
        )
        self._files = SentenceFiles()
        self._unreadable: str | None = None
        self._service: ItemService | None = None
        self._encoder: TextEncoder | None = None
        self._info: ItemInfo | None = None
        self._leaving = False

    async def start(self) -> None:
        """Start the workers."""
        for executor in self._executors:
            await executor.start()

    def prepare(self) -> "ItemService":
        """Make the service. If the folder's files for it can't be read, `wait_ready` says so."""
        from chairlift.server.models.item_service import ItemService

        if self._config.kind == "encoder":
            try:
                self._files = SentenceFiles.read(Path(self._config.model))
            except Exception as error:
                self._unreadable = load_failed(error).message
        self._service = ItemService(self.served.name, self._dispatcher, version=self.served.share.version)
        return self._service

    async def wait_ready(self) -> None:
        """Wait for all workers. Raises Unavailable if one can't load, and ends the others."""
        try:
            self._info = await self._all_loaded()
        except Unavailable as error:
            self.give_up(str(error))
            raise
        self._dispatcher.configure(self._config.limits(self._info.max_batch_size, self._info.max_wait_ms))
        for number, executor in enumerate(self._executors):
            self._instance_changed(number, executor.ready)
        if self._standby is not None and self._config.standby == "always":
            self._standby.begin()

    def give_up(self, reason: str) -> None:
        """End the workers and start no others."""
        for executor in self._executors:
            executor.give_up(reason)
        self._show_state()

    async def _all_loaded(self) -> ItemInfo:
        """What the workers say of the model, once all have loaded and the tokenizer, if there is one, is read."""
        if self._unreadable is not None:
            raise Unavailable(self._unreadable)
        infos = await asyncio.gather(*(executor.wait_ready() for executor in self._executors))
        if self._config.kind == "encoder":
            try:
                self._encoder = await asyncio.to_thread(self._read_tokenizer, infos[0].max_tokens)
            except Exception as error:
                raise Unavailable(load_failed(error).message) from error
        return infos[0]

    @property
    def about(self) -> str:
        """Type, device and kernels, and what the type costs where nobody asked for it."""
        return "" if self._info is None else about_of(self._info, asked=self._config.dtype != "auto")

    @property
    def problem(self) -> str | None:
        """What keeps the front from minding its workers."""
        return next((executor.problem for executor in self._executors if executor.problem), None)

    @property
    def restarts(self) -> int:
        """Workers that died, of all instances."""
        standby = 0 if self._standby is None else self._standby.restarts
        return standby + sum(executor.restarts for executor in self._executors)

    def close_queue(self) -> None:
        """Let batches leave as they are."""
        self._dispatcher.close_queue()

    async def drain(self, timeout: float) -> None:
        """Let what waits and runs end."""
        self._leaving = True
        self._show_state()
        await self._dispatcher.drain(timeout)

    async def stop(self) -> None:
        """End the workers."""
        self._leaving = True
        self._show_state()
        await self._dispatcher.close()
        await asyncio.gather(*(executor.stop() for executor in self._executors))
        if self._standby is not None:
            await self._standby.stop()

    def _read_tokenizer(self, max_tokens: int | None) -> "TextEncoder":
        from chairlift.text.encoding import TextEncoder

        assert max_tokens is not None, "an encoder takes only so many positions"
        return TextEncoder(self._config.model, max_tokens, self._files)

    def _instance_changed(self, number: int, ready: bool) -> None:
        if ready:
            self._dispatcher.instance_back(number)
            pid = self._executors[number].worker_pid
            self._worker_bytes = max(self._worker_bytes, 0 if pid is None else process_bytes(pid))
        else:
            self._dispatcher.instance_lost(number)
        self._standby_changed()

    def _search_changed(self, searching: bool) -> None:
        """It begins to be found out which item ends or hangs workers, or that is over."""
        self._searching = searching
        for executor in self._executors:
            executor.hurry(searching)
        if self._standby is not None and self._config.standby == "auto":
            if not searching:
                self._standby.end()
            elif self._has_room():
                self._standby.begin()
        self._standby_changed()

    def _has_room(self) -> bool:
        """Whether there is memory for one more worker, and for the one that is being started again."""
        on_gpu = self._info is not None and self._info.device.startswith("cuda")
        return not on_gpu and host_available_bytes() > 2 * self._worker_bytes

    def _standby_changed(self) -> None:
        """Have the standby worker take part while it is of use."""
        if self._standby is not None:
            needed = self._searching or not all(executor.ready for executor in self._executors)
            number = len(self._executors)
            if needed and self._standby.ready:
                self._dispatcher.instance_back(number)
            else:
                self._dispatcher.instance_lost(number)
        self._show_state()

    @property
    def _takes_requests(self) -> bool:
        """Whether a worker is there for them, or about to be."""
        if any(executor.ready or executor.returning for executor in self._executors):
            return True
        return self._standby is not None and self._standby.ready

    def _show_state(self) -> None:
        service, executors = self._service, self._executors
        if service is None:
            return
        service.failure = next((executor.failure for executor in executors if executor.failure), None)
        if self._leaving:
            service.state = "draining"
        elif self._info is not None and self._takes_requests:
            service.open(self._info, self._encoder)
        else:
            service.state = executors[0].state if executors[0].state != "ready" else "loading"


def about_of(info: ItemInfo, asked: bool) -> str:
    """What to say of a loaded model, whose type of numbers was asked for or found here."""
    if not info.dtype:
        return ""
    about = f"{info.dtype} on {info.device}" + (f", {info.ops} operations" if info.ops else "")
    if info.task == "embed" and info.dtype == "bfloat16" and not asked:
        about += (
            "; bfloat16 is the default here: some 0.99996 of float32's embeddings by cosine; --dtype float32 has those"
        )
    return about


def _standby_of(
    config: ItemConfig, environment: Mapping[str, str] | None, on_change: Callable[[], None]
) -> Standby | None:
    """The standby worker that the settings want; several instances stand in for each other."""
    if config.standby == "never" or (config.standby == "auto" and config.instances > 1):
        return None
    return Standby(lambda on_ready: ProcessExecutor(config, on_ready, environment), on_change)

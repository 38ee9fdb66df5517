"""One more worker of a model, started when the others die, so that nobody need wait until they are back."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.core.items.item import Failure
from chairlift.engine.items.call import CallFailed, CallResult, OnParts
from chairlift.engine.items.process_executor import ProcessExecutor
from chairlift.errors import Unavailable

log = logging.getLogger(__name__)

# A client often sends again what has just failed.
LINGER_S = 30.0
# Before one that could not be started is tried again: what it lacked, as memory, may be there by then.
AGAIN_S = 30.0


class Standby:
    """Computes batches like the executor that it has between `begin` and a while after `end`; `make` makes that.

    `on_change` hears whenever `ready` may have changed. All methods belong to one event loop.
    """

    queues = True

    def __init__(
        self, make: Callable[[Callable[[bool], None]], ProcessExecutor], on_change: Callable[[], None]
    ) -> None:
        self._restarts = 0
        self._make = make
        self._on_change = on_change
        self._executor: ProcessExecutor | None = None
        self._starting: asyncio.Task[None] | None = None
        self._going: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether it would take a batch now."""
        return self._executor is not None and self._executor.ready

    @property
    def restarts(self) -> int:
        """How many of its workers have died and been replaced."""
        return self._restarts + (0 if self._executor is None else self._executor.restarts)

    def begin(self) -> None:
        """Start a worker, unless there is one."""
        if self._going is not None:
            self._going.cancel()
            self._going = None
        if self._executor is None:
            self._executor = self._make(lambda ready: self._on_change())
            self._starting = asyncio.get_running_loop().create_task(self._start(self._executor))
        self._executor.hurry(True)

    def end(self) -> None:
        """Let the worker go in a while, if it is not needed again before."""
        if self._executor is not None and self._going is None:
            self._executor.hurry(False)
            self._going = asyncio.get_running_loop().call_later(LINGER_S, self._leave)

    async def run(self, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
        """Compute one batch. Raises CallFailed."""
        if self._executor is None:
            raise CallFailed(Failure.UNTRIED, "the standby worker has gone")
        return await self._executor.run(payloads, on_parts)

    async def stop(self) -> None:
        """End the worker at once; a call that still runs fails."""
        if self._going is not None:
            self._going.cancel()
        self._stopping.set()
        executor = self._take()
        if executor is not None:
            await executor.stop()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _start(self, executor: ProcessExecutor) -> None:
        """Start the worker, and if it can't be loaded others, until one can be or none is needed any more."""
        while True:
            await executor.start()
            try:
                await executor.wait_ready()
            except Unavailable as error:
                log.warning("the standby worker can't be started: %s; trying again in %g s", error, AGAIN_S)
            else:
                return
            await asyncio.sleep(AGAIN_S)
            await executor.stop()
            self._restarts += executor.restarts
            executor = self._executor = self._make(lambda ready: self._on_change())
            executor.hurry(self._going is None)

    def _leave(self) -> None:
        """Give the worker no more batches, and end it after those that it has."""
        self._going = None
        executor = self._take()
        if executor is not None:
            leaving = asyncio.get_running_loop().create_task(self._stop_when_idle(executor))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            self._on_change()

    def _take(self) -> ProcessExecutor | None:
        executor, self._executor = self._executor, None
        if executor is not None:
            self._restarts += executor.restarts
        if self._starting is not None:
            self._starting.cancel()
        return executor

    async def _stop_when_idle(self, executor: ProcessExecutor) -> None:
        waits = {asyncio.ensure_future(executor.idle()), asyncio.ensure_future(self._stopping.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        await executor.stop()

"""Runs batches of items in a thread, for measuring the dispatcher without the way to another process."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chairlift.engine.items.call import CallResult, OnParts
from chairlift.engine.items.worker import compute
from chairlift.runners.items import ItemInfo, ItemRunner


class ThreadExecutor:
    """A loaded runner in a thread of this process. A call that hangs can't be ended, so there is no timeout.

    As a `ProcessExecutor` it takes a call while it is at another.
    """

    queues = True

    def __init__(self, runner: ItemRunner, info: ItemInfo) -> None:
        self.info = info
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ended = time.perf_counter()

    async def run(self, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
        """Compute one batch, as `ProcessExecutor.run` does; `on_parts` is called in the calling loop."""
        loop = asyncio.get_running_loop()

        def emit(parts: dict[int, Any]) -> None:
            loop.call_soon_threadsafe(lambda: on_parts(parts) if on_parts else None)

        streams = on_parts is not None and self.info.streams
        return await loop.run_in_executor(self._thread, self._compute, payloads, emit if streams else None)

    def _compute(self, payloads: Sequence[Any], emit: OnParts | None) -> CallResult:
        idle = time.perf_counter() - self._ended
        try:
            result = compute(self._runner, payloads, emit)
        finally:
            self._ended = time.perf_counter()
        result.idle = idle
        return result

    async def stop(self) -> None:
        """Wait for the call that runs, and release the model."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.close)
        self._thread.shutdown()

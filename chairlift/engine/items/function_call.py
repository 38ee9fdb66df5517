"""Executors that call a Python function with a batch: in a thread of their own, or on the event loop if it is async."""

import asyncio
import queue
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

import numpy as np

from chairlift.core.items.item import Failure
from chairlift.engine.items.call import CallFailed, CallResult, OnParts
from chairlift.errors import RequestFailed
from chairlift.runners.error_text import describe
from chairlift.runners.out_of_memory import is_out_of_memory

ThreadTask = tuple[Callable[[Any], Any], Any, "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class ThreadCall:
    """Calls a function in a daemon thread, which the first call starts.

    A call that takes longer than `timeout` seconds is given up: nobody can end it, so it goes on in its thread, but
    later calls have another one.
    """

    def __init__(self, function: Callable[[Any], Any], stack: bool, timeout: float | None) -> None:
        self.thread: threading.Thread | None = None
        self._function = function
        self._stack = stack
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[ThreadTask | None] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    async def run(self, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
        """Compute one batch. Raises CallFailed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        began = time.perf_counter()
        batch = _batch_of(payloads, self._stack)
        (self._jobs or self._start()).put((self._function, batch, done, loop))
        if self._timeout is not None:
            finished, _ = await asyncio.wait([done], timeout=self._timeout)
            if not finished:
                self._give_up()
                raise _timed_out(self._timeout)
        try:
            results = await done
        except Exception as error:
            raise _failed(error) from error
        return CallResult(_parts_of(results, len(payloads)), time.perf_counter() - began)

    def _start(self) -> "queue.SimpleQueue[ThreadTask | None]":
        jobs = self._jobs = queue.SimpleQueue()
        # An idle thread knows the queue alone, so whoever owns the function can be collected, which ends the thread.
        self.thread = threading.Thread(target=_work, args=(jobs,), name="chairlift batch", daemon=True)
        self.thread.start()
        self._end = weakref.finalize(self, jobs.put, None)
        return jobs

    def _give_up(self) -> None:
        if self._end is not None:
            self._end()
        self._jobs = self.thread = self._end = None


class AsyncCall:
    """Awaits a coroutine function on the running event loop; one that takes longer than `timeout` is cancelled."""

    def __init__(self, function: Callable[[Any], Awaitable[Any]], stack: bool, timeout: float | None) -> None:
        self._function = function
        self._stack = stack
        self._timeout = timeout

    async def run(self, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
        """Compute one batch. Raises CallFailed."""
        began = time.perf_counter()
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                results = await self._function(_batch_of(payloads, self._stack))
        except Exception as error:
            if self._timeout is not None and limit.expired():
                raise _timed_out(self._timeout) from error
            raise _failed(error) from error
        return CallResult(_parts_of(results, len(payloads)), time.perf_counter() - began)


def shape_of(array: Any) -> Hashable:
    """Return what arrays must have in common to be stacked: shape and type."""
    shape: tuple[int, ...] = getattr(array, "shape", ())
    return tuple(shape), str(getattr(array, "dtype", type(array)))


def _work(jobs: "queue.SimpleQueue[ThreadTask | None]") -> None:
    while (job := jobs.get()) is not None:
        function, batch, done, loop = job
        results, error = None, None
        try:
            results = function(batch)
        except Exception as raised:
            error = raised
        except BaseException as raised:
            # An exit or an interrupt here would end the event loop's thread instead of this one.
            error = RequestFailed(describe(raised))
            error.__cause__ = raised
        if isinstance(error, StopIteration):
            error = RequestFailed(describe(error))
        try:
            loop.call_soon_threadsafe(_deliver, done, results, error)
        except RuntimeError:
            return  # the loop is closed
        # What it holds on to while idle would live as long as the thread.
        del job, function, batch, done, loop, results, error


def _deliver(done: "asyncio.Future[Any]", results: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(results)
    else:
        done.set_exception(error)


def _batch_of(payloads: Sequence[Any], stack: bool) -> Any:
    if not stack:
        return list(payloads)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(payloads[0], torch.Tensor):
        return torch.stack(list(payloads))
    return np.stack(payloads)


def _parts_of(results: Any, count: int) -> list[Any]:
    """Take a batch's results apart along their first axis, if they are an array."""
    if isinstance(results, list):
        return results
    if isinstance(results, tuple) or getattr(results, "shape", None):
        return list(results)
    error = RequestFailed(f"the function returned {type(results).__name__}; it must return a list, one result for each")
    return [error] * count


def _failed(error: Exception) -> CallFailed:
    return CallFailed(Failure.OUT_OF_MEMORY if is_out_of_memory(error) else Failure.RAISED, describe(error))


def _timed_out(limit: float) -> CallFailed:
    return CallFailed(Failure.TIMED_OUT, f"the call took more than {limit:g} s")

"""Starts threads for whoever cannot wait until they run."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple


class _Start(NamedTuple):
    thread: threading.Thread
    stack_bytes: int
    failed: Callable[[RuntimeError], None]


class ThreadStarter:
    """A thread that starts others.

    `threading.Thread.start` returns once the new thread runs: after some milliseconds where a model has all cores.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[_Start] = SimpleQueue()
        self._lock = threading.Lock()
        self._running = False

    def start(self, thread: threading.Thread, failed: Callable[[RuntimeError], None], *, stack_bytes: int = 0) -> None:
        """Have a thread started soon, with a stack of so many bytes (0: the system's); `failed` if it can't be.

        `failed` may be called by any thread, also by this one before it returns.
        """
        with self._lock:
            if not self._running:
                try:
                    threading.Thread(target=self._run, name="starter", daemon=True).start()
                except RuntimeError as error:
                    refused = error
                else:
                    self._running = True
        if self._running:
            self._waiting.put(_Start(thread, stack_bytes, failed))
        else:
            failed(refused)

    def _run(self) -> None:
        while True:
            start_with_stack(*self._waiting.get())


# The size of stacks is that of all threads that begin.
_STACK_SIZE = threading.Lock()


def start_with_stack(thread: threading.Thread, stack_bytes: int, failed: Callable[[RuntimeError], None]) -> None:
    """Start a thread and wait until it runs; the rest as `ThreadStarter.start`."""
    with _STACK_SIZE:
        before = threading.stack_size(stack_bytes) if stack_bytes else None
        try:
            thread.start()
        except RuntimeError as error:
            refused = error
        else:
            return
        finally:
            if before is not None:
                threading.stack_size(before)
    failed(refused)


STARTER = ThreadStarter()

"""One event loop in a thread of its own, for whoever must wait inside somebody else's program.

That is `@chairlift.batched`, called from plain code.
"""

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable


class LoopThread:
    """The loop's thread: a daemon, so it never keeps a program from ending. `lock` is for whoever uses the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._thread = threading.Thread(target=self._run, name="chairlift loop", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop's thread make a call, after those that were posted before. From any thread."""
        self._inbox.append(call)
        # Under load many calls come before the loop gets to the first: one wake-up is enough for all. A stale flag is
        # harmless, as it is lowered before the inbox is read.
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._take)

    def stop(self) -> None:
        """End the loop, and wait a little for its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=1)

    def _take(self) -> None:
        self._is_woken = False
        inbox = self._inbox
        while inbox:
            inbox.popleft()()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_lock = threading.Lock()
_loop_thread: LoopThread | None = None


def loop_thread() -> LoopThread:
    """This process's loop thread; a process that was forked has its own."""
    global _loop_thread
    found = _loop_thread
    if found is None:
        with _lock:
            if _loop_thread is None:
                _loop_thread = LoopThread()
            found = _loop_thread
    return found


def _begin_anew() -> None:
    """Forget what belongs to the process that was forked: its threads are not here, and its locks may be held."""
    global _loop_thread, _lock
    _loop_thread, _lock = None, threading.Lock()


def _stop() -> None:
    if _loop_thread is not None:
        _loop_thread.stop()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(_stop)

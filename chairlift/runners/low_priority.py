"""Threads that run only where others leave time."""

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator

from chairlift.ops.native import find_library

_LOWEST_PRIORITY = 19
# Until when models of this process are at work, by the monotonic clock, in nanoseconds: what pauses looks at it.
# Between two steps others have their turn who are waited for as well.
_busy_until = ctypes.c_int64(0)
_BETWEEN_STEPS = 100_000_000
_FOREVER = 2**63 - 1
# How long a process that ends waits for them.
_END_SECONDS = 2.0
# Threads that pause, and what the library calls each, until it is told that they have ended.
_pausing: dict[threading.Thread, int] = {}
_lock = threading.Lock()


def _lower(thread: threading.Thread) -> None:
    """Let a thread run only where others leave time, for the rest of its life; not if it has ended."""
    if thread.native_id is None or not thread.is_alive():
        return
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
        elif hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, _LOWEST_PRIORITY)


def hold_back(thread: threading.Thread) -> None:
    """Lower a thread, and have it pause while a model is at work: 5 ms for each half that it had (native/pauses.cpp).

    It does not pause while it holds the interpreter's lock, but with any other lock: none that somebody waits for.
    """
    _lower(thread)
    library = find_library()
    if library is None:
        return
    with _lock:
        for ended in [each for each in _pausing if not each.is_alive()]:
            library.chairlift_end_pauses(_pausing.pop(ended))
        if thread.native_id is None or not thread.is_alive() or thread in _pausing:
            return
        holds_interpreter = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p)
        number = library.chairlift_begin_pauses(thread.native_id, holds_interpreter, ctypes.addressof(_busy_until))
        if number >= 0:
            _pausing[thread] = number


@contextlib.contextmanager
def while_computing() -> Iterator[None]:
    """Have threads that are held back pause meanwhile, and until the next step if one soon follows."""
    _busy_until.value = _FOREVER
    try:
        yield
    finally:
        _busy_until.value = time.monotonic_ns() + _BETWEEN_STEPS


@atexit.register
def _let_end() -> None:
    """Wait for those that are held back: one that comes back from its library to no interpreter crashes the process."""
    _busy_until.value = 0
    end = time.monotonic() + _END_SECONDS
    for thread in list(_pausing):
        thread.join(max(end - time.monotonic(), 0.0))

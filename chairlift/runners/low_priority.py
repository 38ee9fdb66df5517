"""Threads that run only where others leave time."""

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from functools import cache

_LOWEST_PRIORITY = 19
# Until when models of this process are at work, by the monotonic clock, in nanoseconds: what pauses looks at it.
# Between two steps others have their turn who are waited for as well.
_busy_until = ctypes.c_int64(0)
_BETWEEN_STEPS = 100_000_000
_FOREVER = 2**63 - 1
_num_computing = 0
# How long a process that ends waits for them.
_END_SECONDS = 2.0
# Threads that can pause, and what the library calls each, until it is told that they have ended.
_numbers: dict[threading.Thread, int] = {}
_held_back: set[threading.Thread] = set()
_lock = threading.Lock()


def busy_until() -> int:
    """Return where that moment lies in memory, for threads of the library."""
    return ctypes.addressof(_busy_until)


@cache
def _library() -> ctypes.CDLL | None:
    # An engine lets threads go on before anything has loaded torch.
    from chairlift.ops.native import find_library

    return find_library()


@cache
def _function() -> ctypes.c_void_p:
    """One of the library that follows grammars, whose code threads pause in."""
    from llguidance import _lib

    return ctypes.cast(ctypes.CDLL(_lib.__file__).PyInit__lib, ctypes.c_void_p)


def _lower(thread: threading.Thread) -> None:
    """Let a thread run only where others leave time, for the rest of its life; not if it has ended."""
    if thread.native_id is None or not thread.is_alive():
        return
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
        elif hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, _LOWEST_PRIORITY)


def _number_of(library: ctypes.CDLL, thread: threading.Thread) -> int | None:
    """What the library calls a thread; None if it has ended, or can't pause. The lock is held."""
    for ended in [each for each in _numbers if not each.is_alive()]:
        library.chairlift_remove_pauses(_numbers.pop(ended))
    _held_back.intersection_update(_numbers)
    if thread not in _numbers and thread.native_id is not None and thread.is_alive():
        holds_interpreter = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p)
        number = library.chairlift_add_pauses(thread.native_id, holds_interpreter, busy_until(), _function())
        if number >= 0:
            _numbers[thread] = number
    return _numbers.get(thread)


def hold_back(thread: threading.Thread) -> None:
    """Lower a thread, and have it pause at once where it would by its `Patience`."""
    _lower(thread)
    library = _library()
    if library is None:
        return
    with _lock:
        number = _number_of(library, thread)
        if number is not None and thread not in _held_back:
            _held_back.add(thread)
            library.chairlift_begin_pauses(number)


class Patience:
    """Has the thread that makes it pause within it while a model computes, once that took long (native/pauses.cpp).

    Only in code of llguidance, and without the interpreter's lock. There must be no other that anybody waits for.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` of a core are not long yet."""
        self._nanoseconds = int(seconds * 1e9)
        self._library, self._number = _library(), None
        if self._library is not None:
            with _lock:
                self._number = _number_of(self._library, threading.current_thread())

    def __enter__(self) -> None:
        if self._library is not None and self._number is not None:
            self._library.chairlift_begin_work(self._number, self._nanoseconds)

    def __exit__(self, *error: object) -> None:
        if self._library is not None and self._number is not None:
            self._library.chairlift_end_work(self._number)


@contextlib.contextmanager
def while_computing() -> Iterator[None]:
    """Have threads whose work takes long pause meanwhile, and until the next step if one soon follows."""
    _count_computing(1)
    try:
        yield
    finally:
        _count_computing(-1)


@contextlib.contextmanager
def while_waiting() -> Iterator[None]:
    """Within `while_computing`: have them go on meanwhile, unless another model computes."""
    _count_computing(-1, 0)
    library = _library()
    if library is not None and not _num_computing:
        library.chairlift_end_pauses()
    try:
        yield
    finally:
        _count_computing(1)


def rest() -> None:
    """Have them go on, unless a model computes: nothing is left to compute, so between steps they hold up nobody."""
    with _lock:
        if _num_computing:
            return
        _busy_until.value = 0
        can_pause = bool(_numbers)
    if can_pause and (library := _library()) is not None:
        library.chairlift_end_pauses()


def _count_computing(more: int, between_steps: int = _BETWEEN_STEPS) -> None:
    global _num_computing
    with _lock:
        _num_computing += more
        _busy_until.value = _FOREVER if _num_computing else time.monotonic_ns() + between_steps


@atexit.register
def _let_end() -> None:
    """Wait for those that are held back: one that comes back from its library to no interpreter crashes the process."""
    _busy_until.value = 0
    end = time.monotonic() + _END_SECONDS
    for thread in list(_held_back):
        thread.join(max(end - time.monotonic(), 0.0))

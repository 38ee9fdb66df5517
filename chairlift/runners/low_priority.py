"""Threads that run only where others leave time."""

import contextlib
import os
import threading

_LOWEST_PRIORITY = 19


def lower(thread: threading.Thread) -> None:
    """Let a thread run only where others leave time, for the rest of its life; not if it has ended."""
    if thread.native_id is None or not thread.is_alive():
        return
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
        elif hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, _LOWEST_PRIORITY)

"""What the front's one thread does, for whoever tells what a request takes of it."""

import os
import time
import weakref
from typing import NamedTuple


class FrontMoment(NamedTuple):
    """For how long the thread had been held, and what it had answered: requests for items, and steps of texts."""

    held_s: float
    requests: int
    steps: int


class FrontClock:
    """Counts what is answered, beside how long the thread that asks has worked or waited for a core to.

    While a worker computes on all cores, what the front does takes as much longer as it waits for one.
    """

    def __init__(self) -> None:
        self.requests = self.steps = 0
        self._file: int | None = None

    def now(self) -> FrontMoment:
        """As of now. From the event loop's thread only."""
        return FrontMoment(self._held(), self.requests, self.steps)

    def _held(self) -> float:
        if self._file is None:
            try:
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._file = -1
            else:
                weakref.finalize(self, os.close, self._file)
        if self._file < 0:
            return time.thread_time()
        worked, waited, _ = os.pread(self._file, 128, 0).split()
        return (int(worked) + int(waited)) / 1e9

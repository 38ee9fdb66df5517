"""How long work takes that others may not wait for."""

import threading
import time

# Seconds of a core after which it is long, and between two looks at how many it took, so that the first finds it.
MUCH, LOOK_EVERY = 0.0015, 0.002
# Seconds by the wall after which it is too, whatever keeps it: many more, since what has no core, as the model has them
# all, is not slow; and where there is no telling.
_LONG, _LONG_WITHOUT_CLOCK = 0.05, 0.005


class Stopwatch:
    """How long a thread has been at a piece of work, and how much of a core it took. Others may look at it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._clock: int | None = None
        self._cpu_began = 0.0

    def start(self) -> None:
        """The thread that calls this begins now."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._cpu_began = time.clock_gettime(self._clock)
        self.began = time.monotonic()

    def shows_long(self, patience: float = 1) -> bool:
        """Whether others should no longer wait for it."""
        long = _LONG_WITHOUT_CLOCK if self._clock is None else _LONG
        return time.monotonic() - self.began > patience * long or self.shows_much(patience)

    def shows_much(self, patience: float = 1) -> bool:
        """Whether it took more of a core than others should wait for."""
        if self._clock is None:
            return False
        try:
            return time.clock_gettime(self._clock) - self._cpu_began > patience * MUCH
        except OSError:  # the thread has ended
            return False

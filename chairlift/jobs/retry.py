"""What an answer means for its line: done, to be sent again, or failed. Pure."""

import enum

import msgspec

# The third time a line runs alone; if the worker had nothing of others either, only its own doing can end it then.
MAX_LOST = 3
# Where others' requests are there each time, it is given up all the same: each such death is at their cost.
MAX_LOST_BESIDE = 8

_FIRST_DELAY = 0.25
_MAX_DELAY = 30.0
_TIMES = frozenset({408, 424, 500, 502, 504})


class LineVerdict(enum.Enum):
    """What becomes of a line."""

    DONE = "done"
    FAILED = "failed"
    AGAIN = "again"
    WAIT = "wait"
    ALONE = "alone"


class Attempts(msgspec.Struct):
    """How often a line was answered with an error of the server's, or was there when a worker died, or had to wait."""

    errors: int = 0
    lost: int = 0
    waits: int = 0

    def judge(self, status: int, worker_lost: bool, max_attempts: int, alone: bool = False) -> LineVerdict:
        """Count an answer and say what follows.

        A server that is full or not ready makes the line WAIT, however often. Errors of its own end at `max_attempts`.
        A line that was there when a worker died may be the cause: after the second time it must run ALONE. But other
        requests may be beside it all the same. Only if it was `alone` it is to blame; what has failed so, has failed.
        """
        if status < 300:
            return LineVerdict.DONE
        if worker_lost:
            self.lost += 1
            if self.lost >= (MAX_LOST if alone else MAX_LOST_BESIDE):
                return LineVerdict.FAILED
            return LineVerdict.ALONE if self.suspect else LineVerdict.AGAIN
        if status in (429, 503):
            self.waits += 1
            return LineVerdict.WAIT
        if status in _TIMES and not alone:
            self.errors += 1
            return LineVerdict.AGAIN if self.errors < max_attempts else LineVerdict.FAILED
        return LineVerdict.FAILED

    @property
    def suspect(self) -> bool:
        """Whether the line may run only with nothing beside it."""
        return self.lost >= MAX_LOST - 1

    def delay(self, retry_after: float, luck: float) -> float:
        """Seconds until it is sent again: doubling, at least what the server asks for, spread by `luck` in 0..1."""
        doubled = _FIRST_DELAY * 2.0 ** min(self.errors + self.lost + self.waits - 1, 10)
        return max(min(doubled, _MAX_DELAY) * (0.5 + luck / 2), retry_after * (1 + luck / 4))

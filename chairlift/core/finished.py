"""How work ends, whatever kind of work it is."""

import enum
from typing import Any

import msgspec


class FinishReason(enum.StrEnum):
    """Reason why work is over: a sequence stops or has its length, an item is done or shed, and either may fail.

    What is `invalid` failed by what was asked for, as far as only running it shows that; who is `late` was let in, and
    given up when the client's own time was over.
    """

    STOP = "stop"
    LENGTH = "length"
    DONE = "done"
    SHED = "shed"
    LATE = "late"
    ABORT = "abort"
    ERROR = "error"
    INVALID = "invalid"


class ShedReason(enum.StrEnum):
    """Reason why work was not let in, or not kept."""

    QUEUE_FULL = "queue_full"  # as many wait as may
    QUEUE_SECONDS = "queue_seconds"  # more seconds of work wait than are allowed
    DEADLINE = "deadline"  # it would not be done in time
    TTFT = "ttft"  # its first token would come too late


class Finished(msgspec.Struct, frozen=True):
    """Work that is over and will not be heard of again.

    `detail` is the stop token's id, an error's text, or what there is to say of one that was `shed`, and why. What is
    `deadly` ended or hung the process that computed it, with nothing beside it, as often as it was tried.
    """

    id: str
    reason: FinishReason
    detail: Any = None
    shed: ShedReason | None = None
    deadly: bool = False


class Shed(Exception):
    """Work that is refused for now, because of the load; `retry_after` is in seconds."""

    def __init__(self, reason: ShedReason, detail: str, retry_after: float) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_after = retry_after

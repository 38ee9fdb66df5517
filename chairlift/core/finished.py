"""How work ends."""

import enum
from typing import Any

import msgspec


class FinishReason(enum.StrEnum):
    """Reason a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Finished(msgspec.Struct, frozen=True):
    """A request that ended in this update. `detail` is the stop token's id, or the error's text."""

    request_id: str
    reason: FinishReason
    detail: Any = None

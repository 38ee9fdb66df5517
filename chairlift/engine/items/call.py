"""One call with a batch of items: what comes of it, wherever it runs."""

from collections.abc import Callable
from typing import Any

import msgspec

from chairlift.core.items.item import Failure

OnParts = Callable[[dict[int, Any]], None]


class CallResult(msgspec.Struct):
    """A result for each payload, an exception where that item alone failed; and the seconds that the call took.

    `idle` is how long, before it, whoever computes had nothing to do, if that is known.
    """

    results: list[Any]
    seconds: float
    idle: float | None = None


class CallFailed(Exception):
    """The call failed as a whole, in the way that `failure` says; the text is for people."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail


def describe(error: BaseException) -> str:
    """Say in one line what was raised."""
    return f"{type(error).__name__}: {error}"

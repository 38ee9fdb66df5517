"""One call with a batch of items: what comes of it, wherever it runs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from chairlift.core.finished import Finished
from chairlift.core.items.item import Failure
from chairlift.errors import ITEM_ENDS_WORKER, RequestFailed
from chairlift.runners.error_text import describe

# Is handed the parts of a step of a stream, by item. Of those it returns they are also in the results; of all, if it
# returns None. Raises Unwanted.
OnParts = Callable[[dict[int, Any]], dict[int, Any] | None]


class Unwanted(Exception):
    """Nobody waits for a stream any more: whoever hands over its parts need not go on."""


class CallResult(msgspec.Struct):
    """A result for each payload, an exception where that item alone failed; and the seconds that the call took.

    Since the one before it whoever computes had nothing to do for `idle` seconds, and other things to do for so many,
    the `gap`, if that is known.
    """

    results: list[Any]
    seconds: float
    idle: float | None = None
    gap: float | None = None


class CallFailed(Exception):
    """The call failed as a whole, in the way that `failure` says; the text is for people."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail


def raisable(error: BaseException) -> BaseException:
    """What a future takes: no StopIteration, nor a cancellation or an exit, which a caller would take for its own."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RequestFailed(describe(error))
    wrapped.__cause__ = error
    return wrapped


def error_of(end: Finished) -> RequestFailed:
    """What to tell of an item whose call failed as a whole."""
    return RequestFailed(end.detail, ITEM_ENDS_WORKER) if end.deadly else RequestFailed(end.detail)


def checked(results: Sequence[Any], expected: int) -> Sequence[Any]:
    """One result each. If they are too few or too many nobody's can be told, and smaller batches would not help."""
    if len(results) == expected:
        return results
    error = RequestFailed(
        f"{len(results)} results came for a batch of {expected}: there must be one for each, in order"
    )
    return [error] * expected


class BatchExecutor(Protocol):
    """Computes batches, one at a time.

    One whose `queues` is true may be given a batch while it is at another, and begins it by itself after that.
    """

    async def run(self, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
        """Compute one batch. Raises CallFailed; any other exception counts as one that the call raised."""

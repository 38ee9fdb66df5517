"""One call with a batch of items: what comes of it, wherever it runs."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from chairlift.core.items.item import Failure
from chairlift.runners.items import ItemRunner, StreamingRunner
from chairlift.runners.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

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


def compute(runner: ItemRunner, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
    """Run one batch in the calling thread.

    `on_parts` is for a `StreamingRunner` only, and gets the parts as they come. Raises CallFailed, after logging the
    traceback.
    """
    started = time.perf_counter()
    try:
        if on_parts is None:
            results = runner.run(payloads)
        else:
            streaming: StreamingRunner = runner  # type: ignore[assignment]
            results = streaming.stream(payloads, on_parts)
        if len(results) != len(payloads):
            raise ValueError(f"{len(results)} results for {len(payloads)} payloads")
    except Exception as error:
        log.warning("a call of %d items failed", len(payloads), exc_info=True)
        failure = Failure.OUT_OF_MEMORY if is_out_of_memory(error) else Failure.RAISED
        raise CallFailed(failure, describe(error)) from error
    return CallResult(results, time.perf_counter() - started)


def describe(error: BaseException) -> str:
    """Say in one line what was raised."""
    return f"{type(error).__name__}: {error}"

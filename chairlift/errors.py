"""Errors that a user can act on: each says what was wrong and what to change."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def clip(text: str, limit: int = 1000) -> str:
    """A text to show: of one with more than `limit` characters, most of which a client may have sent, both ends."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]} [...] {text[-tail:]}"


class ChairliftError(Exception):
    """Base of every error that Chairlift raises on purpose."""


class InvalidRequest(ChairliftError):
    """The request can never be served as it is (HTTP 400). `param` names the field at fault, `code` is for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InputTooLong(InvalidRequest):
    """An input has more tokens than the model takes. `index` is its place among those of the request."""

    def __init__(self, message: str, param: str | None, index: int) -> None:
        super().__init__(message, param)
        self.index = index


class BadItem(InvalidRequest):
    """An item that the model can make nothing of (HTTP 400); for Python classes and functions to raise.

    `index` is its place among those of the request, which is not for them to say.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message if index is None else f"item {index}: {message}", code="bad_item")
        self.index = index


class QueueFull(ChairliftError):
    """The queue is at its limit (HTTP 429). `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(ChairliftError):
    """The model is loading, draining, or its worker died (HTTP 503). `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WorkerLost(Unavailable):
    """The model's worker died while it had the request (HTTP 503), perhaps because of it: `alone`, it had no other."""

    def __init__(self, message: str, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


# The code of a request with an item that ended or hung its worker, alone in its call, as often as it was tried.
ITEM_ENDS_WORKER = "item_ends_worker"


class RequestFailed(ChairliftError):
    """The request was accepted and then failed while it ran (HTTP 500). `code` is for programs."""

    def __init__(self, message: str, code: str = "request_failed") -> None:
        super().__init__(message)
        self.code = code


class UnsupportedModel(ChairliftError):
    """The model folder asks for something that Chairlift does not implement; the message lists what works."""


class ConfigError(ChairliftError):
    """A setting is unknown, malformed or contradicts another; the message names it."""


@contextlib.contextmanager
def looking_at(path: Path) -> Iterator[None]:
    """Have what the system does not let this process see, at a path or in it, raise ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path} can't be looked at: {error.strerror or error}") from error


class DownloadFailed(ChairliftError):
    """A model of the Hub could not be had whole; the message says why, and what is kept of it."""


class StaleLibrary(ChairliftError):
    """The native library was built from other sources than this code; the message says what differs, and to rebuild."""


class DeadlineExceeded(ChairliftError):
    """The request was not, or could not have been, done by its deadline (HTTP 504)."""


class JobError(ChairliftError):
    """A batch job can't begin or go on; the message says what to change. What it has done is kept."""


class StoreBusy(JobError):
    """Another process works with a job store."""


class StorageLost(JobError):
    """What a job has kept was taken away, or replaced, while it ran: what it does from here on would be lost."""


class StorageFull(JobError):
    """There is no space for a job's results. Nothing that was committed is lost, and nothing half-written stays."""

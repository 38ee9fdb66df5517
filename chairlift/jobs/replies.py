"""Whoever answers the lines of a job, as the job knows it."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

# The header, in any shape of answer, by which a line is known that was alone in a worker, or in a call, as that ended.
ENDS_WORKER = b"x-ends-worker"


class Reply(msgspec.Struct):
    """An answer. Header names are lower-case."""

    status: int
    headers: Iterable[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """A header's value, or None."""
        return next((value for key, value in self.headers if key == name), None)


class Client(Protocol):
    """Sends one request and returns the whole answer."""

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a JSON body. Cancelling this cancels the request."""
        ...

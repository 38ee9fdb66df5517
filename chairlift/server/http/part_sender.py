"""Parts of an answer on their way out, and a sign of life to clients that wait long for one."""

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import Send

from chairlift.server.http.part_writer import PartWriter

# After so long without a byte a stream of events gets a comment: some clients give up after five minutes.
WAITING_S = 60.0
# A line alone: of a blank one behind it some clients make an event that is empty, and fail to read it.
_WAITING = b": waiting\n"


class PartSender:
    """Sends the parts of one answer, of which the writer, if there is one, writes some by itself.

    `begun` says that the answer's head is sent.
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], writer: PartWriter | None) -> None:
        self._send, self._headers, self._writer = send, headers, writer
        self._beginning = asyncio.Lock()
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None
        self.begun = False

    async def begin(self) -> None:
        """Send the head, if that is yet to be done."""
        if not self.begun:
            async with self._beginning:
                # Another task may have done so meanwhile.
                if not self.begun:
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                    self.begun = True

    async def send(self, raw: bytes) -> None:
        """Send what others are to follow."""
        if not self.begun:
            await self.begin()
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})

    async def part(self, part: bytes) -> None:
        """Send a part. From then on the writer may write others."""
        self._sent += 1
        await self.send(part)
        if self._writer is not None:
            self._writer.follows = True

    async def last(self, raw: bytes) -> None:
        """Send what is told of an error, after all that the writer has: a step may have come with what ended it."""
        if self._writer is not None:
            self._writer.flush()
        await self.send(raw)

    @contextlib.contextmanager
    def telling_to_wait(self) -> Iterator[None]:
        """Around what sends parts: whenever none has gone out for `WAITING_S`, a comment does."""
        self._look_later()
        try:
            yield
        finally:
            # Timers cost less than a task, and hardly any answer lives to see one.
            for each in (self._timer, self._telling):
                if each is not None:
                    each.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WAITING_S, self._look, self._count())

    def _look(self, before: int) -> None:
        if self._count() == before:
            self._telling = asyncio.create_task(self.send(_WAITING))
        self._look_later()

    def _count(self) -> int:
        return self._sent + (0 if self._writer is None else self._writer.written)

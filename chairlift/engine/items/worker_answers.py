"""What a worker gave, read from its frames and handed over in the order in which it came."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from chairlift.engine.items.arrays import decode, decode_each
from chairlift.runners.error_text import describe

log = logging.getLogger(__name__)

# Beyond so many bytes of plain values the event loop leaves reading and writing them to a thread: what is less is done
# within a millisecond or two.
LARGE_BYTES = 2**17


class Unreadable(Exception):
    """What a worker gave can't be read; the text says why."""


# Takes what the frames hold, an empty list where there are none, or why they can't be read.
HandOver = Callable[[list[Any] | Unreadable], None]


class WorkerAnswers:
    """Hands over what is added: at once, or where it is large, or follows what is, when a thread has read that.

    All methods belong to one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[list[memoryview], HandOver]] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, frames: list[memoryview], hand_over: HandOver) -> None:
        """Hand over the values in these frames after whatever was added before."""
        if self._task is None and not _are_large(frames):
            hand_over(_read(frames))
            return
        self._waiting.append((frames, hand_over))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._go_on(), name="worker answers")

    def then(self, act: Callable[[], None]) -> None:
        """Do something after whatever was added before."""
        self.add([], lambda _: act())

    async def done(self) -> None:
        """Return once all is handed over."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _go_on(self) -> None:
        while self._waiting:
            frames, hand_over = self._waiting.popleft()
            found = await asyncio.to_thread(_read, frames) if _are_large(frames) else _read(frames)
            try:
                hand_over(found)
            except Exception as error:
                # A mistake of ours, for which nobody else is to wait for ever.
                log.critical("an answer could not be handed over", exc_info=error)
        self._task = None


def _are_large(frames: list[memoryview]) -> bool:
    return bool(frames) and frames[0].nbytes > LARGE_BYTES


def _read(frames: list[memoryview]) -> list[Any] | Unreadable:
    try:
        if not frames:
            return []
        found: list[Any] = decode_each(frames) if _are_large(frames) else decode(frames)
    except Exception as error:
        return Unreadable(describe(error))
    return found

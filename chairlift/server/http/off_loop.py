"""Work that would hold up the event loop, done in a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Below this many characters tokenizing takes less time than a thread's round trip is worth.
INLINE_SIZE = 16_384


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do the work here and now, or in a thread if its `size` in characters (or numbers to print) is large."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)

"""Files that may change while the server runs, and what they say."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from chairlift.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0

_Look = tuple[tuple[int, int, int] | None, ...]


class Reloaded(Generic[T]):
    """What `read` makes of some files, now and whenever they change. Raises what `read` raises, the first time."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        # Before it is read: what changes meanwhile is seen by the next look.
        self._seen = _look(paths)
        # What was logged last: of which state of the files, and what was wrong.
        self._logged: tuple[_Look, str] | None = None
        self.value = read()

    async def watch(self, take: Callable[[T], None]) -> None:
        """Hand over what is new, on the event loop, until this is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if await self.look_again():
                take(self.value)

    async def look_again(self) -> bool:
        """Whether there is something new. Files that are wrong are logged, once, and change nothing.

        They are not read again before they change. Those that could not be read are: what kept them from that may pass.
        """
        found = await asyncio.to_thread(_look, self._paths)
        if found == self._seen:
            return False
        try:
            self.value = await asyncio.to_thread(self._read)
        except Exception as error:
            # Whatever it is, the next change is looked at too.
            if isinstance(error, ConfigError) and not isinstance(error.__cause__, OSError):
                self._seen = found
            if (problem := (found, str(error))) != self._logged:
                self._logged = problem
                log.error("%s; what was read before stays in force", error)
            return False
        self._seen, self._logged = found, None
        log.info("read anew: %s", ", ".join(map(str, self._paths)))
        return True


def _look(paths: Sequence[Path]) -> _Look:
    """What tells one state of the files from another, without reading them."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        found.append(None)
        with contextlib.suppress(OSError):
            status = path.stat()
            found[-1] = (status.st_mtime_ns, status.st_ino, status.st_size)
    return tuple(found)

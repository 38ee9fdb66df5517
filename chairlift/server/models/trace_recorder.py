"""What came, as a trace for the simulator: a line for each request, without any text, in a file that is bounded."""

import asyncio
import errno
import fcntl
import logging
import os
import stat
import threading
from collections import deque
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.server.models.trace_notes import SeenLine, TraceNotes

logger = logging.getLogger(__name__)

# How often lines are written. A server that is killed loses those of so many seconds.
_SECONDS = 1.0


class TraceRecorder(TraceNotes):
    """Appends a line for each request to a file, in a thread, once a second.

    At `max_bytes`, or if the file can't be written, recording stops, and one line of the log says so.
    """

    taker = "the disk"

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file. Raises ConfigError if that can't be."""
        super().__init__()
        self._path = path
        self._max_bytes = max_bytes
        # What is the thread's to write.
        self._handed: deque[list[SeenLine]] = deque()
        try:
            self._file = _opened(path)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            raise ConfigError(f"record {path}: {error.strerror}") from None
        self._writing = threading.Lock()

    async def keep_writing(self) -> None:
        """Write what comes until this is cancelled."""
        while self.is_open:
            await asyncio.sleep(_SECONDS)
            self._hand_over()
            await asyncio.to_thread(self._write)

    def close(self) -> None:
        """Write the rest, and end; what comes later is not recorded. Blocks."""
        self._hand_over()
        self._write()
        self.stop()
        with self._writing:
            os.close(self._file)

    def _hand_over(self) -> None:
        if seen := self.take():
            self._handed.append(seen)

    def _write(self) -> None:
        """Append the lines that were handed over, as many as the file may hold; none of them in part."""
        with self._writing:
            while self._handed:
                self._append(self._handed.popleft())

    def _append(self, seen: list[SeenLine]) -> None:
        if not self.is_open:
            return
        lines: list[bytes] = []
        size = self._size
        for line in self.encoded(seen):
            size += len(line)
            if size > self._max_bytes:
                self.stop(f"it has max_record_bytes ({self._max_bytes})")
                break
            lines.append(line)
        data = b"".join(lines)
        try:
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += written
        except OSError as error:
            self.stop(error.strerror or str(error))

    def stop(self, reason: str | None = None) -> None:
        """Take nothing more; with a reason, say so once."""
        if self.is_open and reason is not None:
            logger.warning("the trace %s ends here: %s; all else goes on", self._path, reason)
        super().stop()


def _opened(path: Path) -> int:
    """Open a file to append whole lines to, for its owner alone. Raises ConfigError or OSError."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"record {path}: it must be a file, which can be bounded")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"record {path}: another server writes to it; give each its own") from None
        os.fchmod(file, 0o600)
        if status.st_size and os.pread(file, 1, status.st_size - 1) != b"\n":
            os.write(file, b"\n")
    except BaseException:
        os.close(file)
        raise
    return file

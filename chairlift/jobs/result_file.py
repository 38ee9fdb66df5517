"""Append-only files that are as long as was committed, and no longer."""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from chairlift.errors import JobError, StorageFull, StorageLost

# Joined before they are written, so that no second copy of all that is to be committed is made.
_BLOCK_LINES = 256
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ResultFile:
    """One file of result lines. `append` puts bytes on the disk, and `keep` or `drop` says whether they count.

    The file is made with its first byte, with `mode` less the umask. `committed` is the length that counts; whatever
    lies beyond it when the file is opened was written by a process that died before it could commit, and is cut off.
    Raises JobError if the file is shorter, can't be opened or written, or is made by others before its first byte;
    StorageFull if there is no space; StorageLost if it is taken away, or written to, while it is open.
    """

    def __init__(self, path: Path, committed: int, mode: int = 0o666) -> None:
        self.path = path
        self._mode = mode
        self.committed = committed
        self._length = committed
        self._lost = False
        self._fd: int | None = None
        length = length_of(path) or 0
        if length < committed:
            raise JobError(
                f"{path} has {length} bytes, fewer than the {committed} that the job has written: it was changed or "
                "taken away. Put it back, or start anew"
            )
        if committed:
            self._open()
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise explain(error, path) from error

    def append(self, lines: Sequence[bytes]) -> int:
        """Write to the disk, and return the length that the file then has. Blocks until it is there."""
        self.check()
        if lines:
            try:
                fd = self._open() if self._fd is None else self._fd
                for start in range(0, len(lines), _BLOCK_LINES):
                    self._write(fd, b"".join(lines[start : start + _BLOCK_LINES]))
                getattr(os, "fdatasync", os.fsync)(fd)  # macOS has only the latter
            except OSError as error:
                raise explain(error, self.path) from error
            self.check()
        return self._length

    def check(self) -> None:
        """Raise StorageLost if it is not there any more as it was written. Does nothing before the first byte."""
        if self._fd is None:
            return
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            same = False
        self._lost = not same or os.fstat(self._fd).st_size != self._length
        if self._lost:
            what = "written to by another program" if same else "taken away, or replaced,"
            raise StorageLost(f"{self.path} was {what} while the job ran")

    def _write(self, fd: int, block: bytes) -> None:
        view = memoryview(block)
        while view:
            # Linux appends, whatever the offset. So a file that was cut meanwhile is too short, which `check` sees.
            # Written at the offset it would be as long as expected, with a hole.
            written = os.pwrite(fd, view, self._length)
            self._length += written
            view = view[written:]

    def keep(self) -> None:
        """What was appended counts from now on."""
        self.committed = self._length

    def drop(self) -> None:
        """Cut off what was appended and does not count; what is not this job's any more stays as it is."""
        self._length = self.committed
        if self._fd is not None and not self._lost:
            os.ftruncate(self._fd, self.committed)

    def close(self) -> None:
        """Cut off what does not count, and close the file."""
        self.drop()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        # What was there when the run began is gone by now: a file that nothing is committed to is somebody else's.
        new = 0 if self.committed else os.O_EXCL
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | new
            fd = self._fd = os.open(self.path, flags, self._mode)
            os.ftruncate(fd, self.committed)
            sync_folder(self.path.parent)
        except OSError as error:
            raise explain(error, self.path) from error
        return fd


def length_of(path: Path) -> int | None:
    """How many bytes a file of results has, None if there is none. Raises JobError for what can't be one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain(error, path) from error
    if not stat.S_ISREG(found.st_mode):
        raise JobError(f"{path} is not a regular file, and results don't replace it: name another file")
    return found.st_size


def sync_folder(folder: Path) -> None:
    """See to it that the names of files just made in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def explain(error: OSError, path: Path) -> JobError:
    """The same error in words that say what to do."""
    problem = error.strerror or str(error)
    if error.errno in _FULL:
        return StorageFull(f"there is no space for {path} ({problem}): make some, or raise the quota")
    if isinstance(error, FileExistsError):
        return JobError(f"{path} was made by another program after this run began: name a file of this run's own")
    return JobError(f"{path} can't be written: {problem}")

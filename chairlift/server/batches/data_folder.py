"""The data folder: a store that says which files there are, and the files, each named by its id alone."""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from chairlift.errors import StoreBusy
from chairlift.jobs.result_file import explain
from chairlift.jobs.store import Job, Store, StoredFile
from chairlift.server.batches.record import OVER, about

log = logging.getLogger(__name__)

# Whoever may not read the prompts of others in memory shall not read them here.
FILE_MODE, _FOLDER_MODE = 0o600, 0o700
# What OpenAI's list of files holds at most.
MAX_FILES = 10_000

_STORE = "jobs.sqlite"
_FILES = "files"
_ID = re.compile(r"file-[0-9a-f]{24}")


class Folder:
    """A server's files, batches and results on the disk; this process's own as long as it is open. Opening it blocks.

    `used` counts the bytes of each tenant's files, those on their way in too, of which there are `uploads`; `over` the
    batches of former servers that are over.
    `left` are those that they left behind, with what had become of their lines. All methods belong to one event loop.
    Raises JobError if another process has the folder or it can't be used, StorageFull if there is no space.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = path / _FILES
        try:
            path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            self._files.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        except OSError as error:
            raise explain(error, path) from error
        self.store = _open_store(path)
        try:
            jobs = self.store.jobs(limit=-1, newest_first=False)
            self.over = Counter(job.state for job in jobs if job.state in OVER)
            self.left = [(job, self.store.checkpoint(job.id).counts) for job in jobs if job.state not in OVER]
            self.files = {file.id: file for file in self.store.files(limit=-1, newest_first=False)}
            self._remove_leftovers()
        except BaseException:
            self.store.close()
            raise
        self.uploads: Counter[str | None] = Counter()
        self.used: Counter[str | None] = Counter()
        for file in self.files.values():
            self.used[file.tenant] += file.bytes

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a server has kept anything there. Raises JobError if that can't be seen."""
        try:
            return (path / _STORE).exists()
        except OSError as error:
            raise explain(error, path) from error

    def place(self, file_id: str) -> Path:
        """Where a file lies; the id is one that the server made."""
        if not _ID.fullmatch(file_id):
            raise ValueError(f"{file_id!r} is no id of a file")
        return self._files / file_id

    async def add(self, file: StoredFile) -> None:
        """Note a file whose bytes are on the disk and counted."""
        await asyncio.to_thread(self.store.add_file, file)
        self.files[file.id] = file

    def count(self, files: list[StoredFile]) -> None:
        """Count files that the store has noted with their batch."""
        for file in files:
            self.files[file.id] = file
            self.used[file.tenant] += file.bytes

    async def remove(self, file_id: str) -> None:
        """Forget a file and free its space."""
        await asyncio.to_thread(self._remove, file_id)
        file = self.files.pop(file_id)
        self.used[file.tenant] -= file.bytes

    def _remove(self, file_id: str) -> None:
        # In this order: what is forgotten and still there is deleted when the folder is opened.
        self.store.remove_file(file_id)
        with contextlib.suppress(OSError):
            self.place(file_id).unlink()

    def result(self, job: Job, which: Literal["output", "error"], size: int) -> StoredFile:
        """A file of a batch's results, as of now."""
        noted = about(job)
        now = time.time()
        return StoredFile(
            id=noted.results[0 if which == "output" else 1],
            bytes=size,
            created_at=now,
            filename=f"{job.id}_{which}.jsonl",
            purpose="batch_output",
            expires_at=None if noted.output_seconds is None else now + noted.output_seconds,
            tenant=job.tenant,
        )

    def holds(self, file: StoredFile) -> bool:
        """Whether the bytes of a file are there, if it has any."""
        try:
            return not file.bytes or self.place(file.id).stat().st_size == file.bytes
        except OSError:
            return False

    def close(self) -> None:
        """Let others have the folder."""
        self.store.close()

    def _remove_leftovers(self) -> None:
        """Free the space of uploads that were cut off, and of files that were about to be deleted."""
        wanted = set(self.files)
        for job, _ in self.left:
            wanted.update(about(job).results)
        there = {entry.name for entry in os.scandir(self._files) if _ID.fullmatch(entry.name)}
        for name in there - wanted:
            self.place(name).unlink()
        for file_id in self.files.keys() - there:
            log.error("%s (%r) is gone from %s", file_id, self.files.pop(file_id).filename, self._files)
            self.store.remove_file(file_id)


def has_room(used: Counter[str | None], limit: int, tenant: str | None, more: int = 1) -> bool:
    """Whether somebody may have so much more, of what all tenants together may have only so much of.

    A tenant with a name may have no more than is left free then, so that nobody takes all. Whoever runs the server may.
    """
    free = limit - used.total() - more
    return free >= 0 and (tenant is None or used[tenant] + more <= max(free, 1))


def _open_store(path: Path) -> Store:
    try:
        return Store(path / _STORE)
    except StoreBusy:
        message = f"{path} is in use by another server: end that one, or give this one its own data_dir"
        raise StoreBusy(message) from None

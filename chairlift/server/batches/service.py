"""All files and batches of a server: made, listed, deleted, and brought to their end in the background."""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp

from chairlift.config.server import ServerConfig
from chairlift.errors import StorageLost, Unavailable
from chairlift.jobs.store import Counts, Job, JobState, StoredFile
from chairlift.server.batches.batch_run import BatchContext, BatchRun, too_late
from chairlift.server.batches.data_folder import MAX_FILES, Folder, has_room
from chairlift.server.batches.endpoints import BatchEndpoints
from chairlift.server.batches.record import OVER, About, note
from chairlift.server.http.api_errors import ApiError, try_later
from chairlift.server.http.endpoint import Endpoint
from chairlift.server.http.local_client import AppClient
from chairlift.server.http.tenants import Keys, Tenant
from chairlift.server.models.registry import Models

log = logging.getLogger(__name__)

# Beyond so many, each new batch takes the place of the one that has been over for longest.
MAX_KEPT = 10_000

_LONGEST_SLEEP_S = 3600.0


class Batches:
    """The files and batches of one server. The data folder is opened when it is needed, and made for the first file.

    A `viewer` is the tenant who asks; None is whoever runs the server. What belongs to another is not there for it. All
    methods but `open` belong to the event loop. Raises JobError if another process has the folder, StorageFull if there
    is no space, StorageLost once what was kept was taken away or overwritten. Batches that ran have failed then.
    """

    def __init__(self, models: Models, config: ServerConfig) -> None:
        self.config = config
        self.endpoints = BatchEndpoints((), models)
        self._models = models
        self._app: ASGIApp | None = None
        self._keys: Keys | None = None
        self._folder: Folder | None = None
        self._context: BatchContext | None = None
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.Task[None] | None = None
        self._file_came = asyncio.Event()
        self._opening = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._over: Counter[JobState] = Counter()
        self._lines: Counter[str] = Counter(completed=0, failed=0)
        self._leaving = self._lost = self._closed = False

    def serve(self, app: ASGIApp, table: Iterable[Endpoint], keys: Keys) -> None:
        """Lines of batches go to this application, which has these routes, as requests of whoever began the batch."""
        self._app = app
        self._keys = keys
        self.endpoints = BatchEndpoints(table, self._models)

    # The folder

    def open(self, make: bool = False) -> None:
        """Open the folder if there is one, or in any case with `make`. Blocks."""
        path = Path(self.config.data_dir)
        if self._folder is None and self.config.data_dir and (make or Folder.exists(path)):
            self._folder = Folder(path)

    async def folder(self, make: bool = False) -> Folder | None:
        """The folder, with its batches under way. Raises ApiError where the settings want none."""
        if not self.config.data_dir:
            message = "this server keeps no files: data_dir is empty, and /v1/files and /v1/batches need a folder"
            raise ApiError(404, message, code="no_data_dir")
        self._check_open()
        if self._context is None:
            async with self._opening:
                await asyncio.to_thread(self.open, make)
                self.resume()
        if self._folder is not None:
            await self._check_kept(self._folder)
        return self._folder

    async def _check_kept(self, folder: Folder) -> None:
        """Raise StorageLost if what was kept is lost, of which all batches hear."""
        try:
            await asyncio.to_thread(folder.store.check)
        except StorageLost as lost:
            # Closing it changes its files, too.
            self._check_open()
            if not self._lost:
                self._lost = True
                log.critical("%s; files and batches are refused until the server starts anew", lost)
            for run in self._runs.values():
                run.give_up(str(lost))
            raise

    def resume(self) -> None:
        """Go on with batches that are not over, if the folder is open."""
        folder = self._folder
        if folder is None or self._context is not None or self._leaving:
            return
        assert self._app is not None
        assert self._keys is not None
        self._context = BatchContext(
            folder=folder,
            client=AppClient(self._app, background=True),
            endpoints=self.endpoints,
            config=self.config,
            keys=self._keys,
            turns={},
        )
        self._over = folder.over
        for job, counts in folder.left:
            self._start(job, counts)
        if self._runs:
            log.info("going on with %d batches", len(self._runs))
        self._expiry = asyncio.create_task(self._expire_files(folder))

    async def leave(self) -> None:
        """Send nothing more, commit what is done, and begin nothing new."""
        self._leaving = True
        for run in self._runs.values():
            run.leave()
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Leave, and let others have the folder."""
        await self.leave()
        self._closed = True
        if self._folder is not None:
            await asyncio.to_thread(self._folder.close)

    def _check_stays(self) -> None:
        if self._leaving:
            raise Unavailable("the server is about to leave")

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the server is about to leave")

    # Batches

    async def create(self, new: About, viewer: Tenant | None) -> Job:
        """Begin a batch. Raises ApiError: 404 without its input, 400 or 429 at a limit."""
        self._check_stays()
        folder = await self.folder()
        async with self._changing:
            file = _find(folder, new.input_file_id, viewer)
            if folder is None or file is None:
                message = f"there is no file {new.input_file_id!r}"
                raise ApiError(404, message, "input_file_id", "file_not_found")
            if file.purpose != "batch":
                message = f"a batch's input has the purpose 'batch', not {file.purpose!r}"
                raise ApiError(400, message, "input_file_id", "wrong_purpose")
            owner = viewer.name if viewer is not None else None
            self._check_space(folder, owner)
            noted = msgspec.structs.replace(new, results=(new_file_id(), new_file_id()))
            job = Job(
                id=f"batch_{os.urandom(12).hex()}",
                state="validating",
                entered={"validating": time.time()},
                tenant=owner,
            )
            note(job, noted)
            await asyncio.to_thread(self._add, folder, job)
            self._start(job, Counts())
        return job

    async def get(self, batch_id: str, viewer: Tenant | None) -> tuple[Job, Counts | None]:
        """A batch, and its counts if it is not over. Raises a 404."""
        job, counts = await self._get(batch_id)
        if job is None or not _sees(viewer, job):
            raise ApiError(404, f"there is no batch {batch_id!r}", "batch_id", "batch_not_found")
        return job, counts

    async def _get(self, batch_id: str) -> tuple[Job | None, Counts | None]:
        if (run := self._runs.get(batch_id)) is not None:
            if self._folder is not None and run.kept:
                with contextlib.suppress(StorageLost):
                    await self._check_kept(self._folder)
            return run.job, run.counts
        folder = await self.folder()
        return await asyncio.to_thread(folder.store.job, batch_id) if folder is not None else None, None

    async def page(
        self, after: str | None, limit: int, viewer: Tenant | None
    ) -> tuple[list[tuple[Job, Counts | None]], bool]:
        """Batches, newest first, and whether there are more."""
        if after is not None:
            await self.get(after, viewer)
        folder = await self.folder()
        jobs: list[Job] = []
        if folder is not None:
            tenant = None if viewer is None or viewer.sees_all else viewer.name
            jobs = await asyncio.to_thread(folder.store.jobs, after, limit + 1, tenant=tenant)
        page: list[tuple[Job, Counts | None]] = []
        for job in jobs[:limit]:
            run = self._runs.get(job.id)
            page.append((job, None) if run is None else (run.job, run.counts))
        return page, len(jobs) > limit

    async def cancel(self, batch_id: str, viewer: Tenant | None) -> tuple[Job, Counts | None]:
        """Begin to cancel a batch, unless it is cancelled. Raises a 404, or a 409 if it is over."""
        job, _ = await self.get(batch_id, viewer)
        if (run := self._runs.get(batch_id)) is not None:
            return await run.cancel(), run.counts
        if job.state != "cancelled":
            raise too_late(job)
        return job, None

    def under_way(self) -> list[tuple[Job, Counts]]:
        """Those that are not over, the oldest first, each with what has become of its lines."""
        return [(run.job, run.counts) for run in self._runs.values()]

    def _check_space(self, folder: Folder, owner: str | None) -> None:
        most, most_bytes = self.config.max_batches, self.config.max_files_bytes
        if not has_room(Counter(run.job.tenant for run in self._runs.values()), most, owner):
            limit = f"{most} are the limit (max_batches), of which one key may have no more than it leaves free"
            message = f"{len(self._runs)} batches are not over yet: {limit}"
            raise try_later(message, "too_many_batches", 10)
        if not has_room(folder.used, most_bytes, owner):
            limit = f"the limit of {most_bytes} (max_files_bytes), and of one key no more than it leaves free"
            message = f"files take {folder.used.total()} bytes, with {limit}: delete some to have space for results"
            raise ApiError(400, message, None, "storage_limit_exceeded")

    def _add(self, folder: Folder, job: Job) -> None:
        """Note a batch, in place of an old one if there are very many."""
        folder.store.add_job(job)
        if self._over.total() + len(self._runs) < MAX_KEPT:
            return
        for old in folder.store.jobs(limit=self.config.max_batches + 1, newest_first=False):
            if old.state in OVER:
                folder.store.remove_job(old.id)
                self._over[old.state] -= 1
                return

    def _start(self, job: Job, counts: Counts) -> None:
        assert self._context is not None
        run = self._runs[job.id] = BatchRun(self._context, job, counts)
        task = asyncio.create_task(self._run(run, self._context.folder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, run: BatchRun, folder: Folder) -> None:
        try:
            await run.run()
        except Exception:
            log.exception("%s can't go on before the server starts anew", run.job.id)
            return
        if not run.kept:
            with contextlib.suppress(StorageLost):
                await self._check_kept(folder)
            return
        if run.job.state not in OVER:
            return
        folder.count(run.results)
        self._over[run.job.state] += 1
        completed, failed = run.finished_here
        self._lines["completed"] += completed
        self._lines["failed"] += failed
        del self._runs[run.job.id]
        self._file_came.set()

    # Files

    async def add_file(self, file: StoredFile) -> None:
        """Keep a file that is on the disk."""
        folder = await self.folder(make=True)
        assert folder is not None
        await folder.add(file)
        self._file_came.set()

    async def upload_folder(self, owner: str | None) -> Folder:
        """The folder, with space for one more file by number, of this tenant. Raises ApiError."""
        self._check_stays()
        folder = await self.folder(make=True)
        assert folder is not None
        files = Counter(file.tenant for file in folder.files.values())
        if not has_room(files, MAX_FILES, owner):
            all_taken = f"there are {files.total()} files, which is the limit"
            share_taken = f"this key has {files[owner]} files, and may have no more than it leaves free of {MAX_FILES}"
            message = f"{all_taken if files.total() >= MAX_FILES else share_taken}: delete some"
            raise ApiError(413, message, "file", "storage_limit_exceeded")
        return folder

    async def file(self, file_id: str, viewer: Tenant | None) -> tuple[StoredFile, Path]:
        """A file and where it lies. Raises a 404."""
        folder = await self.folder()
        file = _find(folder, file_id, viewer)
        if folder is None or file is None:
            raise ApiError(404, f"there is no file {file_id!r}", "file_id", "file_not_found")
        return file, folder.place(file_id)

    async def content(self, file_id: str, viewer: Tenant | None) -> tuple[StoredFile, Path]:
        """A file and where it lies, if it is still there as it came. Raises a 404, or StorageLost."""
        file, path = await self.file(file_id, viewer)
        assert self._folder is not None
        if not await asyncio.to_thread(self._folder.holds, file):
            # Unless somebody just deletes it: then it is no file any more as soon as that is done.
            async with self._changing:
                await self.file(file_id, viewer)
            raise StorageLost(f"{path} was taken away or changed")
        return file, path

    async def files(self, viewer: Tenant | None) -> list[StoredFile]:
        """All files, in the order in which they came."""
        folder = await self.folder()
        return [file for file in folder.files.values() if _sees(viewer, file)] if folder is not None else []

    async def remove_file(self, file_id: str, viewer: Tenant | None = None) -> None:
        """Delete a file. Raises a 404, or a 409 if a batch needs it."""
        await self.file(file_id, viewer)
        async with self._changing:
            await self.file(file_id, viewer)
            if (needed_by := self._needed_by(file_id)) is not None:
                message = f"{needed_by} needs the file until it is over: cancel it, or wait"
                raise ApiError(409, message, "file_id", "file_in_use")
            assert self._folder is not None
            await self._folder.remove(file_id)

    def _needed_by(self, file_id: str) -> str | None:
        return next((batch for batch, run in self._runs.items() if run.input_file_id == file_id), None)

    async def _expire_files(self, folder: Folder) -> None:
        """Delete files whose time has come; those that a batch needs, when it is over."""
        while True:
            self._file_came.clear()
            now, next_at = time.time(), time.time() + _LONGEST_SLEEP_S
            needed = {run.input_file_id for run in self._runs.values()}
            for file in list(folder.files.values()):
                if file.expires_at is None or file.id in needed:
                    continue
                if file.expires_at > now:
                    next_at = min(next_at, file.expires_at)
                else:
                    await self._expire(file)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._file_came.wait(), next_at - now)

    async def _expire(self, file: StoredFile) -> None:
        try:
            await self.remove_file(file.id)
            log.info("%s (%r) has expired", file.id, file.filename)
        except ApiError:
            # Somebody was quicker, or has just begun a batch with it.
            return
        except Exception as error:
            log.error("%s has expired and can't be deleted: %s", file.id, error)

    # Metrics

    def collect(self) -> Iterable[Metric]:
        """What Prometheus sees."""
        states = self._over + Counter(run.job.state for run in self._runs.values())
        gauge = GaugeMetricFamily("chairlift_batches", "Batches by state.", labels=["state"])
        for state in get_args(JobState):
            gauge.add_metric([state], states[state])
        yield gauge
        waiting = sum(run.waits_for_space for run in self._runs.values())
        yield GaugeMetricFamily("chairlift_batches_waiting_for_room", "Batches that a full disk holds up.", waiting)
        lines = CounterMetricFamily("chairlift_batch_lines", "Lines of batches, by outcome.", labels=["outcome"])
        done = [run.finished_here for run in self._runs.values()]
        lines.add_metric(["completed"], self._lines["completed"] + sum(completed for completed, _ in done))
        lines.add_metric(["failed"], self._lines["failed"] + sum(failed for _, failed in done))
        yield lines


def _sees(viewer: Tenant | None, kept: Job | StoredFile) -> bool:
    return viewer is None or viewer.sees_all or viewer.name == kept.tenant


def _find(folder: Folder | None, file_id: str, viewer: Tenant | None) -> StoredFile | None:
    """A file that is there for the viewer."""
    file = folder.files.get(file_id) if folder is not None else None
    return file if file is not None and _sees(viewer, file) else None


def new_file_id() -> str:
    """An id that nobody can guess, and that can name a file."""
    return f"file-{os.urandom(12).hex()}"

"""One batch from the moment that it is there until it is over: validated, run, its results made files."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec

from chairlift.config.run import Order
from chairlift.config.server import ServerConfig
from chairlift.errors import InvalidRequest, JobError, StorageFull
from chairlift.jobs.executor import JobExecutor, JobOptions, JobOutcome
from chairlift.jobs.ledger import Ledger
from chairlift.jobs.lines import JsonLines, lines_for, parse_batch_line
from chairlift.jobs.store import Counts, Job, JobState, StoredFile
from chairlift.server.batches.data_folder import FILE_MODE, Folder
from chairlift.server.batches.endpoints import BatchEndpoints
from chairlift.server.batches.record import About, Problem, about, note
from chairlift.server.batches.validate import Validation
from chairlift.server.http.api_errors import ApiError, without_folders
from chairlift.server.http.local_client import AppClient
from chairlift.server.http.tenants import Keys
from chairlift.server.models.registry import ModelService
from chairlift.server.models.sequence_service import SequenceService

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# While a model loads.
_LOOK_AGAIN_S = 0.5
# Lines under way where the model is not there to tell.
_FEW = 16
_FINAL: dict[JobOutcome, JobState] = {
    JobOutcome.COMPLETED: "completed",
    JobOutcome.CANCELLED: "cancelled",
    JobOutcome.EXPIRED: "expired",
}


class BatchContext(msgspec.Struct, kw_only=True):
    """What all batches of a server share. `turns`, of each model, are taken by those whose lines run."""

    folder: Folder
    client: AppClient
    endpoints: BatchEndpoints
    config: ServerConfig
    keys: Keys
    turns: dict[str, asyncio.Semaphore]

    def turns_of(self, model: str) -> asyncio.Semaphore:
        """Those of the batches of one model."""
        return self.turns.setdefault(model, asyncio.Semaphore(self.config.max_running_batches))


class _Leaving(Exception):
    """The server leaves, and the batch stays as it is for the next one."""


class BatchRun:
    """A batch that is not over, of whose lines `counts` are done. `results` are the files that came of it in the end.

    `job` is what is kept of it, as far as it can be `kept`. `problem` says what it waits for, if that is space on the
    disk.
    """

    def __init__(self, context: BatchContext, job: Job, counts: Counts) -> None:
        self.job = job
        self.problem: str | None = None
        self.kept = True
        self.results: list[StoredFile] = []
        self._context = context
        self._executor: JobExecutor | None = None
        self._counts = self._earlier = counts
        self._changing = asyncio.Lock()
        self._ending = asyncio.Event()
        self._leaving = asyncio.Event()
        self._lost: str | None = None
        if job.state == "cancelling":
            self._ending.set()

    @property
    def input_file_id(self) -> str:
        """The file that it needs until it is over."""
        return about(self.job).input_file_id

    @property
    def counts(self) -> Counts:
        """What has become of its lines, up to this moment."""
        return self._counts

    @property
    def finished_here(self) -> tuple[int, int]:
        """Lines that were done, and lines that failed, since this run began."""
        counts, earlier = self.counts, self._earlier
        return counts.completed - earlier.completed, counts.failed - earlier.failed

    @property
    def waits_for_space(self) -> bool:
        """Whether the disk is full."""
        return self.problem is not None or (self._executor is not None and self._executor.problem is not None)

    async def run(self) -> None:
        """Bring it to its end, or as far as it gets until `leave`. Raises nothing that the batch is to blame for."""
        try:
            if self.job.state == "cancelling" and "in_progress" not in self.job.entered:
                await self._persist(lambda: self._enter("cancelled"))
                return
            if self.job.state == "validating" and not await self._validate():
                return
            await self._work()
        except _Leaving:
            if self._lost is not None:
                self._fail_unkept(self._lost)
        except Exception as error:
            if isinstance(error, JobError | ApiError):
                log.error("%s failed: %s", self.job.id, error)
            else:
                log.exception("%s failed", self.job.id)
            with contextlib.suppress(_Leaving):
                async with self._changing:
                    await self._fail(without_folders(str(error)))

    async def cancel(self) -> Job:
        """Begin to cancel it, unless that has begun. Raises a 409 if it is too late, or StorageFull."""
        if self.problem is not None:
            raise StorageFull(self.problem)
        async with self._changing:
            if self.job.state in ("cancelling", "cancelled"):
                return self.job
            if self.job.state not in ("validating", "in_progress"):
                raise too_late(self.job)
            await asyncio.to_thread(self._enter, "cancelling")
            self._end()
        return self.job

    def leave(self) -> None:
        """Send nothing more, commit what is done, and end. Lines under way are done anew by the next run."""
        self._leaving.set()
        self._ending.set()
        if self._executor is not None:
            self._executor.stop()

    def give_up(self, reason: str) -> None:
        """Fail, as what was kept is lost, and with it the results. Does nothing to a batch that is over."""
        if self.kept:
            self._lost = without_folders(reason)
            self.leave()

    def _end(self) -> None:
        self._ending.set()
        if self._executor is not None:
            self._executor.cancel()

    # Validating

    async def _validate(self) -> bool:
        """Look through the input; whether it is to be run."""
        context, noted = self._context, about(self.job)
        endpoint = context.endpoints.find(noted.endpoint)
        validation = Validation(context.folder.place(noted.input_file_id), endpoint, context.config)
        ended = await validation.run(self._ending)
        if self._leaving.is_set():
            raise _Leaving
        async with self._changing:
            if not ended or self.job.state == "cancelling":
                await self._persist(lambda: self._enter("cancelled"))
                return False
            if validation.problems:
                await self._persist(lambda: self._close("failed", validation.problems))
            else:
                await self._persist(lambda: self._begin(validation))
        return not validation.problems

    def _begin(self, validation: Validation) -> None:
        def change(job: Job) -> None:
            noted = about(job)
            noted.model = validation.model
            note(job, noted)
            job.total = validation.lines
            _move(job, "in_progress")

        self.job = self._context.folder.store.change_job(self.job.id, change)

    # Running

    async def _work(self) -> None:
        await self._wait_for_model()
        await self._note_model()
        async with self._turn():
            outcome = await self._execute()
        async with self._changing:
            if outcome is JobOutcome.COMPLETED and self.job.state == "in_progress":
                await self._persist(lambda: self._enter("finalizing"))
            final = "cancelled" if self.job.state == "cancelling" else _FINAL[outcome]
            await self._persist(lambda: self._close(final))

    async def _wait_for_model(self) -> None:
        """Return once the model takes requests, or has gone, of which each line will say so."""
        noted = about(self.job)
        while not self._ending.is_set() and time.time() < noted.expires_at:
            try:
                model = self._find_model()
            except (ApiError, InvalidRequest):
                return
            if model is not None and model.ready:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _LOOK_AGAIN_S)

    def _find_model(self) -> ModelService | None:
        """The model that answers its lines; None while that is not known. Raises ApiError or InvalidRequest."""
        noted = about(self.job)
        return self._context.endpoints.find(noted.endpoint).model(noted.model or noted.served)

    def _model(self) -> ModelService | None:
        """The same; None also where there is no such model."""
        try:
            return self._find_model()
        except (ApiError, InvalidRequest):
            return None

    async def _note_model(self) -> None:
        """Where lines name no model, note which one answers, so that another server's does not answer the rest."""
        before, model = about(self.job), self._model()
        endpoint = self._context.endpoints.find_row(before.endpoint)
        is_said = before.model or before.served or not endpoint.bodies_name_models
        if model is None or is_said or self._ending.is_set():
            return

        def change(job: Job) -> None:
            noted = about(job)
            noted.served = model.name
            note(job, noted)

        async with self._changing:
            self.job = await self._persist(lambda: self._context.folder.store.change_job(self.job.id, change))

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until it is this batch's turn, of those for its model; to be ended it needs none."""
        model = self._model()
        turns = self._context.turns_of(about(self.job).endpoint if model is None else model.name)
        acquiring = asyncio.ensure_future(turns.acquire())
        ending = asyncio.ensure_future(self._ending.wait())
        expires_in = max(about(self.job).expires_at - time.time(), 0.0)
        await asyncio.wait((acquiring, ending), timeout=expires_in, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        acquired = not acquiring.cancel()
        try:
            yield
        finally:
            if acquired:
                turns.release()

    async def _execute(self) -> JobOutcome:
        """Send its lines. Raises _Leaving if some are left for the next run."""
        context, job = self._context, self.job
        folder, noted = context.folder, about(job)
        output, errors = (folder.place(each) for each in noted.results)
        source = folder.place(noted.input_file_id)
        if self._leaving.is_set():
            raise _Leaving
        parse = parse_batch_line if noted.served is None else lines_for(noted.served)
        most = context.endpoints.find_row(noted.endpoint).max_line_bytes(context.config)
        ledger = await self._persist(lambda: Ledger(folder.store, job.id, output, errors, FILE_MODE))
        self._counts = ledger.counts
        try:
            client = context.client.of(context.keys.named(job.tenant))
            self._executor = executor = JobExecutor(
                client, ledger, lambda: JsonLines(source, parse, most), job.id, self._options(noted)
            )
            if self._leaving.is_set():
                executor.stop()
            elif self.job.state == "cancelling":
                executor.cancel()
            outcome = await executor.run()
        except StorageFull:
            # It waits for space, unless it is to leave.
            raise _Leaving from None
        finally:
            await asyncio.to_thread(ledger.close)
        if outcome is JobOutcome.STOPPED:
            raise _Leaving
        return outcome

    def _options(self, noted: About) -> JobOptions:
        config = self._context.config
        lanes, order = lanes_of(self._model())
        return JobOptions(
            concurrency=max(min(lanes, config.max_waiting // config.max_running_batches), 1),
            order=order,
            wait_for_space=True,
            expires_at=noted.expires_at,
        )

    # What is kept

    async def _persist(self, work: Callable[[], T]) -> T:
        """Change what is kept, in a thread; while there is no space, try again and again. Raises _Leaving."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                done = await asyncio.to_thread(work)
            except StorageFull as error:
                self.problem = str(error)
                log.error("%s: %s; the next try is in %g s", self.job.id, error, pause)
            else:
                self.problem = None
                return done
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause)
                raise _Leaving
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _fail(self, problem: str) -> None:
        """End it as failed, if that can't be kept then only for those who ask before the server ends."""
        try:
            await self._persist(lambda: self._close("failed", [Problem("batch_failed", problem)]))
        except JobError as error:
            log.error("that %s failed can't be kept: %s", self.job.id, error)
            self._fail_unkept(problem)

    def _fail_unkept(self, problem: str) -> None:
        noted = about(self.job)
        noted.problems, noted.counts = [Problem("batch_failed", problem)], Counts()
        job = msgspec.structs.replace(self.job, entered=dict(self.job.entered))
        note(job, noted)
        _move(job, "failed")
        self.job, self.kept = job, False

    def _enter(self, state: JobState) -> None:
        self.job = self._context.folder.store.enter(self.job.id, state, time.time())

    def _close(self, state: JobState, problems: list[Problem] | None = None) -> None:
        """End it, and in the same moment make files of its results. Where those are lost it has failed."""
        folder = self._context.folder
        at = folder.store.checkpoint(self.job.id)
        counts = at.counts
        output = folder.result(self.job, "output", at.output_bytes)
        errors = folder.result(self.job, "error", at.error_bytes)
        found = [*(problems or [])]
        if not folder.holds(output):
            state, counts = "failed", msgspec.structs.replace(counts, completed=0)
            found.append(Problem("results_lost", f"the output, {output.id}, was taken away or changed"))
        if not folder.holds(errors):
            state, counts = "failed", msgspec.structs.replace(counts, failed=0)
            found.append(Problem("results_lost", f"the file of errors, {errors.id}, was taken away or changed"))
        files = [file for file in (output, errors) if file.bytes and folder.holds(file)]

        def change(job: Job) -> None:
            noted = about(job)
            noted.problems = found
            noted.counts = counts
            noted.output_file_id = output.id if output in files else None
            noted.error_file_id = errors.id if errors in files else None
            note(job, noted)
            _move(job, state)

        self.job = folder.store.change_job(self.job.id, change, files)
        self.results = files


def too_late(job: Job) -> ApiError:
    """Why a batch can't be cancelled."""
    message = f"a batch that is {job.state} can't be cancelled"
    return ApiError(409, message, code="batch_not_cancellable")


def lanes_of(model: ModelService | None) -> tuple[int, Order]:
    """How many lines are sent to a model at once, if it is there, and in which order."""
    if model is None:
        return _FEW, "file"
    if isinstance(model, SequenceService):
        # Those that run, and as many to take their slots.
        return 2 * model.slots, "prefix"
    dispatcher = model.dispatcher
    # For each instance the batch that runs, one that is ready to follow, and two to be made ready.
    lanes = 4 * dispatcher.limits.max_batch_size * len(dispatcher.executors)
    return lanes, "file" if model.encoder is not None else "length"


def _move(job: Job, state: JobState) -> None:
    job.state = state
    job.entered.setdefault(state, time.time())

"""What has come of a job's lines: counted in memory, written to its two files, and committed together."""

import asyncio
from collections import deque
from pathlib import Path

import msgspec

from chairlift.errors import StorageFull
from chairlift.jobs.progress import Progress
from chairlift.jobs.result_file import ResultFile
from chairlift.jobs.result_lines import LineUsage
from chairlift.jobs.store import Checkpoint, Store


class _Pending(msgspec.Struct):
    """Results on their way to the disk."""

    output: list[bytes]
    errors: list[bytes]
    size: int
    checkpoint: Checkpoint


class Ledger:
    """One job's results. Opening it cuts off whatever was written but not committed; those lines are to be done again.

    Blocks while it opens. Otherwise all methods belong to one event loop. New files get `mode` less the umask. Raises
    JobError; StorageLost if one of the files, or the store, is taken away or replaced while it is open.
    """

    def __init__(self, store: Store, job_id: str, output: Path, errors: Path, mode: int = 0o666) -> None:
        at = self.checkpoint = store.checkpoint(job_id)
        self.counts = msgspec.structs.replace(at.counts)
        self.progress = Progress.from_bytes(at.progress)
        self.pending_bytes = 0
        self._store, self._job_id = store, job_id
        self._output = ResultFile(output, at.output_bytes, mode)
        self._errors = ResultFile(errors, at.error_bytes, mode)
        self._new_output: list[bytes] = []
        self._new_errors: list[bytes] = []
        self._places: deque[tuple[int, int]] = deque()
        self._changed = False
        self._committing = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        self._broken: BaseException | None = None

    def complete(self, number: int, record: bytes, usage: LineUsage) -> None:
        """A line has its answer."""
        self._finish(number, record)
        self._new_output.append(record)
        counts = self.counts
        counts.completed += 1
        counts.prompt_tokens += usage.prompt_tokens
        counts.completion_tokens += usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            counts.cached_tokens += usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens_details is not None:
            counts.reasoning_tokens += usage.completion_tokens_details.reasoning_tokens

    def fail(self, number: int, record: bytes) -> None:
        """A line has an error for good."""
        self._finish(number, record)
        self._new_errors.append(record)
        self.counts.failed += 1

    def skip(self, number: int) -> None:
        """A line wants no result."""
        self._finish(number, b"")

    def note_place(self, number: int, offset: int) -> None:
        """The input's first `number` lines end at byte `offset`."""
        self._places.append((number, offset))

    async def commit(self) -> None:
        """Put all results on the disk. Raises StorageFull, and then keeps them for the next time; or JobError.

        Where nothing is new it looks whether what was committed is still there.
        """
        async with self._committing:
            if self._writing is not None:
                await asyncio.wait([self._writing])
            if self._broken is not None:
                raise self._broken
            if not self._changed:
                await asyncio.to_thread(self.check)
                return
            pending = self._take()
            # It goes on to its end even if whoever waits for it is cancelled.
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, pending))
            self._writing.add_done_callback(lambda writing: self._check(writing, pending))
            await asyncio.shield(self._writing)

    def check(self) -> None:
        """Raise StorageLost if what was committed is not there any more. Blocks."""
        self._output.check()
        self._errors.check()
        self._store.check()

    def close(self) -> None:
        """Close the files; what was not committed is cut off."""
        self._output.close()
        self._errors.close()

    def _finish(self, number: int, record: bytes) -> None:
        self.progress.finish(number)
        self.pending_bytes += len(record)
        self._changed = True

    def _take(self) -> _Pending:
        at = self.checkpoint
        number, offset = at.number, at.offset
        while self._places and self._places[0][0] <= self.progress.watermark:
            number, offset = self._places.popleft()
        at = self.checkpoint = Checkpoint(
            progress=self.progress.to_bytes(),
            number=number,
            offset=offset,
            counts=msgspec.structs.replace(self.counts),
        )
        pending = _Pending(self._new_output, self._new_errors, self.pending_bytes, at)
        self._new_output, self._new_errors, self.pending_bytes = [], [], 0
        self._changed = False
        return pending

    def _check(self, writing: "asyncio.Future[None]", pending: _Pending) -> None:
        """Keep what found no space for the next commit; after any other failure there can be none."""
        error = writing.exception()
        if not isinstance(error, StorageFull):
            self._broken = error
            return
        self._new_output[:0] = pending.output
        self._new_errors[:0] = pending.errors
        self.pending_bytes += pending.size
        self._changed = True

    def _write(self, pending: _Pending) -> None:
        """In a thread: append to both files, and then commit their lengths with the lines that they hold."""
        files = (self._output, self._errors)
        checkpoint = pending.checkpoint
        try:
            checkpoint.output_bytes = self._output.append(pending.output)
            checkpoint.error_bytes = self._errors.append(pending.errors)
            self._store.commit(self._job_id, checkpoint)
        except StorageFull:
            for file in files:
                file.drop()
            raise
        for file in files:
            file.keep()

"""Runs a job: keeps so many of its lines under way, sends some again, and commits what came of them."""

import asyncio
import contextlib
import enum
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from chairlift.config.run import Order
from chairlift.errors import JobError, StorageFull
from chairlift.jobs.ledger import Ledger
from chairlift.jobs.line_order import arrange
from chairlift.jobs.lines import Line, LineError, Reader
from chairlift.jobs.replies import ENDS_WORKER, Client, Reply
from chairlift.jobs.result_lines import LineUsage, answered, unanswered, usage_of
from chairlift.jobs.retry import Attempts, LineVerdict
from chairlift.jobs.store import Counts

log = logging.getLogger(__name__)

# Reading stops while the oldest unfinished line lies so far behind.
MAX_AHEAD = 16_384
_LONGEST_PAUSE_S = 60.0
# Sending stops while so many times `commit_bytes` wait to be written.
_MOST_PENDING = 4


class JobOutcome(enum.Enum):
    """How a run of a job ended. All but COMPLETED, CANCELLED and EXPIRED leave lines to be done by another run."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STOPPED = "stopped"
    TOO_MANY_FAILURES = "too_many_failures"


class JobOptions(msgspec.Struct, kw_only=True):
    """How to run a job. Times in seconds; `expires_at` in Unix seconds.

    `concurrency` lines are under way at once. Lines are read, `window_lines` or `window_bytes` at a time, while those
    that are not done have fewer than `window_bytes`, and those under way never have more, unless it is one alone. An
    error of the server's ends a line after `max_attempts`; more than `max_failures` failed lines end the run. With
    `wait_for_space` a full disk is waited for, otherwise it ends the run. So does `stall_seconds` without a single
    answer while the model is full or not ready.
    """

    concurrency: int = 64
    order: Order = "file"
    window_lines: int = 1024
    window_bytes: int = 32 * 2**20
    max_attempts: int = 5
    max_failures: int | None = None
    wait_for_space: bool = False
    expires_at: float | None = None
    stall_seconds: float | None = None
    commit_seconds: float = 1.0
    commit_bytes: int = 4 * 2**20


_WRITTEN_OFF = {
    JobOutcome.CANCELLED: LineError("batch_cancelled", "the batch was cancelled before this line was done"),
    JobOutcome.EXPIRED: LineError("batch_expired", "the batch expired before this line was done"),
}


class JobExecutor:
    """One run of one job. All methods belong to one event loop.

    `open_reader` opens the input, from its start. `hopeless` says why the model will never answer, if that is so.
    `on_last` hears, once, when nothing follows what is under way before some of it has ended: every line has been sent,
    or one must run alone, or what is read may not grow. `on_answer` hears of each line that was answered well, and its
    tokens.
    """

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        open_reader: Callable[[], Reader],
        job_id: str,
        options: JobOptions,
        *,
        hopeless: Callable[[], str | None] = lambda: None,
        on_last: Callable[[], None] = lambda: None,
        on_answer: Callable[[Line, LineUsage], None] = lambda line, usage: None,
    ) -> None:
        self.total: int | None = None
        self.problem: str | None = None
        self._client, self._ledger, self._options = client, ledger, options
        self._open_reader = open_reader
        self._result_ids = f"batch_req_{job_id.removeprefix('batch_')}-"
        self._hopeless, self._on_last, self._on_answer = hopeless, on_last, on_answer
        self._queue: deque[Line] = deque()
        self._again: deque[Line] = deque()
        self._suspects: deque[Line] = deque()
        self._attempts: dict[int, Attempts] = {}
        self._in_flight = self._in_flight_bytes = 0
        self._alone = self._is_held_back = False
        self._unfinished = self._unfinished_bytes = 0
        self._number = 0
        self._exhausted = False
        self._last_said = False
        self._hungry = asyncio.Event()
        self._hungry.set()
        self._woken = asyncio.Event()
        self._commit_due = asyncio.Event()
        self._closing = asyncio.Event()
        self._leaving = asyncio.Event()
        self._written = asyncio.Event()
        self._grace = 0.0
        self._ended: asyncio.Future[JobOutcome] | None = None
        self._done_before = -1
        self._done_at = 0.0

    @property
    def counts(self) -> Counts:
        """What became of the lines so far, those of earlier runs included."""
        return self._ledger.counts

    def stop(self, grace: float = 0.0) -> None:
        """Send no more; what is under way gets `grace` seconds. The rest is left for another run."""
        self._leaving.set()
        self._end(JobOutcome.STOPPED, grace)
        self._wake_all()

    def cancel(self, grace: float = 0.0) -> None:
        """Send no more; what is under way gets `grace` seconds. The rest gets an error each."""
        self._end(JobOutcome.CANCELLED, grace)

    async def run(self) -> JobOutcome:
        """Run the job to its end, or until told otherwise; everything that is done is committed on return.

        Raises JobError if it can't go on: StorageFull, an unreadable input, or a model that will never answer.
        """
        loop = asyncio.get_running_loop()
        self._ended = self._ended or loop.create_future()
        committing = self._watch(self._commit_regularly())
        feeding = self._watch(self._feed())
        lanes = [self._watch(self._lane()) for _ in range(self._options.concurrency)]
        expiry = self._set_expiry(loop)
        try:
            outcome = await self._ended
            await self._settle(lanes)
            if (error := _WRITTEN_OFF.get(outcome)) is not None:
                feeding.cancel()
                if not await self._write_off(error, committing):
                    outcome = JobOutcome.STOPPED
        except BaseException:
            self._leaving.set()
            raise
        finally:
            if expiry is not None:
                expiry.cancel()
            self._closing.set()
            for task in (feeding, *lanes):
                task.cancel()
            await asyncio.gather(feeding, *lanes, return_exceptions=True)
            self._written.set()
            self._commit_due.set()
            await asyncio.gather(committing, return_exceptions=True)
            await self._commit_last()
        return outcome

    # Ending

    def _end(self, outcome: JobOutcome, grace: float = 0.0) -> None:
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        if not self._ended.done():
            self._grace = grace
            self._ended.set_result(outcome)

    def _watch(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a part of the job; if it fails, so does the whole."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._ended is not None
            if not self._ended.done():
                self._ended.set_exception(error)
            # Who waits for what this part did would wait for ever.
            self._wake_all()

    def _set_expiry(self, loop: asyncio.AbstractEventLoop) -> asyncio.TimerHandle | None:
        moment = self._options.expires_at
        return (
            None if moment is None else loop.call_later(max(moment - time.time(), 0.0), self._end, JobOutcome.EXPIRED)
        )

    async def _settle(self, lanes: "list[asyncio.Task[None]]") -> None:
        """Let what is under way end, for as long as it may."""
        self._closing.set()
        self._wake_all()
        await asyncio.wait(lanes, timeout=self._grace)
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)

    async def _write_off(self, error: LineError, committing: "asyncio.Task[None]") -> bool:
        """Give every line that is not done an error; False if told to leave before the end.

        Raises what ended `committing`, if that did.
        """
        reader = await self._open_at_checkpoint()
        try:
            while window := await self._read(reader):
                if self._leaving.is_set():
                    return False
                for line in self._unseen(window):
                    self._ledger.fail(line.number, unanswered(self._result_id(line), line, line.error or error))
                self._commit_due.set()
                while self._ledger.pending_bytes > self._options.commit_bytes:
                    if committing.done():
                        committing.result()
                    if self._leaving.is_set():
                        return False
                    await self._pause()
        finally:
            reader.close()
        self.total = self.counts.done
        return True

    async def _commit_last(self) -> None:
        assert self._ended is not None
        if self._ended.done() and isinstance(self._ended.exception(), StorageFull):
            return
        await self._commit()

    # Reading

    async def _open_at_checkpoint(self) -> Reader:
        at = self._ledger.checkpoint
        reader = await asyncio.to_thread(self._open_reader)
        await asyncio.to_thread(reader.skip_to, at.number, at.offset)
        return reader

    async def _read(self, reader: Reader) -> list[Line]:
        window = await asyncio.to_thread(reader.read, self._options.window_lines, self._options.window_bytes)
        if window:
            self._ledger.note_place(reader.number, reader.offset)
        return window

    def _unseen(self, window: list[Line]) -> list[Line]:
        """Those lines that want a result and have none."""
        unseen = []
        for line in window:
            if line.number in self._ledger.progress:
                continue
            if line.blank:
                self._ledger.skip(line.number)
            else:
                unseen.append(line)
        return unseen

    async def _feed(self) -> None:
        """Read the next window whenever there are few lines left to send."""
        reader = await self._open_at_checkpoint()
        try:
            while True:
                await self._hungry.wait()
                window = await self._read(reader)
                if not window:
                    break
                unseen = self._unseen(window)
                self._number = reader.number
                self._unfinished += len(unseen)
                self._unfinished_bytes += sum(map(_size_of, unseen))
                self._queue += arrange(unseen, self._options.order, _body_of)
                # Whoever asked meanwhile did not know of these.
                self._hungry.clear()
                self._wake_all()
                self._ask_for_more()
        finally:
            reader.close()
        self._exhausted = True
        self.total = self.counts.done + self._unfinished
        self._wake_all()
        self._note_last()
        self._end_if_done()

    def _note_last(self) -> None:
        if self._exhausted and not self._queue:
            self._say_last()

    def _say_last(self) -> None:
        if not self._last_said:
            self._last_said = True
            # By then whoever took the last line has sent it.
            asyncio.get_running_loop().call_soon(self._on_last)

    def _ask_for_more(self) -> bool:
        """Have more lines read if there are few; return whether as many as there are may be more."""
        behind = self._number - self._ledger.progress.watermark
        may_read = behind < MAX_AHEAD and self._unfinished_bytes < self._options.window_bytes
        if may_read and len(self._queue) <= self._options.concurrency:
            self._hungry.set()
        return may_read

    # Sending

    async def _lane(self) -> None:
        """Send one line after the other."""
        while not self._closing.is_set():
            line = self._take()
            if line is None:
                await self._pause()
            elif line.error is not None:
                self._fail(line, unanswered(self._result_id(line), line, line.error))
            elif not await self._send(line):
                # An error may come without a moment's wait, and a thousand of them would hold up the loop.
                await asyncio.sleep(0)

    def _take(self) -> Line | None:
        """The line to send next, if one may be sent now."""
        if self._alone or self._ledger.pending_bytes > _MOST_PENDING * self._options.commit_bytes:
            return None
        if self._suspects:
            # Neither it nor those before it get company any more.
            self._say_last()
            if self._in_flight:
                return None
            self._alone = True
            return self._suspects.popleft()
        lines = self._again or self._queue
        if not lines:
            if not self._ask_for_more():
                self._say_last()
            return None
        if self._in_flight and self._in_flight_bytes + _size_of(lines[0]) > self._options.window_bytes:
            self._is_held_back = True
            self._say_last()
            return None
        line = lines.popleft()
        self._note_last()
        self._ask_for_more()
        return line

    async def _send(self, line: Line) -> bool:
        """Send a line, and return whether it was answered well."""
        size = _size_of(line)
        self._in_flight += 1
        self._in_flight_bytes += size
        try:
            reply = await self._client.post(line.url, line.body)
        finally:
            self._in_flight -= 1
            self._in_flight_bytes -= size
            if self._alone or self._is_held_back or (self._suspects and not self._in_flight):
                self._alone = self._is_held_back = False
                self._wake_all()
        if reply.status >= 300:
            self._judge(line, reply)
            return False
        self._complete(line, reply)
        return True

    def _complete(self, line: Line, reply: Reply) -> None:
        usage = usage_of(reply.body)
        self._ledger.complete(line.number, answered(self._result_id(line), line, reply), usage)
        self._on_answer(line, usage)
        self._finish(line)

    def _judge(self, line: Line, reply: Reply) -> None:
        """Deal with an answer that is an error."""
        attempts = self._attempts.setdefault(line.number, Attempts())
        alone = reply.header(ENDS_WORKER) is not None
        verdict = attempts.judge(reply.status, _worker_lost(reply), self._options.max_attempts, alone)
        if verdict is LineVerdict.FAILED:
            self._fail(line, answered(self._result_id(line), line, reply))
            return
        if verdict is LineVerdict.WAIT:
            self._check_hope(reply)
        self.counts.retries += 1
        delay = attempts.delay(_retry_after(reply), random.random())
        again = self._suspects if attempts.suspect else self._again
        asyncio.get_running_loop().call_later(delay, self._send_again, again, line)

    def _send_again(self, queue: deque[Line], line: Line) -> None:
        queue.append(line)
        self._wake_all()

    def _check_hope(self, reply: Reply) -> None:
        """Raise JobError if waiting for the model is in vain."""
        if (reason := self._hopeless()) is not None:
            raise JobError(reason)
        stall, now = self._options.stall_seconds, asyncio.get_running_loop().time()
        if self.counts.done != self._done_before:
            self._done_before, self._done_at = self.counts.done, now
        if stall is not None and now - self._done_at > stall:
            raise JobError(f"nothing was answered for {stall:g} s: {reply.body.decode('utf-8', 'replace')}")

    def _fail(self, line: Line, record: bytes) -> None:
        self._ledger.fail(line.number, record)
        self._finish(line)
        most = self._options.max_failures
        if most is not None and self.counts.failed > most:
            self._end(JobOutcome.TOO_MANY_FAILURES)

    def _finish(self, line: Line) -> None:
        if self._attempts:
            self._attempts.pop(line.number, None)
        self._unfinished -= 1
        self._unfinished_bytes -= _size_of(line)
        if self._ledger.pending_bytes > self._options.commit_bytes:
            self._commit_due.set()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._exhausted and not self._unfinished:
            self._end(JobOutcome.COMPLETED)

    def _result_id(self, line: Line) -> str:
        """The same whenever the line is done, so that one done again after a crash can be told to be the same."""
        return f"{self._result_ids}{line.number}"

    def _wake_all(self) -> None:
        self._woken.set()
        self._woken.clear()

    async def _pause(self) -> None:
        """Until something may have changed for those who have nothing to send."""
        await self._woken.wait()

    # Committing

    async def _commit_regularly(self) -> None:
        while not self._written.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._commit_due.wait(), self._options.commit_seconds)
            self._commit_due.clear()
            await self._commit()
            self._wake_all()

    async def _commit(self) -> None:
        """Commit; where that is what to do about a full disk, try again and again."""
        pause = 1.0
        while True:
            try:
                await self._ledger.commit()
            except StorageFull as error:
                if not self._options.wait_for_space or self._leaving.is_set():
                    raise
                self.problem = str(error)
                log.error("%s; the next try is in %g s", error, pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            else:
                self.problem = None
                return


def _body_of(line: Line) -> bytes:
    return line.body


def _size_of(line: Line) -> int:
    """About how many bytes it takes."""
    return len(line.custom_id) + len(line.url) + len(line.body)


def _worker_lost(reply: Reply) -> bool:
    return reply.status == 503 and b'"code":"worker_lost"' in reply.body


def _retry_after(reply: Reply) -> float:
    """Seconds that the server asks for; our own always come as a number."""
    value = reply.header(b"retry-after")
    return float(value) if value is not None else 0.0

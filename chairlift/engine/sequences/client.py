"""The front's side of a model: admits requests, carries them to its worker, and tokens back."""

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping

import msgspec
import zmq

from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import FinishReason, Shed, ShedReason
from chairlift.core.queue import QueueLimit
from chairlift.core.sequences.overload import Foreseen
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.standing import Standing
from chairlift.engine.machine import Machine, Member, soon_asleep
from chairlift.engine.sequences.inquiry import Inquiry
from chairlift.engine.sequences.messages import (
    Abort,
    Add,
    CloseQueue,
    EngineStats,
    Explained,
    Ready,
    Retune,
    SequencesToFront,
    SequencesToWorker,
    SequenceUpdate,
    StepOutput,
    TurnAsked,
    TurnGiven,
    TurnOver,
    TurnWanted,
)
from chairlift.engine.supervisor import Supervised, Supervisor
from chairlift.engine.worker_messages import LoadFailed, Shutdown
from chairlift.errors import DeadlineExceeded, InvalidRequest, QueueFull, RequestFailed, Unavailable, WorkerLost
from chairlift.runners.sequences import SequenceInfo


class Beginning(msgspec.Struct):
    """When a request first ran and when its first token was there, in seconds of CLOCK_MONOTONIC.

    `waits` has the seconds for which it waited till then, by what the head of its queue waited for. `steps` and `rows`
    are what the model had computed before: steps, and the sum of the requests in them.
    """

    scheduled: float
    first_token: float
    num_cached_tokens: int
    waits: dict[str, float]
    steps: int
    rows: int


# Deals with an update of a stream at once, or says that it can't.
AtOnce = Callable[[SequenceUpdate], bool]


class Stream:
    """One request on its way; `updates` have yet to be read. `error` says why it can't end well, if it can't.

    It has `ended` at a moment of CLOCK_MONOTONIC, 0 before. Once it has, after its `beginning`, `steps` are those from
    its first token to its last, and `rows` the sum of the requests in them. `running_since` is when it took its slot,
    0 while it has none. After its first token it lost one when there were `halted` steps, and has `missed` so many
    before it had another. It is the worker's request of this `number`; those of a `party` came together.
    """

    def __init__(self, request: Request, cancel: Callable[["Stream"], None], number: int = 0, party: int = 0) -> None:
        self.request = request
        self.number, self.party = number, party
        self.started = False
        self.done = False
        self.error: Exception | None = None
        self.on_change: Callable[[], None] = _nothing
        self.on_update: Callable[[SequenceUpdate], None] = _ignored
        # Is there while whoever reads has read all that came, and can deal with more at once.
        self.at_once: AtOnce | None = None
        self.updates: list[SequenceUpdate] = []
        self.beginning: Beginning | None = None
        self.preemptions = self.steps = self.rows = self.halted = self.missed = 0
        self.ended = self.running_since = 0.0
        # What others had waited for before it came, by reason.
        self.waited_before: Mapping[str, float] = {}
        self._cancel = cancel

    def cancel(self) -> None:
        """Give up the request; its slot and blocks are free within one step. Calling it again does nothing."""
        if not self.done:
            self._cancel(self)

    def give_up(self, error: Exception) -> None:
        """Cancel the request, if it has not ended; whoever reads it gets the error."""
        if not self.done:
            self._cancel(self)
            self.close(error)

    def push(self, update: SequenceUpdate) -> None:
        """Hand over an update from the worker."""
        self.started = True
        reason, at_once = update.finish_reason, self.at_once
        if reason is None and at_once is not None:
            try:
                if at_once(update):
                    return
            except Exception as error:
                self.error = error
                self.on_change()
                return
        elif reason is not None:
            if reason in (FinishReason.INVALID, FinishReason.ERROR):
                problem = str(update.detail)
                self.close(InvalidRequest(problem) if reason is FinishReason.INVALID else RequestFailed(problem))
                return
            self.done = True
        self.updates.append(update)
        self.on_update(update)
        self.on_change()

    def close(self, error: Exception | None = None) -> None:
        """End the stream after what it already holds, with an error if one is given."""
        self.done, self.error = True, error
        self.on_change()


def _nothing() -> None:
    """Nobody reads the stream yet."""


def _ignored(update: SequenceUpdate) -> None:
    """Nobody counts what is unread."""


class SequenceClient(Supervised):
    """One model served by one worker process. All methods belong to the event loop that called `start`."""

    def __init__(
        self,
        config: SequenceConfig,
        max_waiting: int = 1024,
        machine: Machine | None = None,
        weight: float = 1.0,
        load_attempts: int = 1,
    ) -> None:
        """Serve a model, alone or, with a `machine`, taking turns with others in proportion to the weights."""
        self.config = self.configured = config
        self.info: SequenceInfo | None = None
        self.stats = EngineStats()
        self.on_step: Callable[[EngineStats], None] | None = None
        # By whether they are background requests, so that neither take the others' places in the queue.
        self._limits = {False: QueueLimit(max_waiting), True: QueueLimit(max_waiting)}
        self.shedder = config.make_shedder()
        # Without a target only from the first deadline on: most servers never see one.
        self._sheds = config.target_ttft_ms is not None
        self._machine, self._weight = machine, weight
        self._member: Member | None = None
        self._streams: dict[str, Stream] = {}
        self._num_waiting = {False: 0, True: 0}
        # What was sent to this worker, and who of it was given up, but still is among those that it has to take in.
        self._num_sent = 0
        self._given_up: deque[Stream] = deque()
        self._inquiry = Inquiry(self._send)
        # The seconds for which live requests waited, by reason, up to the last step; and what all steps held together.
        self._waits: dict[str, float] = {}
        self._waits_until = 0.0
        self._rows = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SequencesToFront)
        self._worker = Supervisor(
            "chairlift.engine.sequences.worker",
            msgspec.json.encode(config).decode(),
            *(("turns",) if machine else ()),
            environment=soon_asleep() if machine else None,
            take=self._take,
            lost=self._lost,
            load_attempts=load_attempts,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            most_silence_s=config.step_timeout_s,
        )

    @property
    def num_unfinished(self) -> int:
        """Requests sent and not yet answered in full."""
        return len(self._streams)

    async def wait_ready(self) -> None:
        """Return once requests are taken in. Raises Unavailable if the model can't be loaded."""
        await self._worker.wait_ready()

    def submit(self, *requests: Request, group: Hashable = None, timeout: float | None = None) -> list[Stream]:
        """Queue requests, all or none. Raises QueueFull, or Unavailable while the worker can't take them.

        Answers of one `group` are expected to be of like length. Live requests that would not be done within `timeout`
        seconds, or not begin within the target, count as one too many.
        """
        if self.state != "ready" or not self._worker.connected:
            raise Unavailable(f"the model is {self.state}" + (f": {self.failure}" if self.failure else ""))
        for background in (False, True):
            self._admit(background, sum(request.background is background for request in requests))
        live = [request for request in requests if not request.background]
        if timeout is not None and not self._sheds:
            self._begin_shedding()
        if self._sheds and live:
            self._admit_in_time(live, group, timeout)
        self._note_waits(time.monotonic())
        streams, party = [], self._num_sent
        for request in requests:
            self._num_sent += 1
            stream = self._streams[request.id] = Stream(request, self._abort, self._num_sent, party)
            stream.waited_before = self._waits.copy()
            self._num_waiting[request.background] += 1
            self._send(Add(request))
            streams.append(stream)
        self._idle.clear()
        return streams

    def _admit(self, background: bool, count: int) -> None:
        """Raise QueueFull if so many more of their kind may not wait."""
        limit, waiting = self._limits[background], self._num_waiting[background]
        retry_after = limit.retry_after(waiting, count, time.monotonic()) if count else None
        if retry_after is not None:
            kind = "background requests" if background else "requests"
            self.shedder.num_shed[ShedReason.QUEUE_FULL] += 0 if background else count
            raise QueueFull(
                f"{waiting} {kind} wait already and {count} more would pass the limit of "
                f"{limit.max_waiting}; come back in {retry_after:.0f} s",
                retry_after,
            )

    def check_load(self, priority: int) -> None:
        """Raise QueueFull if a live request of this priority would be too late, however short it is."""
        if self.config.target_ttft_ms is None:
            return
        try:
            self.shedder.check(priority, time.monotonic())
        except Shed as shed:
            raise _refusal(shed) from None

    def _begin_shedding(self) -> None:
        """Tell the shedder of all who are here."""
        self._sheds = True
        stats, now = self.stats, time.monotonic()
        for stream in self._streams.values():
            if not stream.request.background:
                self.shedder.arrive([stream.request], now)
                if (began := stream.beginning) is not None:
                    missed = stream.missed + (0 if stream.running_since else stats.steps - stream.halted)
                    self.shedder.started(stream.request.id, began.steps + 1 + missed, began.num_cached_tokens, now)
        self.shedder.stepped(stats.steps, stats.waiting, stats.coefficients, now)
        running = [name for name, stream in self._streams.items() if stream.running_since]
        self.shedder.moved(running, self._streams.keys() - running)

    def _admit_in_time(self, requests: list[Request], group: Hashable, timeout: float | None) -> None:
        """Raise QueueFull if live requests would be too late."""
        now = time.monotonic()
        try:
            self.shedder.arrive(requests, now, group, None if timeout is None else now + timeout)
        except Shed as shed:
            raise _refusal(shed) from None

    async def explain(self, request_ids: Collection[str]) -> Mapping[str, Standing]:
        """Ask the worker where requests are, and why. Those are missing of which it does not say so in time."""
        if not self._worker.connected or self.state == "restarting":
            return {}  # a worker that is being ended answers no more, and the next one knows of nobody yet
        return await self._inquiry.ask(request_ids)

    def foresee(self, request_ids: Collection[str]) -> dict[str, Foreseen]:
        """Say when live requests are expected to begin and end, as far as anything is known."""
        if not self._sheds:
            self._begin_shedding()
        return self.shedder.foresee(request_ids, time.monotonic())

    def retune(self, config: SequenceConfig) -> None:
        """Go by the settings of another configuration, as far as they may change while the model runs."""
        self.config = config
        if self.info is not None:
            self.shedder.limits = config.step_limits(self.info.num_blocks, self.info.block_size)
        if self._worker.connected:
            self._send(Retune(config.live_settings))

    def close_queue(self) -> None:
        """Nobody else will come, so a static batch may leave with empty slots; in a worker after this one, too."""
        self._is_closed = True
        self._send(CloseQueue())

    async def drain(self, timeout: float) -> None:
        """Take no more requests; give those that are here up to `timeout` seconds to end."""
        self._worker.drain()
        if self._streams:
            self.close_queue()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    async def stop(self) -> None:
        """End the worker; whatever still runs gets Unavailable."""
        await self._worker.stop(self._encoder.encode(Shutdown()))

    # The worker

    def _take(self, frames: list[zmq.Frame]) -> None:
        message = self._decoder.decode(frames[0].buffer)
        match message:
            case StepOutput():
                self._take_step(message)
            case Explained(standings=found):
                self._inquiry.answered(found)
            case Ready(info=info):
                self.info = info
                if self.config is not self.configured:
                    self._send(Retune(self.config.live_settings))  # a new worker begins with what was configured
                if self._is_closed:
                    self._send(CloseQueue())
                self.shedder.limits = self.config.step_limits(info.num_blocks, info.block_size)
                self._take_stats(EngineStats(kv_blocks_total=info.num_blocks))
                self._take_part()
                self._worker.loaded()
            case LoadFailed():
                self._worker.refused(message)
            case TurnWanted(background=background) if self._member is not None:
                self._member.ask(background)
            case TurnOver(again=again, seconds=seconds, background=background) if self._member is not None:
                self._member.release(again, seconds, background)

    def _take_part(self) -> None:
        """Take turns with other models from now on."""
        if self._machine is not None:
            given = functools.partial(self._send, TurnGiven())
            self._member = self._machine.join(self.config.model, self._weight, given, self._turn_asked)

    def _turn_asked(self, live: bool) -> None:
        self._send(TurnAsked(live))

    def _lost(self, reason: str) -> None:
        """The worker is gone, or on its way; what it still says about turns counts no more."""
        if self._member is not None:
            self._member.leave()
            self._member = None
        self._take_stats(EngineStats())
        self._inquiry.lost()
        self._fail_all(reason)

    def _take_step(self, output: StepOutput) -> None:
        now = time.monotonic()
        self._note_waits(now)
        self._rows += output.stats.step_requests
        if output.stats.step_requests:
            self._worker.worked()
        self._take_stats(output.stats)
        before = output.stats.steps - 1
        for request_id in output.preempted:
            if (preempted := self._streams.get(request_id)) is not None:
                preempted.preemptions += 1
                preempted.running_since, preempted.halted = 0.0, before
        for request_id in output.started:
            if (started := self._streams.get(request_id)) is not None:
                if started.beginning is not None and not started.running_since:
                    started.missed += before - started.halted
                started.running_since = output.stats.step_ended - output.stats.step_seconds
        if self._sheds:
            self.shedder.moved(output.started, output.preempted)
        for update in output.updates:
            stream = self._streams.get(update.id)
            if stream is None:
                continue  # cancelled while the step ran
            if not stream.started:
                self._num_waiting[stream.request.background] -= 1
                self._begin(stream, update, now)
                if self._sheds:
                    self.shedder.started(update.id, output.stats.steps, update.num_cached_tokens, now)
            stream.push(update)
            if update.finish_reason is not None:
                self._forget(stream, update.finish_reason)
        if self._sheds:
            self._shed_hopeless(now)

    def _note_waits(self, now: float) -> None:
        """Count the time since the last step for what those who wait were waiting for."""
        reason = self.stats.waiting_reason
        if reason is not None:
            self._waits[reason] = self._waits.get(reason, 0.0) + now - self._waits_until
        self._waits_until = now

    def _begin(self, stream: Stream, update: SequenceUpdate, now: float) -> None:
        """Keep how a request began, unless it failed at once."""
        if update.finish_reason not in (FinishReason.ERROR, FinishReason.INVALID):
            before, stats = stream.waited_before, self.stats
            waits = {reason: seconds - before.get(reason, 0.0) for reason, seconds in self._waits.items()}
            steps, rows = stats.steps - 1, self._rows - stats.step_requests
            stream.beginning = Beginning(update.first_scheduled, now, update.num_cached_tokens, waits, steps, rows)

    def _take_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        while self._given_up and self._given_up[0].number <= stats.added:
            self._num_waiting[self._given_up.popleft().request.background] -= 1
        if self.on_step is not None:
            self.on_step(stats)

    def _shed_hopeless(self, now: float) -> None:
        """Tell those who wait in vain by now."""
        stats = self.stats
        for request_id, shed in self.shedder.stepped(stats.steps, stats.waiting, stats.coefficients, now):
            error = DeadlineExceeded(str(shed)) if shed.reason is ShedReason.DEADLINE else _refusal(shed)
            self._streams[request_id].give_up(error)

    def _send(self, message: SequencesToWorker) -> None:
        self._worker.send([self._encoder.encode(message)])

    # Streams

    def _abort(self, stream: Stream) -> None:
        if self._streams.get(stream.request.id) is stream:
            if stream.number > self.stats.added:
                # The worker has yet to take it in: until then it waits, whether anybody wants it or not.
                self._given_up.append(stream)
            elif not stream.started:
                self._num_waiting[stream.request.background] -= 1
            self._forget(stream)
            self._send(Abort([stream.request.id]))
        stream.close()

    def _forget(self, stream: Stream, reason: FinishReason = FinishReason.ABORT) -> None:
        del self._streams[stream.request.id]
        if stream.beginning is not None:
            stream.steps = self.stats.steps - stream.beginning.steps
            stream.rows = self._rows - stream.beginning.rows
        if self._sheds:
            self._learn_end(stream.request, reason)
        stream.ended = time.monotonic()
        self._limits[stream.request.background].ended(stream.ended)
        if not self._streams:
            self._idle.set()

    def _learn_end(self, request: Request, reason: FinishReason) -> None:
        cut_off = {FinishReason.LENGTH: request.max_tokens, FinishReason.ERROR: 0}.get(reason)
        self.shedder.ended(request.id, cut_off)

    def _fail_all(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        self._num_waiting = {False: 0, True: 0}
        self._num_sent = 0
        self._given_up.clear()
        self.shedder.lost()
        # Where the server ends the worker itself, no request may be to blame.
        died, alone = self.state == "restarting", len({stream.party for stream in streams.values()}) == 1
        for stream in streams.values():
            stream.close(WorkerLost(reason, alone) if died else Unavailable(reason))
        self._idle.set()


def _refusal(shed: Shed) -> QueueFull:
    return QueueFull(
        f"the model is overloaded: {shed}; come back in {max(shed.retry_after, 1.0):.0f} s", shed.retry_after
    )

"""Between those who ask for one result each and the executors that compute batches: payloads, futures and a clock.

What to run and when is `core/items/scheduler.py`'s to decide. It is asked once a turn of the event loop when something
may have changed: a submit while an executor is free, the end of a call, or the moment that it named. Nothing polls.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import msgspec

from chairlift.core.decision import Decision
from chairlift.core.finished import Finished, FinishReason, Shed, ShedReason
from chairlift.core.items.item import Batch, BatchResult, Failure, Item
from chairlift.core.items.learned import HighQuantile
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.scheduler import ItemScheduler
from chairlift.engine.items.call import BatchExecutor, CallFailed, Unwanted, checked, error_of, raisable
from chairlift.engine.machine import MachineTurns
from chairlift.errors import ChairliftError, DeadlineExceeded, InvalidRequest, QueueFull, RequestFailed, Unavailable
from chairlift.runners.error_text import describe

log = logging.getLogger(__name__)

# Of the time that there is for an item, delivery is expected to take no more than this share.
_MOST_DELIVERY = 0.25

OnPart = Callable[[Any], None]


class Answer(msgspec.Struct):
    """A result, the seconds that it waited and ran, how many shared its batch; when it ended, its id, when it came."""

    value: Any
    queue_s: float
    run_s: float
    batch_size: int
    ended: float = 0.0
    id: str = ""
    arrival: float = 0.0


class Ticket(asyncio.Future[Answer]):
    """What `submit` returns. Cancelling it, or a task that awaits it, takes the item out of the queue at once."""

    def __init__(self, dispatcher: "Dispatcher", item: Item, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.item_id = item.id
        self.arrival = item.arrival
        self.size = item.size
        self._dispatcher = dispatcher

    def cancel(self, msg: Any | None = None) -> bool:
        """Give up the result. False if it is there already."""
        cancelled = super().cancel(msg)
        if cancelled:
            self._dispatcher.forget(self.item_id)
        return cancelled


class _Entry:
    """What the dispatcher keeps of an item until it ends."""

    __slots__ = ("item", "on_part", "owner", "payload", "ticket")

    def __init__(self, item: Item, payload: Any, ticket: Ticket, on_part: OnPart | None, owner: Hashable) -> None:
        self.item = item
        self.owner = owner
        self.payload = payload
        self.ticket = ticket
        self.on_part = on_part


class Dispatcher:
    """One model's queue, and the executors that serve it. All calls come from one event loop's thread.

    A result that is an exception is raised to its caller as it is. A call that failed as a whole gives RequestFailed,
    or with `raise_originals` the exception that it raised, where there is one. `on_batch` hears of every call's end.
    `standby` is one more executor, by the number that follows, which is lost until `instance_back`. `on_search` hears
    when it begins to be found out which item ends or hangs executors, and when that is over.
    """

    def __init__(
        self,
        limits: BatchLimits,
        executors: Sequence[BatchExecutor],
        clock: Callable[[], float] = time.monotonic,
        *,
        raise_originals: bool = False,
        turns: MachineTurns | None = None,
        on_batch: Callable[[Batch, BatchResult], None] | None = None,
        standby: BatchExecutor | None = None,
        on_search: Callable[[bool], None] | None = None,
    ) -> None:
        self.limits = limits
        self.executors = list(executors)
        self._all = [*executors, *(() if standby is None else (standby,))]
        self._lost: set[int] = set(range(len(executors), len(self._all)))
        self.scheduler = self._scheduler()
        self.on_batch = on_batch
        self._on_search, self._searching = on_search, False
        self._turns = turns
        if turns is not None:
            turns.call(self._pump)
        self._clock, self._raise_originals = clock, raise_originals
        self._refusal: str | None = None
        self._is_closed = False
        self.id_prefix = ""
        self._entries: dict[str, _Entry] = {}
        # Those of each owner, of which there is none unless somebody says so.
        self._owned: dict[Hashable, dict[str, _Entry]] = {}
        self._calls: dict[asyncio.Task[None], Batch] = {}
        # Of executors, by number, the calls of which parts have come.
        self._streams: dict[int, Batch] = {}
        self._serial = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._moment = inf
        self._idle: asyncio.Future[None] | None = None
        self._delivery = HighQuantile()

    def configure(self, limits: BatchLimits) -> None:
        """Set other limits, before the first item. Raises RuntimeError after it."""
        if self._serial:
            raise RuntimeError("the limits of a queue with items can't be changed")
        self.limits = limits
        self.scheduler = self._scheduler()

    def change_limits(self, limits: BatchLimits) -> None:
        """As the scheduler's, from now on."""
        self.scheduler.change_limits(limits)
        self.limits = limits
        if self._loop is not None:
            self._ask_soon(self._loop)

    @property
    def sends_ahead(self) -> bool:
        """Whether an instance is sent its next batch while it runs."""
        return all(getattr(executor, "queues", False) for executor in self._all)

    def _scheduler(self) -> ItemScheduler:
        scheduler = ItemScheduler(self.limits, len(self._all), self.sends_ahead)
        for number in self._lost:
            scheduler.instance_lost(number)
        return scheduler

    def submit(
        self,
        payload: Any,
        *,
        size: float = 1.0,
        shape_key: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        background: bool = False,
        on_part: OnPart | None = None,
        owner: Hashable = None,
        request: str | None = None,
    ) -> asyncio.Future[Answer]:
        """Queue one payload; `size`, `shape_key`, `background` and `request` as in `Item`, `timeout` is from now on.

        Its id begins with `id_prefix`, and it is among the `items_of` its `owner`. `on_part` hears of the parts of a
        streaming model's result, which then need not be in the answer. Raises QueueFull, InvalidRequest or Unavailable.
        So may the future raise QueueFull (shed by prediction), DeadlineExceeded, RequestFailed and Unavailable.
        """
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        now = self._clock()
        self._serial += 1
        item = Item(
            id=f"{self.id_prefix}{self._serial}",
            arrival=now,
            size=size,
            shape_key=shape_key,
            priority=priority,
            deadline=self._deadline(timeout, background, now),
            background=background,
            request=request,
        )
        try:
            self.scheduler.add(item)
        except Shed as shed:
            raise QueueFull(str(shed), shed.retry_after) from None
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        ticket = Ticket(self, item, loop)
        entry = self._entries[item.id] = _Entry(item, payload, ticket, on_part, owner)
        if owner is not None:
            self._owned.setdefault(owner, {})[item.id] = entry
        # While all are busy, only a deadline before the moment that was to come next makes a difference.
        if self.scheduler.has_free or (item.deadline is not None and item.deadline < self._moment):
            self._ask_soon(loop)
        return ticket

    def _deadline(self, timeout: float | None, background: bool, now: float) -> float | None:
        """The moment at which a result must be there, so that it can be delivered within the timeout.

        Only live items get the default one: nobody waits for the others.
        """
        if timeout is None and not background:
            timeout = self.limits.default_timeout
        return None if timeout is None else now + timeout - min(self._delivery.value, _MOST_DELIVERY * timeout)

    def delivered(self, answer: Answer) -> None:
        """Hear that an answer has reached its caller: later deadlines come as much earlier as that usually takes."""
        self._delivery.observe(self._clock() - answer.ended)

    def forget(self, item_id: str) -> None:
        """Take an item out of wherever it is; nothing more comes of it. Nothing happens if it is not here."""
        entry = self._entries.pop(item_id, None)
        if entry is not None:
            if entry.owner is not None:
                self._disown(entry)
            self.scheduler.abort(item_id)
            self._note_search()
            self._note_idle()

    def instance_lost(self, number: int) -> None:
        """Give the executor of this number no more work until `instance_back`."""
        self._lost.add(number)
        self.scheduler.instance_lost(number)

    def instance_back(self, number: int) -> None:
        """Give the executor of this number work again."""
        self._lost.discard(number)
        self.scheduler.instance_back(number)
        if self._loop is not None:
            self._ask_soon(self._loop)

    def explain(self, future: asyncio.Future[Answer]) -> Decision | None:
        """Say where the item of a future that `submit` returned is, and why; None if it is not here any more."""
        return self.scheduler.explain(future.item_id) if isinstance(future, Ticket) else None

    def items_of(self, owner: Hashable) -> Iterator[Item]:
        """Return the items that wait or run of an owner, or of all where that is None, oldest first."""
        entries = self._entries if owner is None else self._owned.get(owner, {})
        return (entry.item for entry in entries.values())

    def find_item(self, owner: Hashable, item_id: str) -> Item | None:
        """Return the item of an id, if it is here and belongs to the owner, or where that is None to anybody."""
        entry = self._entries.get(item_id)
        return entry.item if entry is not None and owner in (None, entry.owner) else None

    def _disown(self, entry: _Entry) -> None:
        mine = self._owned[entry.owner]
        del mine[entry.item.id]
        if not mine:
            del self._owned[entry.owner]

    @property
    def num_unfinished(self) -> int:
        """Items that wait or run, and that somebody still wants."""
        return len(self._entries)

    @property
    def restarts(self) -> int:
        """How many workers have died and been replaced, where executors have workers."""
        return sum(getattr(executor, "restarts", 0) for executor in self._all)

    def close_queue(self) -> None:
        """Nobody else will come, so batches leave as they are."""
        self.scheduler.close()
        if self._loop is not None:
            self._ask_soon(self._loop)

    async def drain(self, timeout: float) -> None:
        """Take no more items; give those that are here up to `timeout` seconds to end."""
        self._refusal = "the model is draining"
        self.close_queue()
        if not self._entries:
            return
        loop = asyncio.get_running_loop()
        if self._idle is None:
            self._idle = loop.create_future()
        await asyncio.wait([self._idle], timeout=timeout)

    async def close(self) -> None:
        """Take no more items; whoever is still here gets Unavailable. Calls that run are waited for no longer."""
        self._refusal = "the model is shut down"
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for item_id in list(self._entries):
            self._fail(item_id, Unavailable(self._refusal))
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if self._turns is not None:
            self._turns.leave()

    # Asking the scheduler

    def _ask_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask once whatever else is ready in this turn of the loop has been submitted."""
        if not self._is_pump_due:
            self._is_pump_due = True
            loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send off whatever the scheduler says, and sleep until it may say otherwise."""
        self._is_pump_due = False
        self._note_search()
        turns, scheduler = self._turns, self.scheduler
        waiting = scheduler.num_waiting, scheduler.num_background_waiting
        if turns is not None and not turns.allow(self._num_holding, *waiting):
            return
        try:
            while (batch := self.scheduler.schedule(self._clock())) is not None:
                self._start(batch)
            dropped = self.scheduler.take_dropped()
            if dropped:
                now = self._clock()
                for end in dropped:
                    self._fail(end.id, self._shed_error(end, now))
            self._set_timer()
        except Exception as error:
            self._recover(error)
        if turns is not None:
            turns.rest(self._num_holding)

    @property
    def _num_holding(self) -> int:
        """Calls for which the model holds its turn: a stream, which may have no end, and who waits for it do not."""
        return sum(batch.instance not in self._streams for batch in self._calls.values())

    def _set_timer(self) -> None:
        moment = self.scheduler.ask_again
        # A timer that fires too early only asks in vain, and costs less than setting another at every turn.
        if moment is None or moment >= self._moment or self._loop is None or self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._moment = moment
        self._timer = self._loop.call_later(max(moment - self._clock(), 0.0), self._wake)

    def _wake(self) -> None:
        self._timer, self._moment = None, inf
        self._pump()

    # Calls

    def _start(self, batch: Batch) -> None:
        entries = self._entries
        members = [entries[item.id] for item in batch.items]
        payloads = [entry.payload for entry in members]
        executor = self._all[batch.instance]
        if any(entry.on_part is not None for entry in members):
            run = executor.run(payloads, partial(self._hand_out, batch))
        else:
            run = executor.run(payloads)
        assert self._loop is not None
        call = self._loop.create_task(self._call(batch, run), name="batch")
        self._calls[call] = batch

    def _hand_out(self, batch: Batch, parts: dict[int, Any]) -> dict[int, Any]:
        """Give parts to those who hear of them, and return those of the others, who want them in their results.

        What is for an item that is not here any more goes nowhere. Raises Unwanted if that is so for all of the batch.
        """
        entries, kept = self._entries, {}
        for place, part in parts.items():
            entry = entries.get(batch.items[place].id)
            if entry is not None and entry.on_part is not None:
                entry.on_part(part)
            elif entry is not None:
                kept[place] = part
        if not any(item.id in entries for item in batch.items):
            raise Unwanted
        if self._streams.get(batch.instance) is not batch:
            self._streams[batch.instance] = batch
            self._ask_soon(asyncio.get_running_loop())
        return kept

    async def _call(self, batch: Batch, run: Any) -> None:
        """Await one call and hand out what came of it."""
        call = asyncio.current_task()
        cause: BaseException | None = None
        results: Sequence[Any] = []
        try:
            result = await run
            results = checked(result.results, len(batch.items))
            errors = {
                item.id: describe(value)
                for item, value in zip(batch.items, results, strict=True)
                if isinstance(value, BaseException)
            }
            outcome = BatchResult(seconds=result.seconds, errors=errors, idle=result.idle, gap=result.gap)
        except CallFailed as failed:
            cause = failed.__cause__
            outcome = BatchResult(seconds=0.0, failure=failed.failure, detail=failed.detail)
        except Exception as error:
            cause = error
            outcome = BatchResult(seconds=0.0, failure=Failure.RAISED, detail=describe(error))
        except asyncio.CancelledError:
            self._abandon(batch)
            raise
        finally:
            assert call is not None
            self._calls.pop(call, None)
            if self._streams.get(batch.instance) is batch:
                del self._streams[batch.instance]
        try:
            self._finish(batch, outcome, results, cause)
        except Exception as error:
            self._recover(error)
        self._pump()

    def _finish(self, batch: Batch, outcome: BatchResult, results: Sequence[Any], cause: BaseException | None) -> None:
        scheduler = self.scheduler
        if not scheduler.has(batch):
            # It was begun before a recovery: its items have been answered, and its executor is free only now.
            if batch.instance not in self._lost and batch.instance not in self._busy():
                scheduler.instance_back(batch.instance)
            return
        now = self._clock()
        finished = scheduler.update(batch, outcome, now)
        if self.on_batch is not None:
            self.on_batch(batch, outcome)
        if not finished:
            return
        places = {item.id: place for place, item in enumerate(batch.items)}
        seconds, count, started = outcome.seconds, len(batch.items), batch.started
        for end in finished:
            if end.reason is FinishReason.DONE:
                entry = self._entries.pop(end.id)
                if entry.owner is not None:
                    self._disown(entry)
                value = results[places[end.id]]
                came = entry.item.arrival
                entry.ticket.set_result(Answer(value, started - came, seconds, count, now, end.id, came))
            elif outcome.failure is None:
                self._fail(end.id, results[places[end.id]])
            elif self._raise_originals and cause is not None:
                self._fail(end.id, cause)
            else:
                self._fail(end.id, error_of(end))
        self._note_idle()

    def _abandon(self, batch: Batch) -> None:
        """Answer those in a call that somebody cancelled, unless `close` has done so; its instance is free."""
        for item in batch.items:
            if item.id in self._entries:
                self.scheduler.abort(item.id)
                self._fail(item.id, Unavailable("the call was cancelled; send it again"))
        if self.scheduler.has(batch):
            self.scheduler.update(batch, BatchResult(seconds=0.0, failure=Failure.DIED), self._clock())
        if not self._is_closed and self._loop is not None:
            self._ask_soon(self._loop)

    def _fail(self, item_id: str, error: BaseException) -> None:
        entry = self._entries.pop(item_id)
        if entry.owner is not None:
            self._disown(entry)
        if not entry.ticket.done():
            entry.ticket.set_exception(raisable(error))
            # Whoever let go of it without cancelling does not want to read of it in the log.
            entry.ticket.exception()
        self._note_idle()

    def _shed_error(self, end: Finished, now: float) -> ChairliftError:
        deadline = self._entries[end.id].item.deadline
        if end.shed is ShedReason.DEADLINE and deadline is not None and deadline <= now:
            return DeadlineExceeded(end.detail)
        return QueueFull(end.detail, max(self.scheduler.queue_seconds(), 0.001))

    def _note_search(self) -> None:
        searching = self.scheduler.searching
        if searching is not self._searching:
            self._searching = searching
            if self._on_search is not None:
                self._on_search(searching)

    def _note_idle(self) -> None:
        if self._idle is not None and not self._entries and not self._idle.done():
            self._idle.set_result(None)

    def _recover(self, error: Exception) -> None:
        """Begin anew after an error of our own: everybody who is here gets it, and nobody waits for ever."""
        log.critical("the dispatcher failed; it starts anew", exc_info=error)
        self.scheduler = self._scheduler()
        if self._refusal is not None:
            self.scheduler.close()
        for number in self._busy():
            self.scheduler.instance_lost(number)
        for item_id in list(self._entries):
            self._fail(item_id, RequestFailed(f"an internal error ended this request: {describe(error)}"))

    def _busy(self) -> set[int]:
        return {batch.instance for batch in self._calls.values()}

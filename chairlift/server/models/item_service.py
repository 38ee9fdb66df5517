"""The service in front of a model that answers in one call: payloads go in, answers with their timings come out."""

import asyncio
import functools
import os
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from chairlift.core.items.item import Item
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.items.dispatcher import Answer, Dispatcher, Ticket
from chairlift.engine.supervisor import WorkerState
from chairlift.errors import BadItem, DeadlineExceeded, InvalidRequest, QueueFull, Unavailable
from chairlift.folders.kind import Task
from chairlift.runners.items import ItemInfo
from chairlift.server.http.exchange import Terms
from chairlift.server.metrics.items import ItemMetrics
from chairlift.server.models.request_log import EndedRequest, RefusedRequest, RequestLog, numbered
from chairlift.server.models.result_size import size_of
from chairlift.server.models.settings_history import SettingsHistory
from chairlift.text.encoding import TextEncoder

if TYPE_CHECKING:
    from chairlift.server.models.request_spans import RequestSpans
    from chairlift.server.models.trace_notes import TraceNotes


# Characters of a stream that may be there unread, about: what a model gives must not pile up for who does not take it.
_MOST_UNREAD = 2**24
# What a part takes besides its own, in characters.
_EACH_PART = 100


class LiveRequest(NamedTuple):
    """A request that has not ended: its id, which is that of its first item, how many items it has, and whose it is."""

    id: str
    items: int
    owner: str | None


class ItemService:
    """One served model. Its owner opens it when it is loaded, and sets `state` and `failure` as they change.

    It takes the dispatcher's `on_batch` for its metrics, where versions but the first are labelled `name:version`.

    Who records what comes is among the `recorders`, who wants spans of what ends sets `spans`.
    """

    def __init__(
        self,
        name: str,
        dispatcher: Dispatcher,
        *,
        version: str = "1",
        info: ItemInfo | None = None,
        encoder: TextEncoder | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.info = info
        self.encoder = encoder
        self.dispatcher = dispatcher
        # The items that live are the dispatcher's to tell.
        self.log: RequestLog[Item] = RequestLog()
        self.former: SettingsHistory[BatchLimits] = SettingsHistory()
        # The requests that these belong to, by id, in the order of their items' numbers.
        self.requests: dict[str, LiveRequest] = {}
        dispatcher.id_prefix = f"item-{os.urandom(4).hex()}-"
        self.metrics = ItemMetrics(name if version == "1" else f"{name}:{version}", dispatcher)
        dispatcher.on_batch = self.metrics.on_batch
        self.state = "loading" if info is None else "ready"
        self.failure: str | None = None
        self.created = int(time.time())
        # What a batch holds at most: for more the model would have to be loaded again.
        self.most_items = 0 if info is None else dispatcher.limits.max_batch_size
        self.recorders: list[TraceNotes] = []
        self.spans: RequestSpans | None = None

    def open(self, info: ItemInfo, encoder: TextEncoder | None) -> None:
        """Take requests from now on."""
        self.info, self.encoder = info, encoder
        self.most_items = max(self.most_items, self.dispatcher.limits.max_batch_size)
        self.state = "ready"

    def change_limits(self, limits: BatchLimits) -> None:
        """Go by other limits, of those that may change while the model runs."""
        before = self.dispatcher.limits
        self.dispatcher.change_limits(limits)
        self.former.note(before, time.monotonic())

    @property
    def state(self) -> WorkerState:
        """One of loading, ready, restarting, draining, failed."""
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._state = state
        self.metrics.ready = self.ready

    @property
    def ready(self) -> bool:
        """Whether a request would be taken in now."""
        return self._state == "ready"

    @property
    def task(self) -> Task | None:
        """What the model does; None before it is loaded."""
        return self.info.task if self.info is not None else None

    @property
    def max_model_len(self) -> int | None:
        """Tokens that an input may have, where inputs are texts."""
        return self.info.max_tokens if self.info is not None else None

    def loaded(self) -> ItemInfo:
        """What is known of the model. Raises Unavailable while it takes no requests."""
        if self.info is None or not self.ready:
            failure = f": {self.failure}" if self.failure else ""
            raise Unavailable(f"the model `{self.name}` is {self.state}{failure}")
        return self.info

    async def infer(self, payloads: Sequence[Any], terms: Terms, sizes: Sequence[float] | None = None) -> list[Answer]:
        """An answer for each payload, or the first error; then, as when the caller is cancelled, no other goes on.

        At the deadline nobody waits any longer for what runs. Raises InvalidRequest, QueueFull, Unavailable,
        DeadlineExceeded or RequestFailed.
        """
        futures = self.submit(payloads, terms, sizes)
        try:
            answers = await _all(futures, self.timeout_of(terms))
        except BaseException as error:
            self.failed(futures, error, terms)
            raise blamed(error, futures) from None
        self.answered(answers, terms, sizes)
        return answers

    def submit(
        self,
        payloads: Sequence[Any],
        terms: Terms,
        sizes: Sequence[float] | None = None,
        on_part: Callable[[int, Any], None] | None = None,
    ) -> list[asyncio.Future[Answer]]:
        """Queue all payloads or none, for a caller that awaits each and counts what becomes of them.

        `sizes` are what batches are counted in, 1 each if left out. `on_part` gets the parts of a streaming model's
        results, each with its payload's index. Raises InvalidRequest, QueueFull or Unavailable, and ApiError for what
        the tenant may not have.
        """
        info = self.loaded()
        tokens = 0 if sizes is None else int(sum(sizes))
        terms = terms.checked(tokens)
        self.check_count(len(payloads))
        size = float(len(payloads)) if sizes is None else sum(sizes)
        if payloads:
            for recorder in self.recorders:
                recorder.items(self.name, len(payloads), size, terms)
        futures: list[asyncio.Future[Answer]] = []
        first: str | None = None
        submit = self.dispatcher.submit
        timeout, priority, background, tenant, _ = terms
        owner = None if tenant is None else tenant.name
        try:
            for index, payload in enumerate(payloads):
                future = submit(
                    payload,
                    size=1.0 if sizes is None else sizes[index],
                    shape_key=_shape_key(payload) if info.shape_keys else None,
                    priority=priority,
                    timeout=timeout,
                    background=background,
                    on_part=None if on_part is None else functools.partial(on_part, index),
                    owner=owner,
                    request=first,
                )
                futures.append(future)
                if first is None and isinstance(future, Ticket):
                    first = future.item_id
        except BaseException as error:
            self.failed(futures, error, terms, (len(payloads), size))
            raise
        terms.spend(tokens)
        if first is not None:
            self.log.arrive(time.monotonic())
            self.requests[first] = LiveRequest(first, len(futures), owner)
        return futures

    def requests_of(self, item_ids: Iterable[str]) -> list[LiveRequest | None]:
        """The live request that each of these items belongs to, or did until it was done; None where there is none."""
        prefix, ids = self.dispatcher.id_prefix, list(self.requests)
        firsts = [int(each.removeprefix(prefix)) for each in ids]
        found: list[LiveRequest | None] = []
        for item_id in item_ids:
            start, number = numbered(item_id) or ("", 0)
            at = bisect_right(firsts, number) - 1
            request = self.requests[ids[at]] if at >= 0 and start == prefix else None
            found.append(request if request is not None and number < firsts[at] + request.items else None)
        return found

    def check_count(self, inputs: int) -> None:
        """Raise InvalidRequest for more inputs than may wait; to be asked before anything is made of them."""
        most = self.dispatcher.limits.max_waiting
        if inputs > most:
            raise InvalidRequest(f"{inputs} inputs are more than the queue of {most} holds (max_waiting)")

    async def stream(self, payloads: Sequence[Any], terms: Terms) -> AsyncGenerator[tuple[int, Any], None]:
        """The parts of a streaming model's results as they come, each with its payload's index. Raises as `infer`.

        Whoever leaves too much of them unread gets no more: QueueFull.
        """
        unread = _Unread()
        futures = self.submit(payloads, terms, on_part=unread.add)
        unread.futures = futures
        done = 0
        try:
            for future in futures:
                future.add_done_callback(unread.end)
            while done < len(payloads):
                event = await unread.next()
                if isinstance(event, asyncio.Future):
                    event.result()
                    done += 1
                else:
                    yield event
        except BaseException as error:
            self.failed(futures, error, terms)
            raise blamed(error, futures) from None
        # In the order of the payloads: a request has the id of its first.
        self._count([future.result() for future in futures], terms, None)

    def answered(self, answers: Sequence[Answer], terms: Terms, sizes: Sequence[float] | None = None) -> None:
        """Count a request whose answers are on their way."""
        if not terms.background:
            self.dispatcher.delivered(answers[-1])
        self._count(answers, terms, sizes)

    def _count(self, answers: Sequence[Answer], terms: Terms, sizes: Sequence[float] | None) -> None:
        background, tenant = terms.background, terms.tenant
        self.requests.pop(answers[0].id, None)
        self.metrics.on_answers(answers, background)
        slowest = answers[0] if len(answers) == 1 else max(answers, key=_seconds)
        total, run = slowest.ended - slowest.arrival, slowest.run_s
        ended = EndedRequest(
            id=answers[0].id,
            ended=slowest.ended,
            finish_reason="done",
            background=background,
            priority=terms.priority,
            total_s=total,
            # It waits until the front knows of its answer, too.
            queued_s=max(total - run, 0.0),
            run_s=run,
            mean_batch=slowest.batch_size,
            count=len(answers),
            size=float(len(answers)) if sizes is None else sum(sizes),
            timeout=terms.timeout,
        )
        self.log.keep(None if tenant is None else tenant.name, ended)
        if self.spans is not None:
            self.spans.items(self.name, self.task, ended, terms, sizes)

    def timeout_of(self, terms: Terms) -> float | None:
        """The seconds that a request may take, by what it asks for or else by the model's setting."""
        if terms.timeout is None and not terms.background:
            return self.dispatcher.limits.default_timeout
        return terms.timeout

    def failed(
        self,
        futures: "Sequence[asyncio.Future[Answer]]",
        error: BaseException,
        terms: Terms,
        asked: tuple[int, float] | None = None,
    ) -> None:
        """Count a request that failed, and let nothing more come of it.

        Where not all of its items were let in, `asked` are their number and their size.
        """
        now = time.monotonic()
        count, size = asked or (len(futures), sum(each.size for each in futures if isinstance(each, Ticket)))
        ended = EndedRequest(
            id="",
            ended=now,
            finish_reason=self.metrics.on_failure(error),
            background=terms.background,
            priority=terms.priority,
            total_s=0.0,
            count=count,
            size=size,
            timeout=terms.timeout,
        )
        if futures and isinstance(futures[0], Ticket):
            ended.id, ended.total_s = futures[0].item_id, now - futures[0].arrival
        owner = None if terms.tenant is None else terms.tenant.name
        if self.requests.pop(ended.id, None) is None and isinstance(error, QueueFull):
            # There was no room for it, or for all of its items, so nobody has counted it yet.
            if ended.id:
                self.log.arrive(now)
            else:
                about = owner, now, terms.priority, terms.background, max(round(size), 1)
                self.log.refuse(RefusedRequest(*about, timeout=terms.timeout, items=count))
        if ended.id:
            self.log.keep(owner, ended)
        if self.spans is not None:
            self.spans.items(self.name, self.task, ended, terms)
        for future in futures:
            future.cancel()


class _Unread:
    """What the reader of a stream has yet to take: parts, and the futures of items that have ended.

    Where that is too much, it is dropped and the items are given up, which the reader hears next.
    """

    def __init__(self) -> None:
        self.futures: Sequence[asyncio.Future[Answer]] = ()
        self._events: asyncio.Queue[tuple[int, Any, int] | asyncio.Future[Answer] | QueueFull] = asyncio.Queue()
        self._size = 0
        self._full = False

    def add(self, index: int, part: Any) -> None:
        """Take in a part of the result of this item."""
        if self._full:
            return
        size = _EACH_PART + size_of(part, _MOST_UNREAD)
        if not self._size or self._size + size <= _MOST_UNREAD:
            self._size += size
            self._events.put_nowait((index, part, size))
            return
        self._full = True
        self._events = asyncio.Queue()
        problem = f"the client left more than {_MOST_UNREAD} characters of its stream unread, so it ends here"
        self._events.put_nowait(QueueFull(f"{problem}; read faster, or ask for less at once", 1.0))
        for future in self.futures:
            future.cancel()

    def end(self, future: "asyncio.Future[Answer]") -> None:
        """Hear that an item has ended."""
        self._events.put_nowait(future)

    async def next(self) -> "tuple[int, Any] | asyncio.Future[Answer]":
        """Wait for whatever is next. Raises QueueFull."""
        event = await self._events.get()
        if isinstance(event, QueueFull):
            raise event
        if isinstance(event, asyncio.Future):
            return event
        index, part, size = event
        self._size -= size
        return index, part


def blamed(error: BaseException, futures: "Sequence[asyncio.Future[Answer]]") -> BaseException:
    """The error that ended a request; of an item that the model refused, it says which of the request's that is."""
    if not isinstance(error, BadItem):
        return error
    done = (index for index, future in enumerate(futures) if future.done() and not future.cancelled())
    return BadItem(str(error), next((index for index in done if futures[index].exception() is error), None))


def too_late() -> DeadlineExceeded:
    """What to say when a deadline passes."""
    return DeadlineExceeded("the deadline passed before the answer was there")


async def _all(futures: "list[asyncio.Future[Answer]]", timeout: float | None) -> list[Answer]:
    if timeout is not None:
        try:
            async with asyncio.timeout(timeout):
                return await _all(futures, None)
        except TimeoutError:
            raise too_late() from None
    return [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)


def _shape_key(payload: Any) -> Hashable:
    """Equal for payloads whose arrays can be stacked."""
    if isinstance(payload, np.ndarray):
        return tuple(payload.shape)
    if isinstance(payload, dict):
        return tuple((name, value.shape) for name, value in sorted(payload.items()) if isinstance(value, np.ndarray))
    return None


def _seconds(answer: Answer) -> float:
    return answer.queue_s + answer.run_s


def timing_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """What a request's slowest item saw: the longest wait, the longest call, and the largest batch; and its id."""
    if len(answers) == 1:
        (answer,) = answers
        queue, run, size, first = answer.queue_s, answer.run_s, answer.batch_size, answer.id
    else:
        first = answers[0].id
        queue = max(answer.queue_s for answer in answers)
        run = max(answer.run_s for answer in answers)
        size = max(answer.batch_size for answer in answers)
    return {
        "X-Queue-Time-Ms": f"{queue * 1000:.3f}",
        "X-Inference-Time-Ms": f"{run * 1000:.3f}",
        "X-Batch-Size": str(size),
        "X-Request-Id": first,
    }

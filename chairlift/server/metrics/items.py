"""What Prometheus sees of a model that answers in one call."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from chairlift.core.finished import ShedReason
from chairlift.core.items.item import Batch, BatchResult, Failure
from chairlift.engine.items.dispatcher import Answer, Dispatcher
from chairlift.errors import DeadlineExceeded, InvalidRequest, QueueFull
from chairlift.server.metrics.families import (
    ERRORS,
    LONG,
    REQUESTS_FINISHED,
    SHORT,
    SIZES,
    TOKENS,
    Histogram,
    background_requests,
    histograms,
    labelled,
    simple,
)

_RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


# So many calls are kept, some 7 MB.
_MOST_CALLS = 2**14


class RecentCall(NamedTuple):
    """What is kept of a call: when it began, on CLOCK_MONOTONIC, its seconds, where it ran, what it held.

    `waiting` items were left when it was over, or had failed as a whole. `computed` is its size with padding. The front
    heard of its end at `ended`, and `first` is the id of its first item. One that was sent `ahead` counts as begun when
    the front heard of the end of the one before it. Between the two its instance had nothing to do for `idle` seconds,
    and other things to do for so many, the `gap`; None where that is not known. When it left, the first of its items
    had `waited` for so long.
    """

    started: float
    seconds: float
    instance: int
    items: int
    size: float
    waiting: int
    failure: Failure | None
    computed: float = 0.0
    ended: float = 0.0
    first: str = ""
    background: bool = False
    ahead: bool = False
    gap: float | None = None
    idle: float | None = None
    waited: float | None = None


class InferenceCounts:
    """What is told of a model one by one, beside what Prometheus sees: requests, items, their times, calls by size.

    `last` is when the last answer was there, in seconds since 1970. Of a request's items the slowest counts.
    """

    __slots__ = ("batches", "failed", "items", "last", "queue_s", "requests", "run_s")

    def __init__(self) -> None:
        self.requests = self.failed = self.items = 0
        self.last = self.queue_s = self.run_s = 0.0
        self.batches: dict[int, tuple[int, float]] = {}

    def on_answers(self, answers: Sequence[Answer]) -> None:
        """Count a request that was answered."""
        self.requests += 1
        self.items += len(answers)
        self.last = time.time()
        self.queue_s += max(answer.queue_s for answer in answers)
        self.run_s += max(answer.run_s for answer in answers)

    def on_batch(self, size: int, seconds: float) -> None:
        """Count a call that succeeded."""
        count, before = self.batches.get(size, (0, 0.0))
        self.batches[size] = count + 1, before + seconds


class ItemMetrics:
    """All that is counted for one model. Call the methods from the event loop's thread only."""

    def __init__(self, model: str, dispatcher: Dispatcher) -> None:
        self.model = model
        self.ready = False
        self.counts = InferenceCounts()
        self.calls: deque[RecentCall] = deque(maxlen=_MOST_CALLS)
        self._dispatcher = dispatcher
        self.queue_time = Histogram(LONG)
        self._answered = 0
        self._finished: Counter[str] = Counter(dict.fromkeys(("done", "error", "invalid", "shed", "late", "abort"), 0))
        self._batch_items = Histogram(SIZES)
        self._batch_tokens = Histogram(TOKENS)
        self._batch_padding = Histogram(_RATIOS)
        self._batch_seconds = Histogram(SHORT)
        self._prediction_error = Histogram(ERRORS)
        self._predicted_seconds = self._timed_seconds = 0.0
        self._failures: Counter[str] = Counter(dict.fromkeys(Failure, 0))

    @property
    def busy_seconds(self) -> float:
        """The time that calls have taken, of all instances together."""
        return self._timed_seconds

    def on_answers(self, answers: Sequence[Answer], background: bool = False) -> None:
        """Count a request that was answered, and its items; how long background ones waited would hide all others."""
        self._finished["done"] += 1
        self._answered += len(answers)
        self.counts.on_answers(answers)
        for answer in () if background else answers:
            self.queue_time.observe(answer.queue_s)

    def on_failure(self, error: BaseException) -> str:
        """Count a request that was not; return how it ended."""
        self.counts.failed += 1
        match error:
            case QueueFull():
                outcome = "shed"
            case DeadlineExceeded():
                outcome = "late"
            case InvalidRequest():
                outcome = "invalid"
            case Exception():
                outcome = "error"
            case _:
                outcome = "abort"
        self._finished[outcome] += 1
        return outcome

    def on_batch(self, batch: Batch, outcome: BatchResult) -> None:
        """Count a call's end."""
        if outcome.failure is Failure.UNTRIED:
            self._failures[outcome.failure] += 1
            return
        count, waiting = len(batch.items), self._dispatcher.scheduler.num_waiting
        size, computed, failure = batch.size, batch.computed, outcome.failure
        first, ended = batch.items[0], time.monotonic()
        waited = batch.started - min(item.arrival for item in batch.items)
        about = first.id, first.background, batch.ahead, outcome.gap, outcome.idle, waited
        held = count, size, waiting, failure, computed, ended, *about
        self.calls.append(RecentCall(batch.started, outcome.seconds, batch.instance, *held))
        self._batch_items.observe(count)
        self._batch_tokens.observe(batch.size)
        self._batch_padding.observe(1 - batch.size / batch.computed)
        if outcome.failure is not None:
            self._failures[outcome.failure] += 1
        else:
            self.counts.on_batch(count, outcome.seconds)
        if outcome.failure is None and outcome.seconds > 0:
            self._batch_seconds.observe(outcome.seconds)
            self._prediction_error.observe(abs(batch.predicted - outcome.seconds) / outcome.seconds)
            self._predicted_seconds += batch.predicted
            self._timed_seconds += outcome.seconds

    def collect(self) -> Iterable[Metric]:
        """All metrics, as of now."""
        yield from self._gauges()
        yield from self._counters()
        yield from histograms(
            self.model,
            (
                ("queue_time_seconds", "From arrival until it ran.", self.queue_time),
                ("batch_items", "Items in a batch.", self._batch_items),
                ("batch_tokens", "Tokens in a batch, or items where those are what counts.", self._batch_tokens),
                ("batch_padding_ratio", "Share of what a batch computes that is padding.", self._batch_padding),
                ("batch_duration_seconds", "Time of a call.", self._batch_seconds),
                ("batch_prediction_error_ratio", "|predicted - actual| / actual seconds.", self._prediction_error),
            ),
        )

    def _gauges(self) -> Iterable[Metric]:
        scheduler = self._dispatcher.scheduler
        rows = (
            ("ready", "1 while requests are taken in.", float(self.ready)),
            ("items_waiting", "Items that wait.", scheduler.num_waiting),
            ("items_running", "Items in batches that run.", scheduler.num_running),
            ("queued_work_seconds", "Seconds of work that waits, as predicted.", scheduler.queue_seconds()),
        )
        yield from simple(GaugeMetricFamily, self.model, rows)
        yield from background_requests(self.model, scheduler.num_background_running, scheduler.num_background_waiting)

    def _counters(self) -> Iterable[Metric]:
        scheduler = self._dispatcher.scheduler
        rows = (
            ("worker_restarts", "Workers started after one died.", self._dispatcher.restarts),
            ("items_answered", "Items that got their results.", self._answered),
            ("bisections", "Failed batches that were split to find the item at fault.", scheduler.num_bisections),
            ("batch_predicted_seconds", "Time of calls that the cost model foresaw.", self._predicted_seconds),
            ("batch_timed_seconds", "Time that those calls took.", self._timed_seconds),
        )
        yield from simple(CounterMetricFamily, self.model, rows)
        shed = {reason.value: scheduler.num_shed[reason] for reason in ShedReason if reason is not ShedReason.TTFT}
        by_label = (
            ("requests_finished", REQUESTS_FINISHED, "reason", self._finished),
            ("items_shed", "Items that were refused, by reason.", "reason", shed),
            ("batch_failures", "Calls that failed as a whole, by how.", "failure", self._failures),
        )
        yield from labelled(CounterMetricFamily, self.model, by_label)

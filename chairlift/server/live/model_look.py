"""What is told of a model that somebody watches, and what can be read of any model's counts and log."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

import msgspec

from chairlift.server.http.api_errors import without_folders
from chairlift.server.live.slot_board import SHOWN_S, Bar
from chairlift.server.metrics.families import Histogram
from chairlift.server.models.registry import ModelService
from chairlift.server.models.request_log import EndedRequest, RequestLog

# Rates are those since so many looks ago, percentiles those since the oldest that is kept: about 1 and 15 seconds.
_RATE_LOOKS, _KEPT_LOOKS = 4, 45
_QUANTILES = (0.5, 0.95, 0.99)
# Why those wait of whom nothing is decided yet, and those in the background.
JUST_COME = "they have just come"
BEHIND_LIVE = "they are in the background, and wait for live ones"


class ModelLook(msgspec.Struct, kw_only=True):
    """A model at one moment; what does not apply, or is not known, is null. Rates are per second.

    `queue` has how many wait, and why the first of them does, in words. `kv` counts blocks: those in use, those free
    whose content is still known, and all. `limit` is what `written` would be with all slots taken, as the cost model
    has it, `most` the highest that was seen. `ttft`, `itl` and `queue_time` are 50th, 95th and 99th percentiles in
    seconds. Of a model for items `batch` is how many are in a call, `busy` the share of time that calls run.
    `newest` is false of older versions, of which no route tells the settings or a forecast.
    `bars` are those that are new or have changed, or, where all is told, those of the last minute.
    """

    name: str
    version: str
    kind: str
    task: str | None
    state: str
    failure: str | None
    slots: int
    newest: bool = True
    running: int = 0
    waiting: int = 0
    background_running: int = 0
    background_waiting: int = 0
    queue: list[tuple[str, int]] = []
    kv: tuple[int, int, int] | None = None
    written: float | None = None
    computed: float | None = None
    limit: float | None = None
    most: float | None = None
    ttft: list[float] | None = None
    itl: list[float] | None = None
    queue_time: list[float] | None = None
    batch: float | None = None
    busy: float | None = None
    bars: list[Bar] = []


class TenantLoad:
    """What a tenant has on one model: requests that run and that wait, and what ended since the last look."""

    __slots__ = ("ended", "running", "waiting")

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.ended: list[EndedRequest] = []


class Tally:
    """Counts and histograms of the last looks, of which rates and percentiles are made."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._histograms = histograms
        self._looks: deque[tuple[float, tuple[float, ...], list[tuple[int, ...]]]] = deque(maxlen=_KEPT_LOOKS)

    def look(self, now: float, *counts: float) -> tuple[list[float] | None, list[list[float] | None]]:
        """Note the counts; return their rates, None before there is a second look, and the histograms' percentiles."""
        rates = None
        if self._looks:
            then, before, _ = self._looks[max(len(self._looks) - _RATE_LOOKS, 0)]
            seconds = max(now - then, 1e-3)
            rates = [max(count - earlier, 0.0) / seconds for count, earlier in zip(counts, before, strict=True)]
        oldest = self._looks[0][2] if self._looks else None
        quantiles = [
            None if oldest is None else histogram.quantiles(_QUANTILES, oldest[index])
            for index, histogram in enumerate(self._histograms)
        ]
        self._looks.append((now, counts, [histogram.counts for histogram in self._histograms]))
        return rates, quantiles


class LogReader:
    """Reads who was written down as ended since the last time; the first time, those of the last minute.

    A request is written down once its client has the end of it, which may be long after that came.
    """

    def __init__(self, log: RequestLog[Any]) -> None:
        self._log = log
        self._num_read: int | None = None

    def read(self, now: float) -> Iterator[tuple[str | None, EndedRequest]]:
        """Those that ended within the last minute, each with its tenant."""
        log, since = self._log, now - SHOWN_S
        before, self._num_read = self._num_read, log.num_kept
        if before is None:
            for owner, line in log.ended.items():
                for each in takewhile(lambda one: one.ended >= since, reversed(line)):
                    yield owner, each
            return
        for owner, each in islice(reversed(log.latest), log.num_kept - before):
            if each.ended >= since:
                yield owner, each


def look_of(service: ModelService, kind: str, slots: int) -> ModelLook:
    """What is told of a model in any state."""
    failure = without_folders(service.failure) if service.failure else None
    return ModelLook(
        name=service.name,
        version=service.version,
        kind=kind,
        task=service.task,
        state=service.state,
        failure=failure,
        slots=slots,
    )

"""The last minute of a server as a picture: steps, calls and requests in the Trace Event Format of Chrome and Perfetto.

A model is a process there. A language model's steps are one track of it, another model's calls one for each instance.
A request that ran lies in the first slot that was free, its phases within it; those that waited lie beside each other.
Counters say how many wait, and how many KV blocks are held.
"""

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import msgspec

from chairlift import __version__
from chairlift.server.metrics.items import RecentCall
from chairlift.server.metrics.sequences import RecentStep
from chairlift.server.models.registry import ModelService
from chairlift.server.models.request_log import EndedRequest, Viewer
from chairlift.server.models.sequence_service import Sample, SequenceService
from chairlift.server.requests.item_view import live_items

# About what one event takes, in characters.
_EVENT_SIZE = 150

_WINDOW_S = 60.0
# Of each model so many live requests, and so many of those that ended, the newest.
_MOST_REQUESTS = 2000
# The number of the track of steps, or of the first instance, and of the first slot.
_STEPS, _SLOTS = 1, 1000

Event = dict[str, Any]


class ModelSnapshot(NamedTuple):
    """What is shown of one model: its requests, as if those that live had ended now, and its steps or its calls."""

    name: str
    requests: list[EndedRequest]
    steps: list[RecentStep]
    calls: list[RecentCall]

    @property
    def size(self) -> int:
        """About how many characters that makes."""
        return _EVENT_SIZE * (4 * len(self.requests) + 2 * len(self.steps) + 2 * len(self.calls))


def snapshot(service: ModelService, viewer: Viewer, now: float) -> ModelSnapshot:
    """What there is of a model's last minute, with the requests that a viewer may see. For the event loop's thread."""
    since = now - _WINDOW_S
    ended = takewhile(lambda each: each.ended >= since, service.log.ended_of(viewer))
    requests = list(islice(ended, _MOST_REQUESTS))
    if isinstance(service, SequenceService):
        live = islice(service.log.live_of(viewer), _MOST_REQUESTS)
        requests += [_so_far(sample, now) for sample in live]
        steps = takewhile(lambda step: step.ended >= since, reversed(service.metrics.steps))
        return ModelSnapshot(service.metrics.model, requests, list(steps)[::-1], [])
    items = islice(live_items(service, viewer), _MOST_REQUESTS)
    requests += [
        EndedRequest(id=item.id, ended=now, finish_reason="", background=item.background, total_s=now - item.arrival)
        for item in items
    ]
    calls = [call for call in service.metrics.calls if call.started + call.seconds >= since]
    return ModelSnapshot(service.metrics.model, requests, [], calls)


def _so_far(sample: Sample, now: float) -> EndedRequest:
    """A live sequence as if it ended now. What has no token yet counts as waiting."""
    request, began = sample.stream.request, sample.stream.beginning
    ended = EndedRequest(
        id=request.id,
        ended=now,
        finish_reason="",
        background=request.background,
        priority=request.priority,
        total_s=now - request.arrival,
        prompt_tokens=len(request.prompt_ids),
        tokens=sample.num_tokens,
        preemptions=sample.stream.preemptions,
    )
    if began is not None:
        ended.queued_s = max(began.scheduled - request.arrival, 0.0)
        ended.prefill_s = began.first_token - began.scheduled
        ended.decode_s = now - began.first_token
    return ended


def timeline_document(models: Sequence[ModelSnapshot], now: float) -> bytes:
    """The whole document as JSON. `now` is a moment of CLOCK_MONOTONIC, as all that was kept."""
    events: list[Event] = []
    for pid, model in enumerate(models, 1):
        events += _Process(pid, model, now).events()
    about = {"version": f"chairlift {__version__}", "until": f"{time.time() - (time.monotonic() - now):.3f}"}
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events, "otherData": about})


class _Process:
    """One model's events. Moments are in whole microseconds, so that what lies within another does so exactly."""

    def __init__(self, pid: int, model: ModelSnapshot, now: float) -> None:
        self._pid, self._model = pid, model
        self._since, self._now = _microseconds(now - _WINDOW_S), _microseconds(now)

    def events(self) -> list[Event]:
        """All of them: names first, then by time, what lies within another behind it."""
        timed = [*self._steps(), *self._calls(), *self._requests()]
        timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        tracks = {_STEPS: "steps"} if self._model.steps else {}
        tracks |= {_STEPS + call.instance: f"instance {call.instance}" for call in self._model.calls}
        tracks |= {event["tid"]: f"slot {event['tid'] - _SLOTS + 1}" for event in timed if event["tid"] >= _SLOTS}
        names = [self._name("process_name", 0, {"name": self._model.name})]
        for tid, name in sorted(tracks.items()):
            names.append(self._name("thread_name", tid, {"name": name}))
            names.append(self._name("thread_sort_index", tid, {"sort_index": tid}))
        return names + timed

    def _name(self, what: str, tid: int, args: Event) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "args": args}

    def _slice(self, name: str, kind: str, tid: int, start: int, end: int, args: Event) -> Event:
        """A slice of a track, or what of it lies within the minute."""
        start = max(start, self._since)
        place = {"ts": start, "dur": max(min(end, self._now) - start, 0), "pid": self._pid, "tid": tid}
        return {"ph": "X", "name": name, "cat": kind, **place, "args": args}

    def _counter(self, name: str, moment: int, values: dict[str, int]) -> Event:
        return {"ph": "C", "name": name, "ts": moment, "pid": self._pid, "tid": 0, "args": values}

    def _steps(self) -> Iterator[Event]:
        before, waiting, blocks = self._since, None, None
        for step in self._model.steps:
            end = max(_microseconds(step.ended), before)
            start = max(_microseconds(step.ended - step.seconds), before)
            yield self._slice("step", "step", _STEPS, start, end, {"requests": step.requests, "tokens": step.tokens})
            before = end
            if waiting != (step.waiting, step.background_waiting):
                waiting = step.waiting, step.background_waiting
                yield self._counter("waiting", end, {"live": step.waiting, "background": step.background_waiting})
            if blocks != step.kv_blocks_used:
                blocks = step.kv_blocks_used
                yield self._counter("KV blocks", end, {"held": blocks})

    def _calls(self) -> Iterator[Event]:
        until: dict[int, int] = {}
        waiting = None
        for call in sorted(self._model.calls, key=lambda call: call.started):
            before = until.get(call.instance, self._since)
            start = max(_microseconds(call.started), before)
            end = until[call.instance] = max(_microseconds(call.started + call.seconds), start)
            args: Event = {"items": call.items, "size": call.size}
            if call.failure is not None:
                args["failure"] = call.failure
            yield self._slice("call", "call", _STEPS + call.instance, start, end, args)
            if waiting != call.waiting:
                waiting = call.waiting
                yield self._counter("waiting", end, {"items": waiting})

    def _requests(self) -> Iterator[Event]:
        ran: list[tuple[int, int, EndedRequest]] = []
        for request in self._model.requests:
            arrival, start, end = _moments(request)
            if start is not None:
                ran.append((start, end, request))
            until = end if start is None else start
            if until > max(arrival, self._since):
                yield from self._wait(request, max(arrival, self._since), until)
        for slot, start, end, request in _in_slots(ran):
            yield self._slice(request.id, "request", slot, start, end, _told(request))
            if request.prefill_s is not None:
                first = min(start + _microseconds(request.prefill_s), end)
                if first > self._since:
                    yield self._slice("prefill", "phase", slot, start, first, {})
                yield self._slice("decode", "phase", slot, first, end, {})

    def _wait(self, request: EndedRequest, start: int, end: int) -> Iterator[Event]:
        """The two ends of a wait, which others may overlap."""
        place = {"name": "waiting", "cat": "waiting", "id": request.id, "pid": self._pid, "tid": 0}
        yield {"ph": "b", **place, "ts": start, "args": _told(request)}
        yield {"ph": "e", **place, "ts": min(end, self._now)}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _moments(request: EndedRequest) -> tuple[int, int | None, int]:
    """When a request came, when it began to run, if it did, and when it was over."""
    end = _microseconds(request.ended)
    arrival = end - _microseconds(request.total_s or 0.0)
    ran = request.prefill_s is not None or request.run_s is not None
    start = min(arrival + _microseconds(request.queued_s or 0.0), end) if ran else None
    return arrival, start, end


def _in_slots(ran: Iterable[tuple[int, int, EndedRequest]]) -> Iterator[tuple[int, int, int, EndedRequest]]:
    """Requests with their slots, of which each has one at a time: the first that is free when it begins."""
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    for start, end, request in sorted(ran, key=lambda each: each[:2]):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        slot = heapq.heappop(free) if free else _SLOTS + len(taken)
        heapq.heappush(taken, (end, slot))
        yield slot, start, end, request


def _told(request: EndedRequest) -> Event:
    """What is said of a request beside its times."""
    about = {
        "request": request.id,
        "finish_reason": request.finish_reason or "under way",
        "background": request.background,
        "priority": request.priority,
        "prompt_tokens": request.prompt_tokens,
        "tokens": request.tokens,
        "preemptions": request.preemptions,
        "total_s": request.total_s,
    }
    return {name: value for name, value in about.items() if value is not None}

"""Whose requests a model has, and what became of those that have ended lately: for whoever asks."""

import heapq
import re
import time
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import takewhile
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.types import Scope

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import Request
from chairlift.server.http.tenants import TENANT, Tenant


class Arrived(Protocol):
    """What came at a moment of CLOCK_MONOTONIC."""

    @property
    def arrival(self) -> float:
        """When it came."""


LiveT = TypeVar("LiveT", bound=Arrived)

# For so long it can be asked what became of a request, as long as its tenant has not had so many more on the model.
KEPT_S = 600.0
# Where nobody is asked for a key there are more: all are one tenant's.
_MOST_ENDED, _MOST_OF_ALL = 1000, 4000
# Of a flood of refused requests so many a second are kept, so that they go back for four minutes: what is told of the
# past is less.
_MOST_REFUSED, _REFUSED_PER_S = 4000, 16
# How many came is counted by the second, for so many seconds: for longer than those go back.
_COUNTED_S = 256
# For whoever follows the log: as many as come to a busy model between two looks.
_MOST_LATEST = 4096
# What `new_id` makes, and what is put behind it where a request has several sequences.
REQUEST_ID = re.compile(r"[a-z]+[-_][0-9a-f]{24}")
PART_ID = re.compile(rf"\b{REQUEST_ID.pattern}(?:-\d+)*")
# What items have instead: those of one request are numbered one after the other.
_ITEM_ID = re.compile(r"(item-[0-9a-f]{8}-)([1-9][0-9]*)")
_arrival, _ended = attrgetter("arrival"), attrgetter("ended")


class Viewer(NamedTuple):
    """Who asks for requests: the tenant of a name, None where nobody is asked for a key; and who sees those of all."""

    name: str | None
    sees_all: bool

    @classmethod
    def of(cls, scope: Scope) -> "Viewer":
        """Who sent an HTTP request."""
        tenant: Tenant | None = scope.get(TENANT)
        return cls(None, False) if tenant is None else cls(tenant.name, tenant.sees_all)


class EndedRequest(msgspec.Struct, kw_only=True):
    """What is kept of a sequence that ended, or of a request for items: nothing that grows with it.

    Seconds, but for `ended`, which is a moment of CLOCK_MONOTONIC; None is not known. `waits` are those before it ran,
    by what the head of the queue waited for. `steps` and `mean_batch` are those from its first token to its last. There
    might have been up to `max_tokens`, if it could end before; with `hold_updates` nobody read them as they came. Of
    `count` items, of this `size` together, those of the slowest are told. `timeout` is what the request asked for.
    """

    id: str
    ended: float
    finish_reason: str
    background: bool = False
    priority: int = 0
    total_s: float | None = None
    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    run_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    steps: int | None = None
    mean_batch: float | None = None
    preemptions: int | None = None
    waits: dict[str, float] = {}
    max_tokens: int | None = None
    hold_updates: bool = False
    count: int = 1
    size: float | None = None
    timeout: float | None = None


class RefusedRequest(NamedTuple):
    """A sequence, or a request for `items`, for which there was no room when it came, or no time.

    `size` counts the prompt's tokens, and is 0 if nobody had read that, or what so many items count in batches.
    """

    owner: str | None
    arrival: float
    priority: int
    background: bool
    size: int = 0
    max_tokens: int | None = None
    hold_updates: bool = False
    timeout: float | None = None
    items: int = 0

    @classmethod
    def of(cls, request: Request, owner: str | None, timeout: float | None) -> "RefusedRequest":
        """What is kept of a sequence."""
        about = request.arrival, request.priority, request.background, len(request.prompt_ids)
        return cls(owner, *about, request.max_tokens if request.may_stop else None, request.hold_updates, timeout)


class _Ended(dict[str | None, deque[EndedRequest]]):
    """A line for each tenant."""

    def __missing__(self, owner: str | None) -> deque[EndedRequest]:
        line = self[owner] = deque(maxlen=_MOST_OF_ALL if owner is None else _MOST_ENDED)
        return line


class _Index:
    """Where the requests of one line are, by whatever they may be asked for."""

    def __init__(self) -> None:
        # The parts of each request, by its id; of one for items, which has no parts, by that of its first item.
        self._parts: dict[str, list[EndedRequest]] = {}
        # The numbers of these first items, in order, by what their ids begin with.
        self._firsts: dict[str, list[int]] = {}

    def add(self, ended: EndedRequest) -> None:
        """Find it from now on."""
        self._parts.setdefault(request_of(ended.id), []).append(ended)
        if (item := numbered(ended.id)) is not None:
            insort(self._firsts.setdefault(item[0], []), item[1])

    def remove(self, ended: EndedRequest) -> None:
        """Find it no longer."""
        name = request_of(ended.id)
        parts = self._parts[name]
        parts.remove(ended)
        if not parts:
            del self._parts[name]
        if (item := numbered(ended.id)) is not None:
            firsts = self._firsts[item[0]]
            del firsts[bisect_left(firsts, item[1])]
            if not firsts:
                del self._firsts[item[0]]

    def find(self, request_id: str) -> list[EndedRequest]:
        """The one of this id, all parts of a request, or that which an item belonged to."""
        if (item := numbered(request_id)) is not None:
            firsts = self._firsts.get(item[0], [])
            at = bisect_right(firsts, item[1]) - 1
            found = self._parts[f"{item[0]}{firsts[at]}"] if at >= 0 else []
            return [each for each in found if item[1] < firsts[at] + each.count]
        name = request_of(request_id)
        return [each for each in self._parts.get(name, []) if request_id in (name, each.id)]


class RequestLog(Generic[LiveT]):
    """The requests of one model by tenant, and in that by id. Everything happens on one event loop.

    Whoever serves them says when one begins and ends; what is asked takes no longer for the requests of others.
    `latest` are those that were kept last, in that order and with their tenants; `num_kept` counts all that ever were.
    `refused` are the last for which there was no room, of a flood an even sample; `came` counts all by the second,
    with room or without.
    """

    def __init__(self) -> None:
        self.live: defaultdict[str | None, dict[str, LiveT]] = defaultdict(dict)
        self.ended = _Ended()
        self._index: defaultdict[str | None, _Index] = defaultdict(_Index)
        self.came: dict[int, int] = {}
        self.latest: deque[tuple[str | None, EndedRequest]] = deque(maxlen=_MOST_LATEST)
        self.num_kept = 0
        self.refused: deque[RefusedRequest] = deque(maxlen=_MOST_REFUSED)

    def arrive(self, moment: float) -> None:
        """Count one that came."""
        second, came = int(moment), self.came
        came[second] = came.get(second, 0) + 1
        if len(came) > _COUNTED_S:
            del came[next(iter(came))]

    def begin(self, owner: str | None, request_id: str, live: LiveT) -> None:
        """Have one that was let in among the live ones."""
        self.live[owner][request_id] = live
        self.arrive(live.arrival)

    def keep(self, owner: str | None, ended: EndedRequest) -> None:
        """Keep one that ended, in order: of a client that reads slowly it is heard when others have long ended."""
        line, index = self.ended[owner], self._index[owner]
        later: list[EndedRequest] = []
        while line and line[-1].ended > ended.ended:
            later.append(line.pop())
        index.add(ended)
        if len(line) + len(later) == line.maxlen:
            # A full line drops its oldest, which may be this one.
            index.remove(line[0] if line else ended)
        line.append(ended)
        line.extend(reversed(later))
        self.latest.append((owner, ended))
        self.num_kept += 1

    def refuse(self, request: RefusedRequest) -> None:
        """Count one for which there was no room, and keep it if no more of these came than can be kept."""
        self.arrive(request.arrival)
        kept, now = self.refused, request.arrival
        flood = len(kept) >= _REFUSED_PER_S and kept[-_REFUSED_PER_S].arrival > now - 1
        if not flood or now - kept[-1].arrival >= 1 / _REFUSED_PER_S:
            kept.append(request)

    def live_of(self, viewer: Viewer) -> Iterator[LiveT]:
        """Those that a viewer may see, oldest first."""
        lines = [self.live.get(name, {}).values() for name in (self.live if viewer.sees_all else [viewer.name])]
        return heapq.merge(*lines, key=_arrival)

    def find(self, viewer: Viewer, request_id: str) -> list[LiveT]:
        """The live one of this id, or all parts of a request; none that the viewer may not see."""
        mine = [self.live.get(name, {}) for name in (self.live if viewer.sees_all else [viewer.name])]
        exact = [found for each in mine if (found := each.get(request_id)) is not None]
        if exact or not REQUEST_ID.fullmatch(request_id):
            return exact
        return [part for each in mine for part_id, part in each.items() if part_id.startswith(f"{request_id}-")]

    def ended_of(self, viewer: Viewer) -> Iterator[EndedRequest]:
        """What is still kept of those that a viewer may see, the last that ended first."""
        names = self.ended if viewer.sees_all else [viewer.name]
        lines = [reversed(self.ended[name]) for name in names if name in self.ended]
        since = time.monotonic() - KEPT_S
        return takewhile(lambda each: each.ended >= since, heapq.merge(*lines, key=_ended, reverse=True))

    def find_ended(self, viewer: Viewer, request_id: str) -> list[EndedRequest]:
        """What is kept of the one of this id, of all parts of a request, or of that which an item belonged to."""
        since, names = time.monotonic() - KEPT_S, self._index if viewer.sees_all else [viewer.name]
        lines = [self._index[name].find(request_id) for name in names if name in self._index]
        return sorted((each for line in lines for each in line if each.ended >= since), key=_ended, reverse=True)


def refused_at_once(request: Request) -> EndedRequest:
    """What is to be told of a sequence for which there was no room."""
    now = time.monotonic()
    return EndedRequest(
        id=request.id,
        ended=now,
        finish_reason=FinishReason.SHED.value,
        background=request.background,
        priority=request.priority,
        total_s=now - request.arrival,
    )


def request_of(part_id: str) -> str:
    """The id of the request that a sequence or an item is a part of."""
    found = REQUEST_ID.match(part_id)
    return part_id if found is None else found[0]


def numbered(item_id: str) -> tuple[str, int] | None:
    """What an item's id begins with, which all of its model have in common, and its number; None of another id."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else (found[1], int(found[2]))

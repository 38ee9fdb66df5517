"""What a server knows of a model's last minutes, put as a question for the simulator."""

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from math import ceil, floor, inf
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.core.finished import FinishReason
from chairlift.core.items.item import Item
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.items.dispatcher import Dispatcher
from chairlift.plan.machine_profile import LEAST_SAMPLES, CallSample, SequenceProfile
from chairlift.plan.seen_traffic import AllArrivals, SeenRequest, SeenStep, quiet_moment
from chairlift.plan.what_if import Change, ItemQuestion, SequenceQuestion
from chairlift.runners.items import TEXT_TASKS, ItemInfo
from chairlift.server.http.api_errors import ApiError
from chairlift.server.metrics.items import RecentCall
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.request_log import EndedRequest, RefusedRequest
from chairlift.server.models.sequence_service import Sample, SequenceService
from chairlift.server.twin.seen_calls import seen_calls

# The traffic that is told of; what came before it, which may still have been there; and how much further back that goes
# to a moment at which nobody waited.
WINDOW_S, _LEAD_S, _MOST_BACK_S = 120.0, 30.0, 60.0
# Of one model so many requests, with so many tokens of prompts and answers together (or items), and so many steps or
# calls; of too many the last ones. Those that are answered in one call take less to simulate.
_MOST_REQUESTS, _MOST_ANSWERED_AT_ONCE = 1000, 4000
_MOST_TOKENS, _MOST_STEPS = 300_000, 4000
# Entries of the log that are looked at for them.
_MOST_READ = 20_000
# Of what is left out for its number, so much of the rest is what came before.
_LEAD_SHARE = 0.2
# How a request ends that was answered; fewer of them say nothing of percentiles.
ANSWERED, LEAST_ANSWERED = ("stop", "length", "done"), 20
_ended = attrgetter("ended")


class _Kept(NamedTuple):
    """A request of the log, by its id."""

    id: str
    seen: SeenRequest


class Past(NamedTuple):
    """What a server knows of a model at a moment: a copy, as what it is made from goes on.

    `ended` are those of each tenant, the last one last; `known` is the moment from which on none of a tenant's is
    missing, if that is known; `steps` are those of a language model, or another's calls. `live` are those that have not
    ended, and `refused` a sample of those that were never let in; `came` counts all by the second. Of each tenant it
    has a number.
    """

    now: float
    of: SequenceQuestion | ItemQuestion
    ended: list[tuple[int, list[EndedRequest]]]
    live: list[_Kept]
    refused: list[RefusedRequest]
    came: dict[int, int]
    numbers: "_Numbers"
    known: float | None
    steps: list[Any]


class _Window(NamedTuple):
    """What came, in order of arrival; what is told of begins at `since`."""

    kept: list[_Kept]
    since: float

    @property
    def requests(self) -> list[SeenRequest]:
        """Without their ids."""
        return [each.seen for each in self.kept]

    def place(self, request_id: str) -> int | None:
        """Where a request is."""
        return next((index for index, each in enumerate(self.kept) if each.id == request_id), None)


def past_of(service: SequenceService | ItemService, moment: float = inf) -> Past:
    """Copy what is known of a model, with the settings that it had at a moment, by default those of now.

    It is quick, as it belongs to the event loop, and what follows does not.
    """
    lines = service.log.ended.values()
    known = max((line[0].ended for line in lines if len(line) == line.maxlen), default=None)
    if isinstance(service, SequenceService):
        config = service.former.at(moment, service.client.config)
        of: SequenceQuestion | ItemQuestion = _of_sequences(service, config)
        steps: list[Any] = list(service.metrics.steps)
    else:
        limits = service.former.at(moment, service.dispatcher.limits)
        of, steps = _of_items(service.dispatcher, service.loaded(), limits), list(service.metrics.calls)
    numbers = _Numbers()
    ended = [(numbers[name], list(line)) for name, line in service.log.ended.items()]
    live, refused, came = list(_live(service, numbers)), list(service.log.refused), dict(service.log.came)
    return Past(time.monotonic(), of, ended, live, refused, came, numbers, known, steps)


class _Numbers(dict[str | None, int]):
    """A number for each tenant, in the order in which they are asked for."""

    def __missing__(self, name: str | None) -> int:
        number = self[name] = len(self)
        return number


def lately(past: Past, changes: list[Change], least: int = LEAST_ANSWERED) -> SequenceQuestion | ItemQuestion:
    """Ask what would have become of the last minutes' traffic. Raises ApiError (409) where fewer were answered."""
    window = _window(past, past.now - WINDOW_S, past.now)
    answered = sum(each.answered and each.arrival >= window.since for each in window.requests)
    if answered < least:
        message = f"{answered} requests came and were answered within the last {WINDOW_S:g} s"
        raise _too_little(f"{message}, and to say anything takes {least}")
    return _question(past, window, changes, None)


def all_arrivals(past: Past, listed: Sequence[SeenRequest]) -> AllArrivals | None:
    """Count all that came while these did, in order of arrival; None where that was within a second.

    These may be a sample: many refused requests are thinned, and some are known by their number alone.
    """
    begin, end = ceil(listed[0].arrival), floor(listed[-1].arrival)
    if begin >= end:
        return None
    num_listed = sum(begin <= each.arrival < end for each in listed)
    counted = sum(count for second, count in past.came.items() if begin <= second < end)
    # Of items that wait each is listed for itself, whether it came alone or not.
    return AllArrivals(requests=max(counted, num_listed), listed=num_listed, seconds=end - begin)


def around(past: Past, ended: EndedRequest, changes: list[Change]) -> SequenceQuestion | ItemQuestion:
    """Ask what would have become of one request that was answered. Raises ApiError (409) if too little is known."""
    arrival = ended.ended - (ended.total_s or 0.0)
    window = _window(past, arrival, ended.ended, ended.id)
    target = window.place(ended.id)
    if target is None:
        raise _too_little("too much came after it for the server to know what was there with it")
    return _question(past, window, changes, target)


def _too_little(message: str) -> ApiError:
    return ApiError(409, message, code="too_little_traffic")


def _window(past: Past, since: float, until: float, target: str | None = None) -> _Window:
    """Those that came until then, and somewhat before `since`, who may still be there then; the last if too many."""
    latest = since - _LEAD_S
    earliest = latest - _MOST_BACK_S
    known_of = (*_ended_since(past, earliest), *past.live, *_refused(past.refused, past.numbers))
    found = [each for each in known_of if earliest <= each.seen.arrival <= until]
    begin = quiet_moment([each.seen for each in found], latest)
    found = [each for each in found if each.seen.arrival >= begin]
    most = _MOST_REQUESTS if isinstance(past.of, SequenceQuestion) else _MOST_ANSWERED_AT_ONCE
    found = _with_fewer_refused(found, most)
    # What a tenant had before the oldest of its that are kept is not known.
    known = begin if past.known is None else past.known
    found.sort(key=lambda each: each.seen.arrival)
    kept: list[_Kept] = []
    tokens = 0
    for each in reversed(found):
        # Who was refused takes nothing to simulate.
        tokens += 0 if each.seen.refused else each.seen.size + each.seen.outputs
        if len(kept) >= most or (tokens > _MOST_TOKENS and kept):
            break
        kept.append(each)
    kept.reverse()
    if len(kept) < len(found) and target is None:
        since = max(since, kept[int(len(kept) * _LEAD_SHARE)].seen.arrival)
    return _Window(kept, max(since, known) if target is None else since)


def _with_fewer_refused(found: list[_Kept], most: int) -> list[_Kept]:
    """The same with an even sample of the refused, where more came than can be looked at, most of which are these.

    Otherwise they would be all that is told of, and nobody's answer.
    """
    refused = [each for each in found if each.seen.refused]
    room = max(most - (len(found) - len(refused)), most // 2)
    if len(refused) <= room:
        return found
    sample = {id(refused[place * len(refused) // room]) for place in range(room)}
    return [each for each in found if not each.seen.refused or id(each) in sample]


def _ended_since(past: Past, begin: float) -> Iterator[_Kept]:
    """Those that ran and ended since then, of all tenants, the last one first."""
    make = _seen_sequence if isinstance(past.of, SequenceQuestion) else _seen_items
    lines = [_numbered(number, reversed(line)) for number, line in past.ended]
    merged = heapq.merge(*lines, key=lambda pair: pair[1].ended, reverse=True)
    for number, each in islice(takewhile(lambda pair: pair[1].ended >= begin, merged), _MOST_READ):
        seen = make(each, number)
        if seen is not None:
            yield _Kept(each.id, seen)


def _numbered(number: int, line: Iterable[EndedRequest]) -> Iterator[tuple[int, EndedRequest]]:
    return ((number, each) for each in line)


def _seen_sequence(each: EndedRequest, tenant: int) -> SeenRequest | None:
    """A sequence that ended; None if it never ran, unless it was refused after a while, or at its deadline."""
    if each.total_s is None or each.prompt_tokens is None:
        return None
    arrival = each.ended - each.total_s
    held, late = each.hold_updates, each.finish_reason == FinishReason.LATE.value
    if each.prefill_s is None and (late or each.finish_reason == FinishReason.SHED.value):
        about = tenant, 0, each.priority, each.background, False, None, None, each.ended, each.max_tokens
        return SeenRequest(arrival, each.prompt_tokens, 0, *about, True, held, each.timeout, late)
    if each.prefill_s is None:
        return None
    scheduled = arrival + (each.queued_s or 0.0)
    return SeenRequest(
        arrival,
        each.prompt_tokens,
        each.tokens or 0,
        tenant,
        each.cached_tokens or 0,
        each.priority,
        each.background,
        each.finish_reason in ANSWERED and not each.background,
        scheduled,
        scheduled + each.prefill_s,
        each.ended,
        each.max_tokens,
        hold_updates=held,
        timeout=each.timeout,
        late=late,
    )


def _seen_items(each: EndedRequest, tenant: int) -> SeenRequest | None:
    """A request for items that ended; None if it had no answer, unless it was refused, or at its deadline."""
    late, shed = (each.finish_reason == reason.value for reason in (FinishReason.LATE, FinishReason.SHED))
    answered = each.run_s is not None
    if each.total_s is None or each.size is None or not (answered or late or shed):
        return None
    return SeenRequest(
        each.ended - each.total_s,
        max(round(each.size), 1),
        each.count,
        tenant,
        priority=each.priority,
        background=each.background,
        answered=answered and not each.background,
        scheduled=None if each.run_s is None else each.ended - each.run_s,
        first=each.ended if answered else None,
        ended=each.ended,
        refused=not answered,
        timeout=each.timeout,
        late=late,
    )


def _refused(refused: Iterable[RefusedRequest], numbers: _Numbers) -> Iterator[_Kept]:
    """Those for which there was no room, or no time, when they came."""
    for each in refused:
        about = numbers[each.owner], 0, each.priority, each.background, False, None, None, each.arrival, each.max_tokens
        seen = SeenRequest(each.arrival, each.size, each.items, *about, True, each.hold_updates, each.timeout)
        yield _Kept("", seen)


def _live(service: SequenceService | ItemService, numbers: _Numbers) -> Iterator[_Kept]:
    """Those that have not ended."""
    if isinstance(service, ItemService):
        for item in islice(service.dispatcher.items_of(None), _MOST_REQUESTS):
            yield _Kept(item.id, _seen_item(item))
        return
    for name, line in service.log.live.items():
        for sample in islice(line.values(), _MOST_REQUESTS):
            yield _Kept(sample.stream.request.id, _seen_live(sample, numbers[name]))


def _seen_item(item: Item) -> SeenRequest:
    return SeenRequest(
        item.arrival,
        max(round(item.size), 1),
        1,
        priority=item.priority,
        background=item.background,
        timeout=None if item.deadline is None else item.deadline - item.arrival,
    )


def _seen_live(sample: Sample, tenant: int) -> SeenRequest:
    stream, request, began = sample.stream, sample.stream.request, sample.stream.beginning
    return SeenRequest(
        request.arrival,
        len(request.prompt_ids),
        sample.num_tokens,
        tenant,
        began.num_cached_tokens if began else 0,
        request.priority,
        request.background,
        scheduled=began.scheduled if began else (stream.running_since or None),
        first=began.first_token if began else None,
        most=request.max_tokens,
        hold_updates=request.hold_updates,
        timeout=sample.timeout,
    )


def _question(
    past: Past, window: _Window, changes: list[Change], target: int | None
) -> SequenceQuestion | ItemQuestion:
    asked: dict[str, Any] = {
        "requests": window.requests,
        "changes": changes,
        "since": window.since,
        "target": target,
    }
    if isinstance(past.of, ItemQuestion):
        return msgspec.structs.replace(past.of, calls=_calls(past.steps, window.kept, past.of.limits), **asked)
    steps = [
        SeenStep(step.ended, step.seconds, step.requests, step.tokens, step.running, step.kv_blocks_used)
        for step in _last(past.steps, window.kept)
    ]
    _check_samples(steps, "steps")
    return msgspec.structs.replace(past.of, steps=steps, **asked)


def _last(steps: Sequence[Any], kept: Sequence[_Kept]) -> list[Any]:
    """The steps while these requests were there, or where too few of them are known any more, the last ones at all."""
    begin = kept[0].seen.arrival if kept else 0.0
    end = max((each.seen.ended for each in kept if each.seen.ended is not None), default=begin)
    while_there = (step for step in reversed(steps) if begin <= step.ended <= end)
    found = list(islice(while_there, _MOST_STEPS))
    if len(found) < LEAST_SAMPLES:
        found = list(islice(reversed(steps), _MOST_STEPS))
    return found[::-1]


def _calls(calls: Sequence[RecentCall], kept: Sequence[_Kept], limits: BatchLimits) -> list[CallSample]:
    """The last calls that succeeded, in the order in which they began."""
    at_once = not limits.max_wait and limits.target_latency is None
    found = seen_calls(calls, kept[0].seen.arrival if kept else 0.0, at_once)[-_MOST_STEPS:]
    _check_samples(found, "calls")
    return found


def _of_sequences(service: SequenceService, config: SequenceConfig) -> SequenceQuestion:
    """What a question about a language model says of it, before there is any traffic."""
    info = service.client.info
    if info is None:
        raise _too_little(f"`{service.name}` has not been loaded")
    profile = SequenceProfile(
        model="",
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        cost=Coefficients(0.0, 0.0, 0.0, 0.0),
        steps=[],
        num_snapshots=info.num_snapshots,
        experts=info.experts,
    )
    stats = service.client.stats
    return SequenceQuestion(
        requests=[],
        changes=[],
        since=0.0,
        config=config,
        profile=profile,
        loaded_slots=service.client.configured.slots,
        max_waiting=service.config.max_waiting,
        steps=[],
        cost=stats.coefficients if info.experts is None else stats.all_weights,
    )


def _of_items(dispatcher: Dispatcher, info: ItemInfo, limits: BatchLimits) -> ItemQuestion:
    """What a question about another model says of it, before there is any traffic."""
    return ItemQuestion(
        requests=[],
        changes=[],
        since=0.0,
        limits=limits,
        instances=len(dispatcher.executors),
        ahead=dispatcher.sends_ahead,
        sized=info.task in TEXT_TASKS,
        calls=[],
    )


def _check_samples(samples: Sequence[Any], what: str) -> None:
    if len(samples) < LEAST_SAMPLES:
        raise _too_little(f"{len(samples)} {what} are known, and to say anything takes {LEAST_SAMPLES}")

"""What a running server saw, as the simulator takes it: requests and steps as they were kept, made a trace and samples.

Moments are seconds of one monotonic clock.
"""

import random
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated

import msgspec

from chairlift.core.cost import Coefficients
from chairlift.plan.machine_profile import CallSample, FrontCost, ItemProfile, SequenceProfile, StepSample
from chairlift.plan.resampler import fit_calls, fit_steps, thinned
from chairlift.plan.trace import TraceRequest, with_answers

# A profile holds so many steps or calls, which is enough to draw from.
_MOST_SAMPLES = 4000
# A request is told to have ended somewhat after the step that it ended in.
_LATE_S = 5e-4
# A message to the worker takes as long as the quickest request waited, and no longer than this.
_MOST_HOP_S = 1e-3


class SeenRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request that came: tokens of its prompt and its answer, or the size and the number of its items.

    `cached` of its prompt were found in the prefix cache. Of one that is under way `ended` is None; `answered` is one
    that came to its own end. `most` are the tokens that it may have, if it can end before. One that was `refused` has
    size 0 where nobody had read its prompt yet. With `hold_updates` nobody reads its tokens as they come. `timeout` are
    the seconds after it came that it was given, and one that was given up at its deadline is `late`.
    """

    arrival: float
    size: int
    outputs: int
    tenant: int = 0
    cached: int = 0
    priority: int = 0
    background: bool = False
    answered: bool = False
    scheduled: float | None = None
    first: float | None = None
    ended: float | None = None
    most: int | None = None
    refused: bool = False
    hold_updates: bool = False
    timeout: float | None = None
    late: bool = False


class SeenStep(msgspec.Struct, array_like=True, frozen=True):
    """A step that was over at `ended`; `running` were left after it, with so many KV blocks."""

    ended: float
    seconds: float
    requests: int
    tokens: int
    running: int
    kv_blocks: int


class SeenSequences(msgspec.Struct, kw_only=True, tag="sequences"):
    """What came lately to a language model, in order of arrival, and its steps meanwhile.

    `profile` tells its memory, and has no steps of its own; `cost` is what the worker has learned.
    """

    requests: list[SeenRequest]
    profile: SequenceProfile
    steps: list[SeenStep]
    cost: Coefficients | None = None


class SeenItems(msgspec.Struct, kw_only=True, tag="items"):
    """What came lately to a model that answers in one call, in order of arrival; its calls; `sized` as elsewhere."""

    requests: list[SeenRequest]
    calls: list[CallSample]
    sized: bool


_Counted = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class AllArrivals(msgspec.Struct, frozen=True):
    """So many requests came within some whole seconds, of which so many are `listed` one by one."""

    requests: _Counted
    listed: _Counted
    seconds: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class _Presence:
    """A request among those of the steps, and how many of its tokens are in the KV cache."""

    def __init__(self, request: SeenRequest, start: float) -> None:
        self.request = request
        self.computed = request.cached
        first = request.first
        if first is not None and first <= start:
            # It began before anything is known of steps: as far as its time has come.
            whole = (request.ended or start) - first
            share = min((start - first) / whole, 1.0) if whole > 0 else 1.0
            self.computed = request.size + int(share * request.outputs)

    def left(self, start: float) -> bool:
        """Whether it has left before a step that began then."""
        ended = self.request.ended
        return ended is not None and ended <= start + _LATE_S

    def reads(self, start: float) -> bool:
        """Whether some of its prompt is yet to be computed in a step that begins then."""
        return self.computed < self.request.size and (self.request.first is None or self.request.first > start)


def seen_front(requests: Sequence[SeenRequest]) -> FrontCost:
    """Return what the front takes beside recorded steps and calls, which have its work in them: a message's way."""
    waits = [each.scheduled - each.arrival for each in requests if each.scheduled is not None]
    return FrontCost(hop=min(max(min(waits, default=0.0), 0.0), _MOST_HOP_S))


def quiet_moment(requests: Sequence[SeenRequest], latest: float) -> float:
    """Return the last moment up to `latest` at which nobody live of these waited for a turn; before the first none did.

    A simulation that begins in the middle of a queue has to begin without it, and so finds too short a wait.
    """
    moment = latest
    for each in sorted(requests, key=attrgetter("arrival"), reverse=True):
        until = each.ended if each.scheduled is None else each.scheduled
        waited = until is None or until > moment
        # What runs in the background waits for as long as others leave no room, and is in nobody's way.
        if each.arrival < moment and waited and not each.background:
            moment = each.arrival
    return moment


def step_samples(steps: Sequence[SeenStep], requests: Sequence[SeenRequest], block_size: int) -> list[StepSample]:
    """Return what each step held, from those who ran meanwhile.

    The worker tells how many requests and tokens a step had, and not how long their contexts were: these follow from
    when each began. Where nobody is known who was in it, they follow from the KV blocks.
    """
    first = min((each.arrival for each in requests), default=None)
    coming = deque(sorted((each for each in requests if each.scheduled is not None), key=_scheduled))
    here: list[_Presence] = []
    samples: list[StepSample] = []
    for index, step in enumerate(steps):
        start = step.ended - step.seconds
        while coming and _scheduled(coming[0]) <= start + _LATE_S:
            here.append(_Presence(coming.popleft(), start if not samples else -1.0))
        here = [each for each in here if not each.left(start)]
        if len(here) > step.requests:
            here.sort(key=lambda each: each.request.ended or start + 1e9)
            del here[: len(here) - step.requests]
        read, pairs = _holds(here, step, start)
        if not here:
            read = pairs = step.kv_blocks * block_size
        elif len(here) < step.requests:
            read, pairs = read * step.requests // len(here), pairs * step.requests // len(here)
        gap = _gap(step, steps[index + 1], here) if index + 1 < len(steps) else None
        read = max(read, step.tokens)
        began = None if first is None else start - first
        samples.append(StepSample(step.requests, step.tokens, read, max(pairs, read), step.seconds, gap, began))
    return samples


def _gap(step: SeenStep, after: SeenStep, here: Sequence[_Presence]) -> float | None:
    """Seconds between two steps; None if nobody was left who could have been in the second, as after a client left."""
    start = after.ended - after.seconds
    if not step.running or (here and all(each.left(start) for each in here)):
        return None
    return max(start - step.ended, 0.0)


def _scheduled(request: SeenRequest) -> float:
    return request.scheduled or 0.0


def _holds(here: list[_Presence], step: SeenStep, start: float) -> tuple[int, int]:
    """The KV tokens that a step reads and its pairs of query and key; whoever is in it is further after it."""
    reading = [each for each in here if each.reads(start)]
    left = step.tokens - (len(here) - len(reading))
    read = pairs = 0
    for each in here:
        given = 1
        if each in reading:
            given = max(min(left, each.request.size - each.computed), 0)
            left -= given
        read += each.computed + given
        pairs += given * each.computed + given * (given + 1) // 2
        each.computed += given
    return read, pairs


def sequence_profile(
    steps: Sequence[SeenStep],
    requests: Sequence[SeenRequest],
    cost: Coefficients | None,
    bare: SequenceProfile,
) -> SequenceProfile:
    """Return the profile of a language model that has run: a bare one with steps, and with what they cost.

    That is what the worker has learned, if it has, or else what fits these steps.
    """
    samples = step_samples(steps, requests, bare.block_size)
    profile = thinned(msgspec.structs.replace(bare, steps=samples), _MOST_SAMPLES)
    return msgspec.structs.replace(profile, cost=cost or fit_steps(profile.steps, bare.experts))


def item_profile(model: str, calls: Sequence[CallSample]) -> ItemProfile:
    """Return the profile of a model that answers in one call."""
    call, size = fit_calls(calls)
    return thinned(ItemProfile(model=model, call=call, size=size, calls=list(calls)), _MOST_SAMPLES)


def sequence_trace(requests: Sequence[SeenRequest], block_size: int, most: int, seed: int = 0) -> list[TraceRequest]:
    """Return the trace of sequences that came in this order; the first comes at 0.

    What was found in the prefix cache is a beginning that all of a tenant's have in common. One that is under way gets
    the length of somebody else's answer, if that is longer than what it has, and one that was refused that of its
    answer, and perhaps its prompt; one that was given up at its deadline had more to say than it did. None has more
    than fits in `most` tokens.
    """
    begin, rng = requests[0].arrival, random.Random(f"{seed} prompts")
    sizes = [each.size for each in requests if each.size] or [1]
    trace = [
        TraceRequest(
            arrival=each.arrival - begin,
            input_length=each.size or rng.choice(sizes),
            output_length=max(each.outputs, 1) if _is_whole(each) else 0,
            max_tokens=each.most,
            hash_ids=tuple(range(each.cached // block_size)),
            block_size=block_size,
            tenant=str(each.tenant),
            priority=each.priority,
            background=each.background,
            timeout=each.timeout,
            hold_updates=each.hold_updates,
        )
        for each in requests
    ]
    drawn = with_answers(trace, seed)
    for index, each in enumerate(requests):
        length = max(drawn[index].output_length, each.outputs + each.late, 1)
        length = max(min(length, most - drawn[index].input_length), 1)
        most_tokens = None if each.most is None else max(each.most, length)
        drawn[index] = msgspec.structs.replace(drawn[index], output_length=length, max_tokens=most_tokens)
    return drawn


def _is_whole(request: SeenRequest) -> bool:
    """Whether the answer that is known of a request is all that it was to have."""
    return request.ended is not None and not request.refused and not request.late


def item_trace(requests: Sequence[SeenRequest], sized: bool) -> list[TraceRequest]:
    """Return the trace of requests for items, each of the mean size of its request; the first comes at 0."""
    begin = requests[0].arrival
    return [
        TraceRequest(
            arrival=each.arrival - begin,
            input_length=max(round(each.size / max(each.outputs, 1)), 1) if sized else 1,
            items=max(each.outputs, 1),
            tenant=str(each.tenant),
            priority=each.priority,
            background=each.background,
            timeout=each.timeout,
        )
        for each in requests
    ]

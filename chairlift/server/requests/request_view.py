"""A request as it is told: where it is and why, what is expected, and once it has ended, what took how long."""

import time
from collections.abc import Container
from typing import Literal

import msgspec

from chairlift.core.decision import Reason
from chairlift.core.sequences.overload import Foreseen, ForeseenMoment
from chairlift.server.models.request_log import PART_ID, EndedRequest, request_of

# Of one's own requests that are ahead, so many are named.
MOST_NAMED = 16
# So many of a viewer's own are looked for among those that are ahead of another.
MOST_OWN = 256


class MomentView(msgspec.Struct):
    """When something is expected, in seconds from now: in 9 of 10 cases from `early_s` to `late_s`, where known."""

    in_s: float
    early_s: float | None
    late_s: float | None


class PredictedView(msgspec.Struct):
    """What is expected of a request; null where nothing is known."""

    start: MomentView | None
    first_token: MomentView | None
    end: MomentView | None


class AheadView(msgspec.Struct):
    """Who goes before a request: `own` are the tenant's other ones, the next first, `others` is how many more.

    `more_urgent` counts those whose priority is why; the rest came earlier, or is smaller where that counts. It is
    null where that is not known.
    """

    count: int
    own: list[str]
    others: int
    more_urgent: int | None


class PhasesView(msgspec.Struct, omit_defaults=True):
    """Seconds of each phase, so far or in the end: of a sequence's, or of an item's, which waits and runs."""

    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    run_s: float | None = None
    total_s: float | None = None

    def rounded(self) -> "PhasesView":
        """The same, to a tenth of a millisecond."""
        times = (self.queued_s, self.prefill_s, self.decode_s, self.run_s, self.total_s)
        return PhasesView(*(None if each is None else round(each, 4) for each in times))


class HintView(msgspec.Struct):
    """What would have made a request faster, by up to so many seconds, and the setting that it takes, if any."""

    setting: str | None
    seconds: float | None
    text: str


class ChangeView(msgspec.Struct):
    """A change under which the twin is done with a request sooner: in `total_s`, which saves this share of the time.

    `setting` and `value` are what to set, null where it is no setting.
    """

    change: str
    setting: str | None
    value: float | int | str | None
    first_token_s: float | None
    total_s: float
    saves: float


class WhatIfView(msgspec.Struct):
    """What the twin makes of a request: as it was, and which changes would have made it faster, the best first.

    `measured_s` and `predicted_s` are what it took, and what the twin takes for it as it was. There was no time for
    what is `untried`. `text` says all of it in words.
    """

    measured_s: float
    predicted_s: float | None
    changes: list[ChangeView]
    untried: list[str]
    text: str


class RequestView(msgspec.Struct, kw_only=True):
    """One sequence, or one item, or the items of a request that has ended. What does not apply is null."""

    id: str
    request: str
    model: str
    kind: Literal["sequence", "item"]
    state: str
    why: str
    reason: str | None = None
    detail: str | None = None
    finish_reason: str | None = None
    background: bool = False
    priority: int = 0
    created: float | None = None
    position: int | None = None
    ahead: AheadView | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    predicted: PredictedView | None = None
    phases: PhasesView
    steps: int | None = None
    mean_batch: float | None = None
    preemptions: int | None = None
    items: int | None = None
    hints: list[HintView] = []
    what_if: WhatIfView | None = None


WHY_WAITING: dict[str, str] = {
    Reason.SLOTS: "every place to run is taken, and it gets one when another request ends",
    Reason.TOKENS: "a step computes only so many tokens, and those before it take all of them",
    Reason.ITL: "a step has no time for another prompt, lest those that are being answered slow down",
    Reason.BLOCKS: "the KV cache has no room for its prompt; some comes free when another request ends",
    Reason.WINDOW: "it waits a moment for others to be computed with",
    Reason.BATCH: "it waits for enough others to be computed with",
    Reason.LIVE: "it is in the background, and gives way to requests that somebody waits for",
}


def without_others(text: str, own: Container[str]) -> str:
    """A decision's words without the ids of requests that are not the reader's own."""
    return PART_ID.sub(lambda found: found[0] if found[0] in own else "another request", text)


def created_at(arrival: float, now: float) -> float:
    """A moment of CLOCK_MONOTONIC in seconds since 1970."""
    return round(time.time() - (now - arrival), 3)


def predicted(foreseen: Foreseen | None, now: float) -> PredictedView | None:
    """What was foreseen, in seconds from now."""
    if foreseen is None:
        return None
    return PredictedView(*(_moment(each, now) for each in foreseen))


def _moment(moment: ForeseenMoment | None, now: float) -> MomentView | None:
    if moment is None:
        return None
    early, late = (None if each is None else _until(each, now) for each in (moment.early, moment.late))
    return MomentView(_until(moment.expected, now), early, late)


def _until(moment: float, now: float) -> float:
    return round(max(moment - now, 0.0), 4)


def ended_view(ended: EndedRequest, model: str, kind: Literal["sequence", "item"], show_cached: bool) -> RequestView:
    """A request that has ended."""
    now = time.monotonic()
    return RequestView(
        id=ended.id,
        request=request_of(ended.id),
        model=model,
        kind=kind,
        state="ended",
        why=_END.get(ended.finish_reason, "it has ended"),
        finish_reason=ended.finish_reason,
        background=ended.background,
        priority=ended.priority,
        created=None if ended.total_s is None else created_at(ended.ended - ended.total_s, now),
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens if show_cached else None,
        tokens=ended.tokens,
        phases=PhasesView(ended.queued_s, ended.prefill_s, ended.decode_s, ended.run_s, ended.total_s).rounded(),
        steps=ended.steps,
        mean_batch=None if ended.mean_batch is None else round(ended.mean_batch, 2),
        preemptions=ended.preemptions,
        items=ended.count if kind == "item" else None,
    )


_END = {
    "stop": "the model came to an end, or to a stop string",
    "length": "it had all the tokens that it might have (max_tokens, or what the model has room for)",
    "done": "it was answered",
    "shed": "it was given up, since it would have been too late under this load",
    "late": "its time was over before it was answered",
    "abort": "its client left, or wanted no more of it",
    "error": "it failed",
    "invalid": "what it asked for can't be served",
}

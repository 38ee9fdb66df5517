"""Where requests are in a scheduler of sequences, for a person who asks."""

import enum
from bisect import bisect_left, insort
from collections.abc import Container

import msgspec

from chairlift.core.decision import Reason
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.sequence import Sequence


class SequenceState(enum.StrEnum):
    """What a request does at the moment. A `preempted` one waits again; a `paused` one keeps its place meanwhile."""

    PREPARING = "preparing_grammar"
    WAITING = "waiting"
    PREEMPTED = "preempted"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PAUSED = "paused"


class Standing(msgspec.Struct, array_like=True):
    """Where a request is, and why: as `SequenceScheduler.explain` says it, where it gets nothing.

    `ahead` counts those of its queue that are before it, `more_urgent` those of them with a lower priority number.
    `computed` are tokens of what it knows that lie in the KV cache, `tokens` are those it has generated; `started` is
    when it first ran, on the scheduler's clock.
    """

    id: str
    state: SequenceState
    ahead: int = 0
    more_urgent: int = 0
    tokens: int = 0
    computed: int = 0
    reason: Reason | None = None
    detail: str = ""
    started: float | None = None


def standings(scheduler: SequenceScheduler, wanted: Container[str]) -> list[Standing]:
    """Say where those of the wanted requests are that are here, in O(n log n) for n that wait."""
    background = scheduler.background
    found: list[Standing] = []
    for line in ([*scheduler.admitted, *scheduler.waiting.in_order()], background.waiting.in_order()):
        priorities: list[int] = []
        for ahead, sequence in enumerate(line):
            priority = sequence.request.priority
            if sequence.id in wanted:
                found.append(_waiting(scheduler, sequence, ahead, bisect_left(priorities, priority)))
            insort(priorities, priority)
    running = (sequence for sequence in (*scheduler.running, *background.running) if sequence.id in wanted)
    return found + [_running(scheduler, sequence) for sequence in running]


def _waiting(scheduler: SequenceScheduler, sequence: Sequence, ahead: int, more_urgent: int) -> Standing:
    state = SequenceState.WAITING if sequence.started is None else SequenceState.PREEMPTED
    tokens = len(sequence.token_ids) - len(sequence.request.prompt_ids)
    made = Standing(sequence.id, state, ahead, more_urgent, tokens, started=sequence.started)
    decided = scheduler.background.decision if sequence.request.background else scheduler.waiting_decision
    decision = scheduler.explain(sequence.id)
    if decided is not None and decision is not None:
        made.reason, made.detail = decision.reason, decision.detail
    return made


def _running(scheduler: SequenceScheduler, sequence: Sequence) -> Standing:
    made = Standing(
        sequence.id,
        SequenceState.PREFILLING if sequence.reads_prompt else SequenceState.RUNNING,
        tokens=len(sequence.token_ids) - len(sequence.request.prompt_ids),
        computed=sequence.num_computed_tokens,
        started=sequence.started,
    )
    decision = scheduler.explain(sequence.id)
    if decision is not None and decision.reason is not Reason.ADMITTED:
        made.state, made.reason, made.detail = SequenceState.PAUSED, decision.reason, decision.detail
    return made

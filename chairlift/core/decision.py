"""Every decision has a reason that a person can read."""

import enum

import msgspec


class Reason(enum.StrEnum):
    """The reason inside a `Decision`."""

    ADMITTED = "admitted"
    RESUMED = "resumed"
    PREEMPTED = "preempted"
    SLOTS = "waiting_for_slots"
    TOKENS = "waiting_for_tokens"
    ITL = "waiting_for_itl"
    BLOCKS = "waiting_for_blocks"
    WINDOW = "waiting_for_window"
    BATCH = "waiting_for_batch"
    LIVE = "waiting_for_live"


class Decision(msgspec.Struct, frozen=True):
    """One decision and its reason. A waiting one names the head of the queue and speaks for all `count` that wait.

    Background requests have one of their own, which speaks for those that run and get no tokens, too.
    """

    reason: Reason
    request_id: str
    detail: str
    count: int = 1

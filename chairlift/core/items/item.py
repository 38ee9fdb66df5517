"""An item of work that ends in one call, the batch that carries it, and what became of it."""

import enum
from collections.abc import Hashable

import msgspec

from chairlift.core.decision import Decision


class Item(msgspec.Struct, kw_only=True, eq=False):
    """One request to a model that answers in one call. Its payload stays with the engine.

    `size` is what a batch's time follows from: tokens, pixels, or 1 where all items take as long. Only items of equal
    `shape_key` share a batch; ragged runners give all the same. `arrival` and `deadline` are seconds on the clock that
    `schedule(now)` is given. `priority` 0 is the default, lower is sooner. `attempts` counts the calls that it was in
    and that did not give it an answer. A `background` item runs only while no live one waits; its priority counts among
    its like. `request` is the same for items that came in one, of which one that fails is an answer to all; None where
    the item is all there is.
    """

    id: str
    arrival: float
    size: float = 1.0
    shape_key: Hashable = None
    priority: int = 0
    deadline: float | None = None
    attempts: int = 0
    background: bool = False
    request: str | None = None


class Batch(msgspec.Struct, kw_only=True, eq=False):
    """Items that are computed in one call of one instance; `predicted` seconds is how long that should take.

    `reason` says why it leaves now. `size` is the sum of its items' sizes, and `computed` what the runner makes of it:
    the same, or where it pads, the longest times their number. `started` is when it left, or where it was sent `ahead`,
    when the batch before it ends: as predicted, and later as it was. `due` is when its answers were promised.
    """

    id: int
    instance: int
    items: list[Item]
    size: float
    computed: float
    predicted: float
    started: float
    reason: Decision
    ahead: bool = False
    due: float = 0.0


class Failure(enum.StrEnum):
    """How a call failed as a whole."""

    RAISED = "raised"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    DIED = "died"
    UNTRIED = "untried"  # it was sent ahead, and its instance was gone before it began


class BatchResult(msgspec.Struct, kw_only=True):
    """What a call came to: the seconds it took, and if it failed as a whole, how, and the error's text.

    `errors` has, by item id, the text for those items alone that failed in a call that went well. Since the one before
    it the instance had nothing to do for `idle` seconds, and other things to do for so many, the `gap`.
    """

    seconds: float
    failure: Failure | None = None
    detail: str = ""
    errors: dict[str, str] = {}
    idle: float | None = None
    gap: float | None = None

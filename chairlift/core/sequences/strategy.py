"""The batching strategies: a strategy is one class here and one row in `STRATEGIES`, and nothing elsewhere names it."""

from typing import ClassVar, NamedTuple, Protocol

from chairlift.core.decision import Reason


class Admission(NamedTuple):
    """How many may be admitted now; if none, the reason, and when (on the scheduler's clock) to ask again."""

    slots: int
    reason: Reason = Reason.SLOTS
    detail: str = ""
    ask_again: float | None = None


class WaitingView(Protocol):
    """What a strategy may look at: how many wait, since when, and whether nobody else will come."""

    closed: bool

    def __len__(self) -> int: ...

    def oldest_arrival(self) -> float | None:
        """Return the earliest arrival of those waiting."""
        ...


class Strategy:
    """When waiting sequences are admitted, and how many run at once: `slots`. `max_wait` is in seconds.

    A class says in a few words `about` when it admits. Of the settings of a model, `slots_setting` has the number of
    slots (None: there is one), and `settings` are others that have an effect; a setting that any strategy names has
    none under those that do not name it. Where `closes_batch`, those who are admitted together stay together: nobody
    else is until the last of them has finished.
    """

    about: ClassVar[str]
    slots_setting: ClassVar[str | None] = None
    settings: ClassVar[tuple[str, ...]] = ()
    closes_batch: ClassVar[bool] = False

    def __init__(self, slots: int, max_wait: float = 0.0) -> None:
        self.slots = slots
        self.max_wait = max_wait

    def admit(self, waiting: WaitingView, running: int, now: float) -> Admission:
        """Decide for this moment; `running` counts the slots taken."""
        raise NotImplementedError


class NoBatching(Strategy):
    """One rider at a time."""

    about = "one request at a time"
    settings = ("target_ttft_ms",)

    def admit(self, waiting: WaitingView, running: int, now: float) -> Admission:
        """Give the only slot, if it is free."""
        return Admission(1 - running, detail="one request at a time, and one is running")


class Static(Strategy):
    """The cable car: leaves when every seat is taken, or when the line has closed."""

    about = "a full batch at a time, however long that takes to come together"
    slots_setting = "batch_size"
    closes_batch = True

    def admit(self, waiting: WaitingView, running: int, now: float) -> Admission:
        """Fill an empty batch all at once."""
        if running:
            return Admission(0, detail=f"the batch of {running} still running is closed")
        if len(waiting) >= self.slots or waiting.closed:
            return Admission(self.slots)
        return Admission(0, Reason.BATCH, f"{len(waiting)} of {self.slots} requests have come")


class Dynamic(Strategy):
    """The gondola: leaves when it is full, or when its oldest rider has waited `max_wait` seconds.

    Membership is bound when the car is free, never before (late binding), so the window may long have passed by then.
    """

    about = "a batch at a time, once it is full or its oldest has waited long enough"
    slots_setting = "batch_size"
    settings = ("max_wait_ms",)
    closes_batch = True

    def admit(self, waiting: WaitingView, running: int, now: float) -> Admission:
        """Fill an empty batch when it is time."""
        if running:
            return Admission(0, detail=f"the batch of {running} still running is closed")
        oldest = waiting.oldest_arrival()
        if oldest is None:
            return Admission(0, Reason.WINDOW, "nobody waits")
        leaves = oldest + self.max_wait
        if len(waiting) >= self.slots or waiting.closed or now >= leaves:
            return Admission(self.slots)
        detail = f"{len(waiting)} of {self.slots} requests have come in a window of {self.max_wait:g} s"
        return Admission(0, Reason.WINDOW, detail, ask_again=leaves)


class Continuous(Strategy):
    """The chairlift: never stops; riders get on and off at every chair."""

    about = "at any step, whenever a slot is free"
    slots_setting = "max_num_seqs"
    settings = ("step_time_ms", "target_itl_ms", "target_ttft_ms")

    def admit(self, waiting: WaitingView, running: int, now: float) -> Admission:
        """Give every free slot."""
        return Admission(self.slots - running, detail=f"all {self.slots} slots are taken")


STRATEGIES: dict[str, type[Strategy]] = {
    "none": NoBatching,
    "static": Static,
    "dynamic": Dynamic,
    "continuous": Continuous,
}


def make_strategy(name: str, slots: int, max_wait: float) -> Strategy:
    """Return the strategy of a name; `max_wait` in seconds. Raises ValueError naming the known strategies."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    strategy = STRATEGIES[name]
    return strategy(slots if strategy.slots_setting else 1, max_wait)


def readers_of(setting: str) -> list[str]:
    """Return the strategies under which a setting has an effect; none if that does not depend on the strategy."""
    return [name for name, strategy in STRATEGIES.items() if setting in (strategy.slots_setting, *strategy.settings)]

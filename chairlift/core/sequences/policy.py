"""The four boarding rules. A strategy is one class here and one row in `POLICIES`."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from chairlift.core.decision import Reason


class Admission(NamedTuple):
    """How many may board now; if none, why not, and when (on the scheduler's clock) asking again makes sense."""

    seats: int
    why: Reason = Reason.SEATS
    detail: str = ""
    ask_again: float | None = None


class WaitingView(Protocol):
    """What a policy may look at: how many wait, since when, and whether nobody else will come."""

    closed: bool

    def __len__(self) -> int: ...

    def oldest_arrival(self) -> float | None:
        """Return the earliest arrival of those waiting."""
        ...


class Policy(Protocol):
    """When a waiting request may board. `closes_batch`: riders are fixed together and leave together.

    At most `seats` ride at once.
    """

    closes_batch: bool
    seats: int

    def board(self, line: WaitingView, running: int, now: float) -> Admission:
        """Decide for this moment; `running` counts the seats taken."""
        ...


class NoBatching:
    """One rider at a time."""

    closes_batch = False
    seats = 1

    def board(self, line: WaitingView, running: int, now: float) -> Admission:
        """Give the only seat, if it is free."""
        return Admission(1 - running, detail="one request at a time, and one is running")


class Static:
    """The cable car: leaves when every seat is taken, or when the line has closed."""

    closes_batch = True

    def __init__(self, batch_size: int) -> None:
        self.seats = batch_size

    def board(self, line: WaitingView, running: int, now: float) -> Admission:
        """Fill an empty car all at once."""
        if running:
            return Admission(0, detail=f"the batch of {running} still running is closed")
        if len(line) >= self.seats or line.closed:
            return Admission(self.seats)
        return Admission(0, Reason.BATCH, f"{len(line)} of {self.seats} requests have come")


class Dynamic:
    """The gondola: leaves when it is full, or when its oldest rider has waited `max_wait` seconds.

    Membership is bound when the car is free, never before (late binding), so the window may long have passed by then.
    """

    closes_batch = True

    def __init__(self, max_batch_size: int, max_wait: float) -> None:
        self.seats = max_batch_size
        self.max_wait = max_wait

    def board(self, line: WaitingView, running: int, now: float) -> Admission:
        """Fill an empty car when it is time."""
        if running:
            return Admission(0, detail=f"the batch of {running} still running is closed")
        oldest = line.oldest_arrival()
        if oldest is None:
            return Admission(0, Reason.WINDOW, "nobody waits")
        leaves = oldest + self.max_wait
        if len(line) >= self.seats or line.closed or now >= leaves:
            return Admission(self.seats)
        detail = f"{len(line)} of {self.seats} requests have come in a window of {self.max_wait:g} s"
        return Admission(0, Reason.WINDOW, detail, ask_again=leaves)


class Continuous:
    """The chairlift: never stops; riders get on and off at every chair."""

    closes_batch = False

    def __init__(self, max_num_seqs: int) -> None:
        self.seats = max_num_seqs

    def board(self, line: WaitingView, running: int, now: float) -> Admission:
        """Give every free seat."""
        return Admission(self.seats - running, detail=f"all {self.seats} seats are taken")


POLICIES: dict[str, Callable[[int, float], Policy]] = {
    "none": lambda seats, max_wait: NoBatching(),
    "static": lambda seats, max_wait: Static(seats),
    "dynamic": Dynamic,
    "continuous": lambda seats, max_wait: Continuous(seats),
}


def make_policy(strategy: str, seats: int, max_wait: float) -> Policy:
    """Return the policy for a strategy's name; `max_wait` in seconds. Raises ValueError naming the known strategies."""
    if strategy not in POLICIES:
        raise ValueError(f"unknown strategy {strategy!r}: one of {', '.join(POLICIES)}")
    return POLICIES[strategy](seats, max_wait)

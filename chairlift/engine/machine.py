"""The models that share this machine, taking turns on the front's event loop."""

import asyncio
import os
import time
from collections.abc import Callable
from itertools import count

from chairlift.core.items.turns import Turns
from chairlift.core.shares import Shares

_SOON_ASLEEP = {"GOMP_SPINCOUNT": "10000", "OPENBLAS_THREAD_TIMEOUT": "17"}


def soon_asleep() -> dict[str, str]:
    """Variables for workers that share the machine, where the user has set no others.

    After each piece of work OpenMP's threads spin for a millisecond, and those of OpenBLAS for thirty, in case more
    comes: with three models that took a quarter of the cores from whoever had the turn.
    """
    return {name: value for name, value in _SOON_ASLEEP.items() if name not in os.environ}


class Machine:
    """Carries out what `Shares` decides, among the models that have joined.

    One step of a model uses all cores, so two at a time would only stand in each other's way. All methods belong to
    one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.shares = Shares()
        self.clock = clock
        self._members: dict[str, Member] = {}
        self._serial = count()
        self._granting = False

    def join(self, name: str, weight: float, on_turn: Callable[[], None], on_asked: Callable[[bool], None]) -> "Member":
        """Let a model, or one instance of it, take part.

        `on_turn` says that the machine is its own until `release`; `on_asked` that somebody waits for it, so that it
        should be released after the present step, and whether with live work, before which background work is nothing.
        Raises ValueError for a weight that is not positive.
        """
        member = Member(self, f"{name}-{next(self._serial)}", on_turn, on_asked)
        self.shares.join(member.name, weight)
        self._members[member.name] = member
        return member

    def forget(self, member: "Member") -> None:
        """Let a member go."""
        if self._members.pop(member.name, None) is not None:
            self.shares.leave(member.name, self.clock())
            self.grant_soon()

    def call_holder(self) -> None:
        """Tell whoever has the turn that somebody waits."""
        if self.shares.holder is not None:
            self._members[self.shares.holder].on_asked(self.shares.contended_by_live)

    def grant_soon(self) -> None:
        """Give the next turn once all that is being said now has been heard."""
        if not self._granting:
            self._granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        self._granting = False
        name = self.shares.grant(self.clock())
        if name is None:
            return
        self._members[name].on_turn()
        if self.shares.contended:
            self.call_holder()


class Member:
    """One of those who share the machine; made by `Machine.join`, and of no use after `leave`."""

    def __init__(
        self, machine: Machine, name: str, on_turn: Callable[[], None], on_asked: Callable[[bool], None]
    ) -> None:
        self.name = name
        self.on_turn = on_turn
        self.on_asked = on_asked
        self._machine = machine

    def ask(self, background: bool = False) -> None:
        """Want the next turn, if for `background` work only, then when nobody else wants it for live work."""
        machine = self._machine
        machine.shares.ask(self.name, machine.clock(), background)
        if machine.shares.holder is None:
            machine.grant_soon()
        elif machine.shares.holder != self.name:
            machine.call_holder()

    def release(self, again: bool, seconds: float | None = None, background: bool = False) -> None:
        """End the turn; `again` asks for another in the same breath, for `background` work only if so.

        `seconds` is what was used of it, if known.

        Raises ValueError without a turn.
        """
        machine = self._machine
        now = machine.clock()
        machine.shares.release(self.name, now, seconds)
        if again:
            machine.shares.ask(self.name, now, background)
        machine.grant_soon()

    def leave(self) -> None:
        """Take no further part, with the turn or without: the worker is gone. Leaving again does nothing."""
        self._machine.forget(self)


class MachineTurns(Turns):
    """The turns of a model whose batches leave from here; `Dispatcher` asks."""

    def __init__(self, machine: Machine, name: str, weight: float) -> None:
        self._on_turn: Callable[[], None] | None = None
        self._member = member = machine.join(name, weight, self.given, self.others_wait)
        super().__init__(member.ask, lambda again, background: member.release(again, background=background))

    def call(self, on_turn: Callable[[], None]) -> None:
        """Say whom to call when a batch may leave."""
        self._on_turn = on_turn

    def given(self) -> None:
        """Hear that the turn is this model's, and send off what may leave."""
        super().given()
        if self._on_turn is not None:
            self._on_turn()

    def leave(self) -> None:
        """Take part no more."""
        self._member.leave()
        self.left()

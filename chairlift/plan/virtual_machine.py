"""One machine in virtual time: a front with one thread, and models that take turns."""

from collections.abc import Callable
from itertools import count

from chairlift.core.shares import Shares
from chairlift.plan.agenda import Agenda
from chairlift.plan.machine_profile import FrontCost


class VirtualFront:
    """The front's thread: one thing after the other, in the order in which they come."""

    def __init__(self, cost: FrontCost) -> None:
        self.cost = cost
        self.busy = 0.0
        self._free_at = 0.0
        # Seconds of what slows down workers, when the last of it is done, and how much has slowed down somebody.
        self._taken = self._taken_until = self._counted = 0.0

    def work(self, now: float, seconds: float, slows_down: bool = True) -> float:
        """Do what comes now; return when it is done. It `slows_down` workers whose times do not have it in them."""
        self.busy += seconds
        self._free_at = max(self._free_at, now) + seconds
        if slows_down:
            self._taken += seconds
            self._taken_until = self._free_at
        return self._free_at

    def done_by(self, now: float) -> float:
        """Return the seconds of what slows down workers that are done by now."""
        return self._taken - max(self._taken_until - now, 0.0)

    def slowdown(self, now: float, seconds: float) -> float:
        """Return by how much longer a worker takes for so many seconds, by what was done since this was last asked."""
        before, self._counted = self._counted, max(self.done_by(now), self._counted)
        return self.slowed(before, now, seconds)

    def slowed(self, before: float, now: float, seconds: float) -> float:
        """Return by how much longer a worker takes for so many seconds, by what was done since so much was.

        No more than twice as long: with as many others as it has threads it gets every second turn on a core.
        """
        return min(max(self.done_by(now) - before, 0.0) * self.cost.contention, seconds)


class VirtualMachine:
    """A front, and turns among the models that have joined, as `Shares` decides."""

    def __init__(self, agenda: Agenda, cost: FrontCost) -> None:
        self.agenda = agenda
        self.front = VirtualFront(cost)
        self.shares = Shares()
        self._members: dict[str, VirtualMember] = {}
        self._serial = count()
        self._granting = False

    def join(
        self, name: str, weight: float, delay: float, on_turn: Callable[[], None], on_asked: Callable[[bool], None]
    ) -> "VirtualMember":
        """Let a model take part, which hears, and is heard, after a delay in seconds."""
        member = VirtualMember(self, f"{name}-{next(self._serial)}", delay, on_turn, on_asked)
        self.shares.join(member.name, weight)
        self._members[member.name] = member
        return member

    def call_holder(self) -> None:
        """Tell whoever has the turn that somebody waits."""
        holder = self.shares.holder
        if holder is not None:
            member, live = self._members[holder], self.shares.contended_by_live
            self.agenda.at(self.agenda.now + member.delay, lambda: member.on_asked(live))

    def grant_soon(self) -> None:
        """Give the next turn once all that happens at this moment has."""
        if not self._granting:
            self._granting = True
            self.agenda.at(self.agenda.now, self._grant)

    def _grant(self) -> None:
        self._granting = False
        name = self.shares.grant(self.agenda.now)
        if name is None:
            return
        member = self._members[name]
        self.agenda.at(self.agenda.now + member.delay, member.on_turn)
        if self.shares.contended:
            self.call_holder()


class VirtualMember:
    """One of those who share a machine."""

    def __init__(
        self,
        machine: VirtualMachine,
        name: str,
        delay: float,
        on_turn: Callable[[], None],
        on_asked: Callable[[bool], None],
    ) -> None:
        self.name = name
        self.delay = delay
        self.on_turn = on_turn
        self.on_asked = on_asked
        self._machine = machine

    def ask(self, background: bool) -> None:
        """Want the next turn."""
        self._machine.agenda.at(self._machine.agenda.now + self.delay, lambda: self._ask(background))

    def release(self, again: bool, seconds: float | None, background: bool) -> None:
        """End the turn, of which `seconds` were used; `again` asks for another."""
        agenda = self._machine.agenda
        agenda.at(agenda.now + self.delay, lambda: self._release(again, seconds, background))

    def _ask(self, background: bool) -> None:
        machine, now = self._machine, self._machine.agenda.now
        machine.shares.ask(self.name, now, background)
        if machine.shares.holder is None:
            machine.grant_soon()
        elif machine.shares.holder != self.name:
            machine.call_holder()

    def _release(self, again: bool, seconds: float | None, background: bool) -> None:
        machine, now = self._machine, self._machine.agenda.now
        machine.shares.release(self.name, now, seconds)
        if again:
            machine.shares.ask(self.name, now, background)
        machine.grant_soon()

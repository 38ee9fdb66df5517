"""A model of items in virtual time: the production scheduler, a dispatcher's rounds, and recorded times."""

import random
from dataclasses import dataclass
from math import ceil, inf

from chairlift.core.finished import Shed, ShedReason
from chairlift.core.items.item import Batch, BatchResult, Item
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.scheduler import ItemScheduler
from chairlift.plan.machine_profile import ItemProfile
from chairlift.plan.resampler import CallTimes
from chairlift.plan.simulated_run import SimulatedRequest, SimulatedSteps
from chairlift.plan.virtual_machine import VirtualMachine

_TIMER = 1e-3


@dataclass(frozen=True)
class ItemModel:
    """A model of items to simulate: its limits, its instances, what was measured of one, and its weight among others.

    With `ahead` an instance is sent its next batch while it runs, as worker processes are. An item's size is its tokens
    if `sized`, else 1. `times` are those of the profile, where they have been made of it.
    """

    limits: BatchLimits
    profile: ItemProfile
    name: str = ""
    instances: int = 1
    ahead: bool = True
    sized: bool = True
    weight: float = 1.0
    times: CallTimes | None = None


class VirtualItems:
    """One replica of a model of items, with its queue in the front and its instances beside it."""

    def __init__(self, model: ItemModel, machine: VirtualMachine, seed: str, shares_machine: bool) -> None:
        self.steps = SimulatedSteps()
        self.num_unfinished = 0
        self.scheduler = ItemScheduler(model.limits, model.instances, model.ahead)
        self._sized = model.sized
        self._agenda = machine.agenda
        self._front = machine.front
        self._hop = machine.front.cost.hop
        rng = random.Random(seed)
        self._times = CallTimes(model.profile, rng) if model.times is None else model.times.fresh(rng)
        self._parts: dict[str, _Parts] = {}
        # When each instance is done with what it has; it has nothing to do from then on.
        self._free_at = [-inf] * model.instances
        self._num_calls = 0
        self._pump_due = False
        self._moment = inf
        self._turns = _InstanceTurns(self, machine, model.name, model.weight) if shares_machine else None

    # The front

    def arrive(self, life: SimulatedRequest, number: int) -> None:
        """A request reaches the front, which reads it and makes items of it."""
        cost, trace = self._front.cost, life.request
        tokens = max(trace.items, 1) * trace.input_length
        done = self._front.work(self._agenda.now, cost.request + cost.prompt_token * tokens)
        self.num_unfinished += 1
        self._agenda.at(done, lambda: self._submit(life, number))

    def _submit(self, life: SimulatedRequest, number: int) -> None:
        """Queue a request's items, all or none."""
        now, trace = self._agenda.now, life.request
        parts = _Parts(life, {f"{number}-{index}" for index in range(max(trace.items, 1))})
        for name in sorted(parts.names):
            item = Item(
                id=name,
                arrival=now,
                size=float(max(trace.input_length, 1)) if self._sized else 1.0,
                shape_key=trace.shape_key,
                priority=trace.priority,
                deadline=None if trace.timeout is None else now + trace.timeout,
                background=trace.background,
            )
            try:
                self.scheduler.add(item)
            except Shed as shed:
                self._refuse(parts, shed.reason, now)
                break
            except ValueError as error:
                life.refusal = str(error)
                self._refuse(parts, None, now)
                break
            self._parts[name] = parts
        self._pump_soon()

    def _refuse(self, parts: "_Parts", reason: ShedReason | None, now: float) -> None:
        """End a request without an answer; its items that wait or run are wanted no more."""
        self.num_unfinished -= 1
        for name in parts.names:
            if self._parts.pop(name, None) is not None:
                self.scheduler.abort(name)
        if reason is not None:
            parts.life.shed, parts.life.shed_at = reason, now

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._agenda.at(self._agenda.now, self.pump, last=True)

    def pump(self) -> None:
        """Send off whatever the scheduler says, and sleep until it may say otherwise."""
        now, scheduler, turns = self._agenda.now, self.scheduler, self._turns
        self._pump_due = False
        waiting = scheduler.num_waiting, scheduler.num_background_waiting
        if turns is not None and not turns.allow(self._num_calls, *waiting):
            return
        while (batch := scheduler.schedule(now)) is not None:
            self._start(batch, now)
        for end in scheduler.take_dropped():
            parts = self._parts.pop(end.id, None)
            if parts is not None:
                self._refuse(parts, end.shed, now)
        moment = scheduler.ask_again
        if moment is not None and moment < self._moment:
            # Timers of the front's loop count whole milliseconds, and never too few of them.
            self._moment = wakes = now + max(ceil((moment - now) / _TIMER - 1e-6), 1) * _TIMER
            self._agenda.at(wakes, lambda: self._wake(wakes), last=True)
        if turns is not None:
            turns.rest(self._num_calls)

    def close(self) -> None:
        """Nobody else comes: batches leave as they are."""
        self.scheduler.close()
        self._pump_soon()

    def _wake(self, moment: float) -> None:
        if self._moment == moment:
            self._moment = inf
            self.pump()

    # Calls

    def _start(self, batch: Batch, now: float) -> None:
        """Send a batch to its instance, which begins it when it is there, and when the one before is done."""
        self._num_calls += 1
        # One half to send it, and the other to take its results in.
        left = self._front.work(now, self._front.cost.batch / 2)
        there, free = left + self._hop, self._free_at[batch.instance]
        began = max(there, free)
        seconds = self._times.seconds(len(batch.items), batch.computed, began)
        seconds += self._front.slowdown(now, seconds)
        idle = None if free == -inf else began - free
        self._free_at[batch.instance] = began + seconds
        for item in batch.items:
            parts = self._parts.get(item.id)
            if parts is not None and parts.life.scheduled is None:
                parts.life.scheduled = began
        outcome = BatchResult(seconds=seconds, idle=idle)
        self._agenda.at(began + seconds + self._hop, lambda: self._finish(batch, outcome, began), last=True)

    def _finish(self, batch: Batch, outcome: BatchResult, began: float) -> None:
        now, count = self._agenda.now, len(batch.items)
        self._num_calls -= 1
        delivered = self._front.work(now, self._front.cost.item * count + self._front.cost.batch / 2)
        self.steps.note(began, outcome.seconds, count, self.scheduler.num_waiting, batch.computed, 0)
        self.steps.delivered.append(delivered)
        for end in self.scheduler.update(batch, outcome, now):
            parts = self._parts.pop(end.id, None)
            if parts is None:
                continue
            parts.names.discard(end.id)
            life = parts.life
            life.batch_size = max(life.batch_size, count)
            if not parts.names:
                life.first = life.end = delivered
                self.num_unfinished -= 1
        self.pump()


class _Parts:
    """A request and the ids of its items that have no result yet."""

    __slots__ = ("life", "names")

    def __init__(self, life: SimulatedRequest, names: set[str]) -> None:
        self.life = life
        self.names = names


class _InstanceTurns:
    """When a batch may leave, where models take turns; all instances share one."""

    def __init__(self, model: VirtualItems, machine: VirtualMachine, name: str, weight: float) -> None:
        self._model = model
        self._holds = self._others_wait = False
        self._member = machine.join(name, weight, 0.0, self._given, self._others_ask)

    def allow(self, num_running: int, num_waiting: int, num_background: int) -> bool:
        """Return whether a batch may leave now; if not, ask for a turn."""
        waits, background = num_waiting + num_background > 0, not num_waiting
        if self._holds:
            if not self._others_wait:
                return True
            if not num_running:
                self._holds = False
                self._member.release(waits, None, background)
        elif waits:
            self._member.ask(background)
        return False

    def rest(self, num_running: int) -> None:
        """No batch leaves now: if none runs either, give the turn back."""
        if not num_running and self._holds:
            self._holds = False
            self._member.release(False, None, False)

    def _given(self) -> None:
        self._holds, self._others_wait = True, False
        self._model.pump()

    def _others_ask(self, live: bool) -> None:
        self._others_wait = True

"""A model of items in virtual time: the production scheduler, a dispatcher's rounds, and recorded times."""

import random
from collections import deque
from dataclasses import dataclass
from math import ceil, inf

from chairlift.core.finished import Shed, ShedReason
from chairlift.core.items.item import Batch, BatchResult, Item
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.scheduler import ItemScheduler
from chairlift.core.items.turns import Turns
from chairlift.plan.machine_profile import ItemProfile
from chairlift.plan.resampler import CallTimes
from chairlift.plan.simulated_run import SimulatedRequest, SimulatedSteps
from chairlift.plan.trace import TraceRequest
from chairlift.plan.virtual_machine import VirtualMachine

_TIMER = 1e-3
# Calls that have less than this to go are over.
_INSTANT_S = 1e-6


@dataclass(frozen=True)
class ItemModel:
    """A model of items to simulate: its limits, its instances, what was measured of one, and its weight among others.

    With `ahead` an instance is sent its next batch while it runs, as worker processes are. An item's size is its tokens
    if `sized`, else 1. `times` are those of the profile, where they have been made of it. For the first `busy_s`
    seconds instances are at what came before.
    """

    limits: BatchLimits
    profile: ItemProfile
    name: str = ""
    instances: int = 1
    ahead: bool = True
    sized: bool = True
    weight: float = 1.0
    times: CallTimes | None = None
    busy_s: float = 0.0


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
        self._instances = [_Instance() for _ in range(model.instances)]
        self._num_calls = 0
        self._pump_due = False
        self._moment = inf
        self._turns = self._join(machine, model) if shares_machine else None
        if model.busy_s:
            for number in range(model.instances):
                self.scheduler.instance_lost(number)
            self._agenda.at(model.busy_s, self._free)

    def _join(self, machine: VirtualMachine, model: ItemModel) -> Turns:
        """Take turns with the other models."""

        def given() -> None:
            turns.given()
            self.pump()

        member = machine.join(model.name, model.weight, 0.0, given, lambda live: turns.others_wait(live))
        turns = Turns(member.ask, lambda again, background: member.release(again, None, background))
        return turns

    def _free(self) -> None:
        """What came before is done."""
        for number in range(len(self._instances)):
            self.scheduler.instance_back(number)
        self._pump_soon()

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
        life.read = now
        life.deadline = self._deadline(trace, now)
        parts = _Parts(life, {f"{number}-{index}" for index in range(max(trace.items, 1))})
        for name in sorted(parts.names):
            item = Item(
                id=name,
                arrival=now,
                size=float(max(trace.input_length, 1)) if self._sized else 1.0,
                shape_key=trace.shape_key,
                priority=trace.priority,
                deadline=life.deadline,
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
        else:
            if life.deadline is not None:
                self._agenda.at_deadline(life.deadline, lambda: self._expire(parts))
        # While all are busy, only a deadline before the moment that was to come next makes a difference.
        if self.scheduler.has_free or (life.deadline is not None and life.deadline < self._moment):
            self._pump_soon(self._times.hold(now))

    def _deadline(self, trace: TraceRequest, now: float) -> float | None:
        """When a request is given up that is read now. Only live ones get the model's own timeout."""
        timeout = trace.timeout
        if timeout is None and not trace.background:
            timeout = self.scheduler.limits.default_timeout
        return None if timeout is None else now + timeout

    def _expire(self, parts: "_Parts") -> None:
        """Give up a request whose time is over, if its answer is not there. A call that it is in runs to its end."""
        if parts.life.computed is None and parts.life.shed_at is None:
            self._refuse(parts, ShedReason.DEADLINE, self._agenda.now)

    def _refuse(self, parts: "_Parts", reason: ShedReason | None, now: float) -> None:
        """End a request without an answer; its items that wait or run are wanted no more."""
        self.num_unfinished -= 1
        for name in parts.names:
            if self._parts.pop(name, None) is not None:
                self.scheduler.abort(name)
        if reason is not None:
            parts.life.shed, parts.life.shed_at = reason, now

    def _pump_soon(self, hold: float = 0.0) -> None:
        """Ask the scheduler once the front has done what was there before, and after so many seconds more."""
        if not self._pump_due:
            self._pump_due = True
            self._agenda.at(self._front.work(self._agenda.now, 0.0) + hold, self.pump, last=True)

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
            self._pump_soon()

    # Calls

    def _start(self, batch: Batch, now: float) -> None:
        """Send a batch to its instance."""
        self._num_calls += 1
        instance, way = self._instances[batch.instance], self._times.there(len(batch.items), now)
        if way is None:
            # One half to send it, and the other to take its results in.
            there = self._front.work(now, self._front.cost.batch / 2) + self._hop
        else:
            # How long one that was sent ahead was on its way is in the gap before it.
            there = now if batch.ahead else now + way
        instance.sent.append(batch)
        self._agenda.at(there, lambda: self._reached(instance))

    def _reached(self, instance: "_Instance") -> None:
        """A batch is with its instance, which begins it as soon as it is done with those before."""
        instance.here += 1
        self._begin(instance)

    def _begin(self, instance: "_Instance") -> None:
        now = self._agenda.now
        if instance.running is not None or not instance.here:
            return
        ready = instance.free_at + instance.between
        if now < ready:
            self._agenda.at(ready, lambda: self._begin(instance))
            return
        batch = instance.running = instance.sent.popleft()
        instance.here -= 1
        instance.began, instance.front_done = now, self._front.done_by(now)
        instance.alone = self._times.seconds(len(batch.items), batch.computed, now)
        for item in batch.items:
            parts = self._parts.get(item.id)
            if parts is not None and parts.life.scheduled is None:
                parts.life.scheduled = now
        self._agenda.at(now + instance.alone, lambda: self._computed(instance), last=True)

    def _computed(self, instance: "_Instance") -> None:
        """A call would be over by now, but for what the front has done since it began."""
        now, batch, free_at = self._agenda.now, instance.running, instance.free_at
        assert batch is not None
        later = instance.began + instance.alone + self._front.slowed(instance.front_done, now, instance.alone)
        if later > now + _INSTANT_S:
            self._agenda.at(later, lambda: self._computed(instance), last=True)
            return
        seconds = now - instance.began
        idle = None if free_at == -inf else max(instance.began - free_at - instance.between, 0.0)
        outcome = BatchResult(seconds=seconds, idle=idle)
        instance.running, instance.free_at, began = None, now, instance.began
        way = self._times.back(len(batch.items), now)
        if way is None:
            self._agenda.at(now + self._hop, lambda: self._heard(batch, outcome, began), last=True)
        else:
            # What the front had to do first is in it.
            self._agenda.at(now + way, lambda: self._finish(batch, outcome, began), last=True)
        instance.between = self._front.cost.between
        if instance.here:
            gap = self._times.gap(len(instance.sent[0].items), now)
            instance.between = instance.between if gap is None else gap
            self._begin(instance)

    def _heard(self, batch: Batch, outcome: BatchResult, began: float) -> None:
        """The front has the results of a batch before it, after what else it was to do."""
        taken = self._front.work(self._agenda.now, self._front.cost.batch / 2)
        self._agenda.at(taken, lambda: self._finish(batch, outcome, began), last=True)

    def _finish(self, batch: Batch, outcome: BatchResult, began: float) -> None:
        now, count = self._agenda.now, len(batch.items)
        self._num_calls -= 1
        self.steps.note(began, outcome.seconds, count, self.scheduler.num_waiting, batch.computed, 0)
        ended = self.scheduler.update(batch, outcome, now)
        # Whoever waits is sent off before answers are.
        self.pump()
        delivered = self._front.work(self._agenda.now, self._front.cost.item * count)
        self.steps.delivered.append(delivered)
        for end in ended:
            parts = self._parts.pop(end.id, None)
            if parts is None:
                continue
            parts.names.discard(end.id)
            life = parts.life
            life.batch_size = max(life.batch_size, count)
            if not parts.names:
                life.computed = now
                life.first = life.end = delivered
                self.num_unfinished -= 1


class _Instance:
    """One that computes calls, one after the other, in the order in which they are sent.

    Of those sent so many are `here`. The one that runs would take the seconds `alone`, and the front had done so much
    when it began. So many seconds pass `between` the last call and the next, even if that is there.
    """

    __slots__ = ("alone", "began", "between", "free_at", "front_done", "here", "running", "sent")

    def __init__(self) -> None:
        self.sent: deque[Batch] = deque()
        self.here = 0
        self.running: Batch | None = None
        self.began = self.alone = self.front_done = self.between = 0.0
        self.free_at = -inf


class _Parts:
    """A request and the ids of its items that have no result yet."""

    __slots__ = ("life", "names")

    def __init__(self, life: SimulatedRequest, names: set[str]) -> None:
        self.life = life
        self.names = names

"""Makes every call on a scheduler of items, checks all that it answers, and records the calls for a replay."""

import copy
import random
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from chairlift.core.finished import Finished, FinishReason, Shed, ShedReason
from chairlift.core.items.item import Batch, BatchResult, Failure, Item
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.scheduler import ItemScheduler

DEADLY = (Failure.DIED, Failure.TIMED_OUT)


class Setup(NamedTuple):
    """A scheduler's configuration. With `culprits` only batches that hold one of these ids fail: by raising, or dying.

    At most four of them, since with more the model itself is taken to be at fault. Where they die, or in a `crowd` that
    shares large batches, one may be a request with any number of items.
    """

    limits: BatchLimits
    num_instances: int = 1
    culprits: frozenset[str] | None = None
    ahead: bool = False
    deadly: bool = False
    crowd: bool = False

    def blames(self, item: Item) -> bool:
        return self.culprits is not None and not self.culprits.isdisjoint({item.id, item.request})

    def scheduler(self) -> ItemScheduler:
        return ItemScheduler(self.limits, self.num_instances, self.ahead)


class Guest(msgspec.Struct):
    """What the checker knows of an item that has not ended."""

    item: Item
    rank: tuple[float, int]
    state: str = "waiting"
    passed_over: int = 0
    attempts: int = 0
    deadly: bool = False


class World:
    """A scheduler, a clock, and a second opinion about everyone."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.limits = setup.limits
        self.scheduler = setup.scheduler()
        self.now = 0.0
        self.guests: dict[str, Guest] = {}
        self.running: dict[int, Batch] = {}
        self.following: dict[int, Batch] = {}
        self.lost: set[int] = set()
        self.risky: set[int] = set()
        self.added: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []
        self.background_percent = 0
        self._serial = 0

    def add(self, item: Item) -> None:
        self._record("add", item)
        limits = self.limits
        most = limits.max_batch_tokens
        wrong = item.id in self.guests or item.size <= 0 or (most is not None and item.size > most)
        before = self.num_waiting(item.background)
        full = before >= limits.max_waiting
        given = copy.copy(item)
        refusal: Shed | ValueError | None = None
        try:
            self.scheduler.add(given)
        except (Shed, ValueError) as error:
            refusal = error
        assert isinstance(refusal, ValueError) == wrong
        if isinstance(refusal, Shed):
            self.seen[refusal.reason] += 1
            assert (refusal.reason is ShedReason.QUEUE_FULL) == full
            assert refusal.retry_after > 0
            assert refusal.reason is not ShedReason.DEADLINE or given.deadline is not None
            assert not item.background or refusal.reason is ShedReason.QUEUE_FULL
        if refusal is not None:
            assert self.num_waiting(item.background) == before
            self.answers.append(refused(refusal))
            return
        assert not full
        self.answers.append(None)
        self._serial += 1
        moment = item.arrival + item.priority * limits.priority_ageing
        if limits.order == "shortest":
            moment += item.size * limits.order_ageing
        rank = (moment, self._serial)
        self.guests[item.id] = Guest(given, rank)
        self.added[item.id] += 1
        self.check()

    def abort(self, item_id: str) -> None:
        self._record("abort", item_id)
        guest = self.guests.get(item_id)
        known = guest is not None and guest.state != "aborted"
        assert self.scheduler.abort(item_id) is known
        self.answers.append(known)
        if guest is not None and known:
            if guest.state == "running":
                guest.state = "aborted"
            else:
                self._end(item_id)
        self.check()

    def schedule(self) -> Batch | None:
        self._record("schedule", self.now)
        batch = self.scheduler.schedule(self.now)
        dropped, gone = self.scheduler.take_dropped(), []
        for ended in dropped:
            guest = self.guests[ended.id]
            assert ended.reason is FinishReason.SHED
            assert ended.shed is ShedReason.DEADLINE
            assert guest.item.deadline is not None
            assert guest.state != "running"
            self.seen["dropped"] += 1
            gone.append(guest.item)
            self._end(ended.id)
        self.answers.append((told(batch), [msgspec.to_builtins(each) for each in dropped], self.scheduler.ask_again))
        free = [n for n in self.scheduler.instances if n not in self.lost and n not in self.running]
        if batch is None:
            waiting = [guest for guest in self.guests.values() if guest.state in ("waiting", "again")]
            live = [guest for guest in waiting if not guest.item.background]
            assert not (free and any(guest.state == "again" for guest in live))
            assert not (free and waiting and not live), "nobody live waits, and nobody runs"
            if free and waiting:
                assert self.scheduler.ask_again is not None, "nothing would ever wake the engine"
            if self.scheduler.ask_again is not None:
                assert self.scheduler.ask_again > self.now, "the engine would spin"
        elif batch.ahead:
            self._check_ahead(batch, free, gone)
            self.following[batch.instance] = batch
        else:
            assert batch.instance in free
            self._check_batch(batch, gone, self.now)
            self.running[batch.instance] = batch
        self.check()
        return batch

    def _check_ahead(self, batch: Batch, free: list[int], dropped: list[Item]) -> None:
        """It was sent to an instance that runs the last batch it has, and not long before that should end."""
        number = batch.instance
        assert self.setup.ahead
        assert not free, "somebody is free to begin at once"
        assert number not in self.lost
        assert number not in self.risky, "it may never get to it"
        assert number not in self.following
        before = self.running[number]
        starts = max(self.now, before.started + before.predicted)
        assert batch.started == starts
        assert self.now >= starts - self.scheduler.instances[number].lead.seconds - 0.001, "bound too early"
        self._check_batch(batch, dropped, starts)
        self.seen["sent ahead"] += 1

    def _check_batch(self, batch: Batch, dropped: list[Item], starts: float) -> None:
        limits, items = self.limits, batch.items
        guests = [self.guests[item.id] for item in items]
        (background,) = {item.background for item in items}
        states = {guest.state for guest in guests}
        assert len({item.id for item in items}) == len(items) > 0
        assert states in ({"waiting"}, {"again"}), "new work and what is tried again never mix"
        assert len({item.shape_key for item in items}) == 1, "shapes never mix"
        assert len(items) <= limits.max_batch_size
        padded = max(item.size for item in items) * len(items)
        assert abs(batch.size - sum(item.size for item in items)) < 1e-6
        assert abs(batch.computed - (padded if limits.sort_window else batch.size)) < 1e-6
        assert len(items) == 1 or batch.computed <= (limits.max_batch_tokens or float("inf")) + 1e-6
        assert batch.reason.detail
        others = [guest for guest in self.guests.values() if guest.item.background is background]
        if background:
            assert self.num_waiting(background=False) == 0, "background work goes before live"
            self.seen["background"] += 1
            if states == {"waiting"}:
                self._check_background(batch, items)
        if states == {"waiting"}:
            self._check_retries([guest for guest in others if guest.state == "again"], background)
            self._check_order(batch, guests, dropped, starts)
            for item in () if background else items:
                if item.deadline is not None and len(items) > 1:
                    assert starts + batch.predicted <= item.deadline + 1e-6, "a member would be late"
        elif guests[0].deadly:
            assert len({guest.deadly for guest in guests}) == 1
            self.risky.add(batch.instance)
        for guest in guests:
            guest.state = "running"
        self.seen["batches"] += 1
        self.seen["members"] += len(items)

    def _check_retries(self, again: list[Guest], background: bool) -> None:
        """Retries come first, but those that may end or hang an instance leave one for new work."""
        if again and not background:
            assert all(guest.deadly for guest in again), "retries come first"
            alive = self.scheduler.instances.keys() - self.lost
            assert len(self.risky - self.lost) >= len(alive) - 1 >= 1, "nothing is at stake"
            self.seen["kept for new work"] += 1

    def _check_background(self, batch: Batch, items: list[Item]) -> None:
        """A batch that a live item may have to wait for is short, or of one item, or spends half on the call itself."""
        time = self.scheduler.instances.time_of(batch.instance)
        assert time.num_observed or len(items) == 1
        most = max(self.limits.background_step, 2 * time.expected.call)
        assert len(items) == 1 or batch.predicted <= most + 1e-9

    def num_waiting(self, background: bool) -> int:
        scheduler = self.scheduler
        return scheduler.num_background_waiting if background else scheduler.num_waiting

    def _check_order(self, batch: Batch, guests: list[Guest], dropped: list[Item], starts: float) -> None:
        """Nobody was passed over too often, and the batch did not leave before its time."""
        limits = self.limits
        kind = guests[0].item.shape_key, guests[0].item.background
        line = [
            g for g in self.guests.values() if g.state == "waiting" and (g.item.shape_key, g.item.background) == kind
        ]
        last = max(guest.rank for guest in guests)
        for guest in line:
            if guest.rank < last and guest not in guests:
                guest.passed_over += 1
                self.seen["passed over"] += 1
                assert guest.passed_over <= limits.max_passed_over, "somebody starves"
        memory = self.scheduler.memory
        if guests[0].item.background:
            return
        # Who was dropped just now was still counted as present.
        there = [guest.item for guest in line]
        there += [item for item in dropped if (item.shape_key, item.background) == kind]
        oldest = min(item.arrival for item in there)
        full = len(there) >= min(limits.max_batch_size, memory.max_items)
        heavy = sum(item.size for item in there) >= min(limits.max_batch_tokens or 1e18, memory.max_size) - 1e-6
        if limits.target_latency is None and not (full or heavy or self.scheduler.closed):
            assert starts >= oldest + limits.max_wait, "too early"

    def finish(
        self, batch: Batch, failure: Failure | None, errors: dict[str, str], seconds: float, idle: float | None = None
    ) -> None:
        """Let a running batch end; with culprits in the setup, they alone say how."""
        if self.setup.culprits is not None:
            errors = {}
            if failure is not Failure.UNTRIED:
                blow = Failure.DIED if self.setup.deadly else Failure.RAISED
                failure = blow if any(map(self.setup.blames, batch.items)) else None
        outcome = BatchResult(seconds=seconds, failure=failure, detail="broke", errors=errors, idle=idle)
        self._record("update", batch.id, outcome, self.now)
        ended = self.scheduler.update(batch, outcome, self.now)
        self.answers.append([msgspec.to_builtins(each) for each in ended])
        if self.following.get(batch.instance) is batch:
            del self.following[batch.instance]
        else:
            del self.running[batch.instance]
            self.risky.discard(batch.instance)
            if batch.instance in self.following:
                self.running[batch.instance] = self.following.pop(batch.instance)
        self.seen[failure or "went well"] += 1
        told_ids = {each.id for each in ended}
        assert len(told_ids) == len(ended)
        members = {item.id for item in batch.items}
        for each in ended:
            if each.id in members:
                assert self.guests[each.id].state == "running"
            else:
                assert (self.guests[each.id].state, self.guests[each.id].attempts > 0) == ("again", True)
                assert failure in DEADLY
                self.seen["given up"] += 1
            self._check_end(each, batch, failure, errors)
            if each.id not in members:
                self._end(each.id)
        for item in batch.items:
            if self.guests[item.id].state == "aborted" or item.id in told_ids:
                assert self.guests[item.id].state != "aborted" or item.id not in told_ids
                self._end(item.id)
            elif failure is Failure.UNTRIED:
                self._return(self.guests[item.id])
            else:
                guest = self.guests[item.id]
                guest.state, guest.attempts = "again", guest.attempts + 1
                guest.deadly = failure in DEADLY
                assert failure is not None
        self.check()

    def _return(self, guest: Guest) -> None:
        """An item that was never tried is back in the line, and nothing is held against it."""
        assert guest.item.attempts == guest.attempts
        self._serial += 1
        guest.state, guest.rank, guest.passed_over = "waiting", (guest.rank[0], self._serial), 0

    def _check_end(self, ended: Finished, batch: Batch, failure: Failure | None, errors: dict[str, str]) -> None:
        self.seen[ended.reason] += 1
        if failure is None:
            assert ended.reason is (FinishReason.ERROR if ended.id in errors else FinishReason.DONE)
            return
        assert ended.reason is FinishReason.ERROR
        assert ended.detail.startswith("broke")
        if self.setup.culprits is not None:
            tried_again = self.limits.retries > 0 if self.setup.deadly else self.limits.bisect
            assert self.setup.blames(self.guests[ended.id].item) or not tried_again, "an innocent item failed"

    def lose(self, number: int) -> None:
        self._record("lose", number)
        self.scheduler.instance_lost(number)
        self.lost.add(number)
        self.answers.append(None)

    def bring_back(self, number: int) -> None:
        self._record("bring_back", number)
        self.scheduler.instance_back(number)
        self.lost.discard(number)
        self.answers.append(None)

    def change_limits(self, limits: BatchLimits) -> None:
        self._record("change", limits)
        self.scheduler.change_limits(limits)
        self.limits = limits
        self.seen["other limits"] += 1
        self.answers.append(None)
        self.check()

    def close(self) -> None:
        self._record("close")
        self.scheduler.close()
        self.answers.append(None)

    def drain(self, rng: random.Random) -> None:
        """Let everything end: instances come back, and calls go well."""
        for number in sorted(self.lost):
            self.bring_back(number)
        for _ in range(10_000):
            while self.schedule() is not None:
                pass
            if not self.guests:
                break
            if self.running:
                batch = self.running[min(self.running)]
                self.now += 0.01
                self.finish(batch, None, {}, 0.01 * rng.random())
            else:
                assert self.scheduler.ask_again is not None
                self.now = max(self.now, self.scheduler.ask_again)
        assert not self.guests, "somebody never ends"
        assert self.added == self.ended
        assert self.scheduler.queue_seconds() == 0
        assert not self.scheduler._waiting.queues
        assert not self.scheduler._background.waiting.queues
        assert not self.scheduler._aborted

    def check(self) -> None:
        scheduler = self.scheduler
        for background in (False, True):
            guests = [guest for guest in self.guests.values() if guest.item.background is background]
            states = Counter(guest.state for guest in guests)
            running = scheduler.num_background_running if background else scheduler.num_running
            assert self.num_waiting(background) == states["waiting"] + states["again"]
            assert running == states["running"] + states["aborted"]
        for name, guest in list(self.guests.items())[:3]:
            decision = self.scheduler.explain(name)
            assert decision is not None
            assert decision.request_id == name
            assert decision.detail
            assert guest.state in ("running", "aborted") or decision.reason != "admitted"
        assert self.scheduler.explain("nobody") is None

    def _end(self, item_id: str) -> None:
        del self.guests[item_id]
        self.ended[item_id] += 1

    def _record(self, *call: Any) -> None:
        self.calls.append(copy.deepcopy(call))


def told(batch: Batch | None) -> Any:
    """What a batch says, for comparison."""
    return None if batch is None else msgspec.to_builtins(batch)


def refused(error: Shed | ValueError) -> Any:
    """What a refusal says, for comparison."""
    return (error.reason, str(error), error.retry_after) if isinstance(error, Shed) else str(error)


def replay(world: World) -> list[Any]:
    """Make the same calls on a fresh scheduler and return its answers."""
    scheduler = world.setup.scheduler()
    batches: dict[int, Batch] = {}
    answers: list[Any] = []
    for name, *given in copy.deepcopy(world.calls):
        try:
            if name == "add":
                scheduler.add(*given)
                answers.append(None)
            elif name == "schedule":
                batch = scheduler.schedule(*given)
                if batch is not None:
                    batches[batch.id] = batch
                # As it is now: what the batch holds goes on to change.
                dropped = [msgspec.to_builtins(each) for each in scheduler.take_dropped()]
                answers.append((told(batch), dropped, scheduler.ask_again))
            elif name == "update":
                number, outcome, now = given
                ended = scheduler.update(batches[number], outcome, now)
                answers.append([msgspec.to_builtins(each) for each in ended])
            elif name == "abort":
                answers.append(scheduler.abort(*given))
            else:
                if name == "close":
                    scheduler.close()
                elif name == "change":
                    scheduler.change_limits(*given)
                else:
                    (scheduler.instance_lost if name == "lose" else scheduler.instance_back)(*given)
                answers.append(None)
        except (Shed, ValueError) as error:
            answers.append(refused(error))
    return answers

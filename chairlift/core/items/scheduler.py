"""Batches for models that answer in one call: who is computed together, when, and what follows from a failure.

A batch is put together at the moment when an instance is free to run it (late binding, as in Triton), or as little
before as it takes to get there: an instance that would have to wait for its next batch is sent it ahead.
What a call takes is learned from the calls, and with that a batch is chosen such that all its members are done by their
deadlines; whoever would make it late is refused instead. So an overloaded model answers as many in time as ever.
Background items run, in batches of their own, while no live one waits.
"""

from collections import Counter
from collections.abc import Collection
from math import inf

from chairlift.core.decision import Decision, Reason
from chairlift.core.finished import Finished, FinishReason, Shed, ShedReason
from chairlift.core.items.background import BackgroundItems
from chairlift.core.items.bisection import BatchPart, Bisections
from chairlift.core.items.explain import explain_background, explain_waiting
from chairlift.core.items.forming import BatchCapacity, Formed, Rules, form
from chairlift.core.items.instance import Instance, Instances
from chairlift.core.items.item import Batch, BatchResult, Failure, Item
from chairlift.core.items.latency_target import LatencyTarget
from chairlift.core.items.learned import LinearCost, MemoryLimit
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.waiting import ShapeQueue, WaitingItem, WaitingItems
from chairlift.core.scheduler import Scheduler

# Batches' worth of those who wait that are looked at where nothing is sorted, and at least so many items.
_WINDOW, _LEAST_WINDOW = 4, 64
# Asking again a little after somebody has become too late, not a rounding error before.
_LATER = 1e-6
# Timers are a millisecond's business: a batch that is to leave within half of that leaves now.
_SOON = 5e-4
_WHAT = {
    Failure.RAISED: "raised an error",
    Failure.OUT_OF_MEMORY: "ran out of memory",
    Failure.TIMED_OUT: "took too long",
    Failure.DIED: "ended its process",
}


class ItemScheduler(Scheduler[Item, Batch, BatchResult]):
    """Decides, and remembers just what it needs to decide. Pure: `now` comes in, in seconds on the caller's clock.

    `closed` says that nobody else will come, so batches leave as they are. With `ahead` an instance that runs a batch
    may be sent another, which it begins by itself once it is done.
    """

    def __init__(self, limits: BatchLimits, num_instances: int = 1, ahead: bool = False) -> None:
        self.limits = limits
        self.instances = Instances({number: Instance() for number in range(num_instances)})
        self.ahead = ahead
        self.memory = MemoryLimit()
        self.closed = False
        self.ask_again: float | None = None
        self.num_batches = 0
        self.num_shed: Counter[ShedReason] = Counter()
        self._waiting = WaitingItems(limits.queue_order)
        self._bisections = Bisections(limits)
        self._background = BackgroundItems(limits)
        self._in_flight: dict[str, Batch] = {}
        self._aborted: set[str] = set()
        self._dropped: list[Finished] = []
        self._rules = Rules(limits.sort_window > 0, limits.max_passed_over)
        self._target = LatencyTarget.of(limits.target_latency)
        self._now = 0.0

    # What the engine calls

    def change_limits(self, limits: BatchLimits) -> None:
        """Go by another batch size, wait or target. Raises ValueError if anything else differs."""
        self.limits.check_live(limits)
        self.limits, self._target = limits, LatencyTarget.of(limits.target_latency, self._target)

    def add(self, item: Item) -> None:
        """Queue an item. Raises Shed, or ValueError for an id in use, a size beyond any batch, or an unhashable shape.

        An item without a deadline gets the default one, unless it is a background item.
        """
        if self._waits(item.id) or item.id in self._in_flight:
            raise ValueError(f"item id {item.id!r} is already in use")
        if not 0 < item.size < inf:
            raise ValueError(f"an item's size must be a positive number, got {item.size}")
        most = self.limits.max_batch_tokens
        if most is not None and item.size > most:
            raise ValueError(f"the item's size is {item.size:g}, and a batch's at most {most:g} (max_batch_tokens)")
        if item.deadline is None and self.limits.default_timeout is not None and not item.background:
            item.deadline = item.arrival + self.limits.default_timeout
        if (shed := self._refusal(item, item.arrival)) is not None:
            self.num_shed[shed.reason] += 1
            raise shed
        if item.background:
            self._background.waiting.push(item)
            return
        self._waiting.push(item)
        if self._target is not None:
            self._target.arrived(item.size, item.arrival)

    def _waits(self, item_id: str) -> bool:
        background = self._background
        live = item_id in self._waiting or item_id in self._bisections
        return live or item_id in background.waiting or item_id in background.bisections

    def abort(self, item_id: str) -> bool:
        """Forget an item: nothing more will be heard of it. False if it is not here."""
        if item_id in self._waiting:
            self._waiting.remove([self._waiting.find(item_id)])
        elif item_id in self._bisections:
            self._bisections.remove(item_id)
        elif self._waits(item_id):
            self._background.remove(item_id)
        elif item_id in self._in_flight and item_id not in self._aborted:
            self._aborted.add(item_id)
        else:
            return False
        return True

    def close(self) -> None:
        """Hear that nobody else will come: batches leave as they are."""
        self.closed = True

    def schedule(self, now: float) -> Batch | None:
        """Return a batch for an instance that is free or about to be, or None: nothing leaves before `ask_again`."""
        self._now = now
        self.ask_again = None
        free = self.instances.free()
        self._expire(now, bool(free))
        batch = None
        if free:
            batch = self._run_live(free, now)
            if batch is None and self.num_background_waiting and not self.num_waiting:
                batch = self._try_again(self._background.bisections, free, now) or self._run_background(free, now)
        elif self.ahead and not self._bisections:
            batch = self._send_ahead(now)
        if batch is None:
            if (deadline := self._waiting.next_deadline()) is not None:
                self._ask_by(deadline - (0.0 if free else self.instances.quickest().call) + _LATER)
            background = self._background
            for others in (self._bisections, background.waiting, background.bisections):
                if others and (deadline := others.next_deadline()) is not None:
                    self._ask_by(deadline + _LATER)
        return batch

    def take_dropped(self) -> list[Finished]:
        """Return who was shed while they waited since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def update(self, batch: Batch, outcome: BatchResult, now: float) -> list[Finished]:
        """Take in what became of a batch, and free its instance; return who ended. All others will be tried again.

        Raises ValueError if the batch is not running.
        """
        instance = self.instances[batch.instance]
        part = instance.end(batch, now)
        items = []
        for item in batch.items:
            del self._in_flight[item.id]
            if item.id in self._aborted:
                self._aborted.remove(item.id)
            else:
                items.append(item)
        if outcome.failure is not None:
            return self._failed(batch, items, outcome, part)
        instance.observe(batch, outcome, now)
        self.memory.fitted(batch.computed, len(batch.items), again=part is not None)
        errors = outcome.errors
        return [
            Finished(item.id, FinishReason.ERROR, errors[item.id])
            if item.id in errors
            else Finished(item.id, FinishReason.DONE)
            for item in items
        ]

    def instance_lost(self, number: int) -> None:
        """Give an instance no more work. What it runs is still in flight until `update` says what became of it."""
        self.instances[number].alive = False

    def instance_back(self, number: int) -> None:
        """Give an instance work again, or for the first time."""
        if number in self.instances:
            self.instances[number].alive = True
        else:
            self.instances[number] = Instance()

    # What others may know

    @property
    def has_free(self) -> bool:
        """Whether an instance is up and has nothing to do."""
        return bool(self.instances.free())

    def has(self, batch: Batch) -> bool:
        """Whether a batch is still to be updated."""
        return self.instances[batch.instance].has(batch)

    @property
    def num_waiting(self) -> int:
        """Live items that are in no running batch."""
        return len(self._waiting) + len(self._bisections)

    @property
    def num_running(self) -> int:
        """Live items in batches that run, or were sent ahead to run next."""
        return len(self._in_flight) - self.num_background_running

    @property
    def num_background_waiting(self) -> int:
        """Background items that are in no running batch."""
        return len(self._background.waiting) + len(self._background.bisections)

    @property
    def num_background_running(self) -> int:
        """Background items in batches that run; none is ever sent ahead."""
        batches = (instance.batch for instance in self.instances.values())
        return sum(len(batch.items) for batch in batches if batch is not None and batch.items[0].background)

    @property
    def num_bisections(self) -> int:
        """How often a failed batch was split."""
        return self._bisections.num_bisections + self._background.bisections.num_bisections

    @property
    def searching(self) -> bool:
        """Whether it is being found out which item has ended or hung an instance."""
        waiting = any(each and each.deadly for each in (self._bisections, self._background.bisections))
        return waiting or any(each.deadly for each in self.instances.values())

    def queue_seconds(self) -> float:
        """Return the seconds of live work that wait, spread over the instances; 0 before the first call was timed."""
        return self._seconds(*self._waiting.load())

    def explain(self, item_id: str, ahead: int | None = None) -> Decision | None:
        """Say where an item is and why, as of the last `schedule`; None if it is not here. `num_ahead` says `ahead`."""
        if (batch := self._in_flight.get(item_id)) is not None:
            detail = f"in batch {batch.id} of {len(batch.items)} on instance {batch.instance}"
            return Decision(Reason.ADMITTED, item_id, detail)
        if item_id in self._bisections:
            return Decision(Reason.BATCH, item_id, self._bisections[item_id].detail)
        if not self._waits(item_id):
            return None
        ahead = self.num_ahead([item_id]).get(item_id, 0) if ahead is None else ahead
        if item_id not in self._waiting:
            return explain_background(item_id, self._background, self.num_waiting, ahead)
        waiter = self._waiting.find(item_id)
        cost = self.instances.quickest()
        leaves = self._leaves_at(self._waiting.queues[waiter.item.shape_key], self._capacity(cost), cost, self._now)
        return explain_waiting(waiter, ahead, self._waiting, self.instances, leaves - self._now)

    def num_ahead(self, item_ids: Collection[str]) -> dict[str, int]:
        """Say how many go before each of these that wait, of the live ones or of those in the background."""
        return self._waiting.num_ahead(item_ids) | self._background.num_ahead(item_ids)

    # Refusing

    def _refusal(self, item: Item, now: float) -> Shed | None:
        """Say why an item may not wait, or return None.

        By its deadline it is refused only if even the best that can happen is too late: those ahead leave in full
        batches, and it follows alone. Nothing is refused so while an instance is free, so a wrong prediction is
        always put to the test.
        """
        limits = self.limits
        if item.background:
            if self.num_background_waiting < limits.max_waiting:
                return None
            detail = f"{self.num_background_waiting} background requests wait already, which is the limit"
            return Shed(ShedReason.QUEUE_FULL, detail, self._seconds(*self._background.waiting.load()) or 1.0)
        if self.num_waiting >= limits.max_waiting:
            detail = f"{self.num_waiting} requests wait already, which is the limit"
            return Shed(ShedReason.QUEUE_FULL, detail, self.queue_seconds() or 1.0)
        if limits.max_queue_seconds is not None:
            work = self.queue_seconds()
            if work > limits.max_queue_seconds:
                detail = f"{work:.3g} s of work wait already, the limit is {limits.max_queue_seconds:g} s"
                return Shed(ShedReason.QUEUE_SECONDS, detail, work - limits.max_queue_seconds)
        if item.deadline is None:
            return None
        start = self.instances.next_free(now)
        done = start + self._ahead(item, start) + self.instances.quickest().seconds(item.size)
        if start > now and done > item.deadline:
            detail = f"it would be done {done - item.deadline:.3g} s after its deadline"
            return Shed(ShedReason.DEADLINE, detail, done - item.deadline)
        return None

    def _ahead(self, item: Item, start: float) -> float:
        """The seconds that full batches of those ahead of an item will surely take from `start` on."""
        most = self.limits.max_batch_size
        count, size = self._waiting.load(item)
        full = count // most * most
        if not full:
            return 0.0
        # If the first can't be in a full batch any more, a batch of them may be dropped in favour of those behind.
        mean = size / count
        first = self._waiting.next_deadline()
        if first is not None and first < start + self.instances.quickest().seconds(mean * most):
            full -= most
        return self._seconds(full, mean * full)

    def _expire(self, now: float, is_free: bool) -> None:
        """Drop who is past the deadline, or while all instances are busy, can't be done by it any more."""
        for waiter in self._waiting.take_expired(now if is_free else now + self.instances.quickest().call):
            self._drop(waiter.item, now)
        for waiter in self._background.waiting.take_expired(now):
            self._drop(waiter.item, now)
        for bisections in (self._bisections, self._background.bisections):
            for item in bisections.take_expired(now) if bisections else ():
                self._drop(item, now)

    def _drop(self, item: Item, now: float) -> None:
        late = now + self.instances.quickest().seconds(item.size) - (item.deadline or 0.0)
        detail = f"it waited {now - item.arrival:.3g} s and would be done {max(late, 0.0):.3g} s after its deadline"
        self.num_shed[ShedReason.DEADLINE] += 1
        self._dropped.append(Finished(item.id, FinishReason.SHED, detail, ShedReason.DEADLINE))

    # Forming batches

    def _send_ahead(self, now: float) -> Batch | None:
        """Send off a batch to an instance whose own ends so soon that it would have to wait for the next."""
        ending = []
        for number, instance in self.instances.items():
            if not instance.alive or instance.batch is None or instance.following is not None or instance.deadly:
                continue
            ends = instance.free_at(now)
            leaves = ends - instance.lead.seconds
            if leaves - now <= _SOON:
                ending.append((ends, number))
            else:
                self._ask_by(leaves)
        for ends, number in sorted(ending):
            if (batch := self._depart([number], now, ends)) is not None:
                return batch
        return None

    def _depart(self, free: list[int], now: float, start: float) -> Batch | None:
        """Send off a batch of the queue that is next among those whose time has come when it starts."""
        number = min(free, key=lambda each: self.instances.time_of(each).expected.seconds(1.0))
        time = self.instances.time_of(number).cautious
        capacity = self._capacity(time)
        skipped: list[ShapeQueue] = []
        while (queue := self._next_queue(capacity, time, skipped, start)) is not None:
            window = queue.waiting[: self._window()]
            formed = form(window, capacity, time, self._rules, start)
            if not formed.chosen and not self._in_flight:
                # All are too late, it is said. Nothing runs that could tell otherwise, so one of them does.
                last = max(window, key=lambda waiter: waiter.item.deadline or inf)
                formed = Formed([last], last.item.size, [waiter for waiter in window if waiter is not last])
            full = len(queue.waiting) >= capacity.items or queue.size >= capacity.size
            if not self._settle(window, formed, number, now):
                skipped.append(queue)
            if formed.chosen:
                detail = "the queue is closed" if self.closed else "its oldest waited long enough"
                items = [waiter.item for waiter in formed.chosen]
                return self._send(number, items, formed.computed, "it is full" if full else detail, now)
        return None

    def _settle(self, window: list[WaitingItem], formed: Formed, number: int, now: float) -> bool:
        """Take the batch out of the queue, drop who is late for every instance, and note who was passed over.

        Return whether anybody left.
        """
        gone = list(formed.chosen)
        for waiter in formed.late:
            if waiter.passed_over >= self.limits.max_passed_over or not self._elsewhere(waiter.item, number, now):
                gone.append(waiter)
                self._drop(waiter.item, now)
        self._waiting.leave(window, formed.chosen, gone)
        return bool(gone)

    def _elsewhere(self, item: Item, number: int, now: float) -> bool:
        """Whether another instance should come free in time for an item."""
        for other, instance in self.instances.items():
            if other == number or not instance.alive:
                continue
            start = instance.free_at(now)
            seconds = self.instances.time_of(other).cautious.seconds(item.size)
            if item.deadline is None or start + seconds <= item.deadline:
                return True
        return False

    def _next_queue(
        self, capacity: BatchCapacity, time: LinearCost, skipped: list[ShapeQueue], now: float
    ) -> ShapeQueue | None:
        """Return the queue whose first is the most urgent among those that at this moment need wait no longer."""
        best: ShapeQueue | None = None
        for queue in self._waiting.queues.values():
            leaves = self._leaves_at(queue, capacity, time, now)
            if leaves > now:
                self._ask_by(leaves)
            elif queue not in skipped and (best is None or queue.waiting[0].rank < best.waiting[0].rank):
                best = queue
        return best

    def _leaves_at(self, queue: ShapeQueue, capacity: BatchCapacity, time: LinearCost, now: float) -> float:
        """Return when a batch of this queue should leave if nobody else comes."""
        if self.closed or len(queue.waiting) >= capacity.items or queue.size >= capacity.size:
            return now
        if self._target is not None:
            return self._target.leaves_at(len(queue.waiting), queue.oldest, time, queue.size, now)
        return queue.oldest + self.limits.max_wait

    def _ask_by(self, moment: float) -> None:
        self.ask_again = moment if self.ask_again is None else min(self.ask_again, moment)

    def _run_background(self, free: list[int], now: float) -> Batch | None:
        """Send off background items on an instance that no live one wants; they need no company."""
        background = self._background
        if not background.waiting:
            return None
        number = min(free, key=lambda each: self.instances.time_of(each).expected.seconds(1.0))
        time = self.instances.time_of(number).expected
        formed = background.form(background.limited(self._most(), time), time, self._rules, self._window())
        items = [waiter.item for waiter in formed.chosen]
        return self._send(number, items, formed.computed, "no live request waits", now)

    def _most(self) -> BatchCapacity:
        """What a batch may hold, however long it takes."""
        size = min(self.limits.max_batch_tokens or inf, self.memory.max_size)
        return BatchCapacity(int(min(self.limits.max_batch_size, self.memory.max_items)), size)

    def _capacity(self, time: LinearCost) -> BatchCapacity:
        capacity = self._most()
        if self._target is None:
            return capacity
        most = self._target.most_computed(time, max(self.instances.num_alive, 1), self._now)
        return capacity._replace(size=min(capacity.size, most))

    def _window(self) -> int:
        return max((self.limits.sort_window or _WINDOW) * self.limits.max_batch_size, _LEAST_WINDOW)

    def _run_live(self, free: list[int], now: float) -> Batch | None:
        """Send off live items: first those that go again.

        One instance is kept for new ones while they wait, if there are others to find out who ends or hangs them.
        """
        if not self._bisections:
            return self._depart(free, now, now)
        kept = self._waiting and self.instances.num_deadly >= max(self.instances.num_alive - 1, 1)
        batch = self._try_again(self._bisections, free, now, deadly=not kept) or self._depart(free, now, now)
        return batch or self._try_again(self._bisections, free, now)

    def _try_again(self, bisections: Bisections, free: list[int], now: float, deadly: bool = True) -> Batch | None:
        """Send off a part of a batch that failed."""
        part = bisections.take(self.limits.max_batch_size, deadly)
        if part is None:
            return None
        items = part.items
        size = sum(item.size for item in items)
        computed = max(item.size for item in items) * len(items) if self._rules.pads else size
        batch = self._send(free[0], items, computed, part.detail, now)
        self.instances[free[0]].part = part
        return batch

    def _send(self, number: int, items: list[Item], computed: float, detail: str, now: float) -> Batch:
        instance = self.instances[number]
        start, predicted = instance.free_at(now), self.instances.time_of(number).expected.seconds(computed)
        batch = Batch(
            id=self.num_batches,
            instance=number,
            items=items,
            size=sum(item.size for item in items),
            computed=computed,
            predicted=predicted,
            started=start,
            reason=Decision(Reason.ADMITTED, items[0].id, detail, len(items)),
            ahead=instance.batch is not None,
            due=start + predicted,
        )
        self.num_batches += 1
        instance.begin(batch)
        for item in items:
            self._in_flight[item.id] = batch
        return batch

    # Failures

    def _failed(self, batch: Batch, items: list[Item], outcome: BatchResult, part: BatchPart | None) -> list[Finished]:
        failure = outcome.failure or Failure.RAISED
        if failure is Failure.UNTRIED:
            for item in items:
                (self._background.waiting if item.background else self._waiting).push(item)
            return []
        for item in items:
            item.attempts += 1
        room = self.memory.room if part is None else part.search.room
        if failure is Failure.OUT_OF_MEMORY:
            self.memory.exceeded(batch.computed, len(batch.items), room)
        if not items:
            return []
        bisections = self._background.bisections if items[0].background else self._bisections
        blame = bisections.split(batch, items, failure, part, _WHAT[failure], room)
        if blame is None:
            return []
        detail = (outcome.detail or f"the call {_WHAT[failure]}") + blame.text
        ended = [Finished(item.id, FinishReason.ERROR, detail, deadly=blame.deadly) for item in items]
        return ended + [Finished(item.id, FinishReason.ERROR, detail) for item in blame.others]

    def _seconds(self, count: int, size: float) -> float:
        """The time that this much work takes in full batches on all instances that are up."""
        return self.instances.seconds(self.limits.max_batch_size, count, size)

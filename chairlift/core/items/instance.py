"""The executors, as the scheduler sees them."""

from math import inf

from chairlift.core.items.bisection import BatchPart
from chairlift.core.items.item import Batch, BatchResult
from chairlift.core.items.learned import BatchTime, Lead, LinearCost


class Instance:
    """One executor: whether it is there, what it runs, what was sent ahead to run next, and how fast it is.

    `part` is what the batch that runs is, if it is a part of one that failed.
    """

    def __init__(self) -> None:
        self.time = BatchTime()
        self.lead = Lead()
        self.alive = True
        self.batch: Batch | None = None
        self.following: Batch | None = None
        self.part: BatchPart | None = None

    @property
    def deadly(self) -> bool:
        """Whether what it runs may end or hang it."""
        return self.part is not None and self.part.deadly

    def free_at(self, now: float) -> float:
        """When it should be done with all that it has."""
        if self.batch is None:
            return now
        end = max(self.batch.started + self.batch.predicted, now)
        return end if self.following is None else end + self.following.predicted

    def has(self, batch: Batch) -> bool:
        """Whether it runs this batch, or will do so next."""
        return self.batch is batch or self.following is batch

    def begin(self, batch: Batch) -> None:
        """Take a batch."""
        if self.batch is None:
            self.batch = batch
        else:
            self.following = batch

    def end(self, batch: Batch, now: float) -> BatchPart | None:
        """Let a batch go, and begin the next; return the part that it was. Raises ValueError if it is not here."""
        if not self.has(batch):
            raise ValueError(f"batch {batch.id} is not running")
        if self.following is batch:
            self.following = None
            return None
        part, self.part = self.part, None
        self.batch, self.following = self.following, None
        if self.batch is not None:
            self.batch.started = now
        return part

    def observe(self, batch: Batch, outcome: BatchResult, now: float) -> None:
        """Learn from a call that went well."""
        late = now - batch.due
        self.time.observe(outcome.seconds, batch.predicted + late, batch.computed, len(batch.items))
        if batch.ahead and outcome.idle is not None:
            self.lead.observe(outcome.idle, batch.predicted)


class Instances(dict[int, Instance]):
    """All instances by number, and what is to be expected of them."""

    def free(self) -> list[int]:
        """Return those that are up and have nothing to do."""
        return [number for number, instance in self.items() if instance.alive and instance.batch is None]

    @property
    def num_alive(self) -> int:
        """How many are up."""
        return sum(instance.alive for instance in self.values())

    @property
    def num_deadly(self) -> int:
        """How many of those that are up run what may end or hang them."""
        return sum(instance.alive and instance.deadly for instance in self.values())

    def time_of(self, number: int) -> BatchTime:
        """Return what is known of an instance's speed; until it has run something, that of another."""
        time = self[number].time
        if time.num_observed:
            return time
        return next((other.time for other in self.values() if other.time.num_observed), time)

    def quickest(self) -> LinearCost:
        """Return the times of the instance that takes the least for one more item."""
        costs = [instance.time.expected for instance in self.values() if instance.time.num_observed]
        return min(costs, key=lambda cost: cost.call, default=LinearCost(0.0, 0.0))

    def next_free(self, now: float) -> float:
        """Return when an instance should next be free; now, if none is up to tell."""
        soonest = inf
        for instance in self.values():
            if instance.alive:
                soonest = min(soonest, instance.free_at(now))
        return soonest if soonest < inf else now

    def seconds(self, max_batch_size: int, count: int, size: float) -> float:
        """Return the time that this much work takes in full batches on all instances that are up."""
        call, each = self.quickest()
        return (-(-count // max_batch_size) * call + each * size) / max(self.num_alive, 1)

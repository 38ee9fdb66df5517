"""One executor, as the scheduler sees it."""

from chairlift.core.items.batch_time import BatchTime
from chairlift.core.items.bisection import Bisection
from chairlift.core.items.item import Batch, BatchResult
from chairlift.core.items.lead import Lead


class Instance:
    """Whether it is there, what it runs, what was sent ahead to run next, and how fast it is.

    `search` is that of the batch that runs, if it is part of one that failed.
    """

    def __init__(self) -> None:
        self.time = BatchTime()
        self.lead = Lead()
        self.alive = True
        self.batch: Batch | None = None
        self.following: Batch | None = None
        self.search: Bisection | None = None

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

    def end(self, batch: Batch, now: float) -> Bisection | None:
        """Let a batch go, and begin the next; return its search. Raises ValueError if it is not here."""
        if not self.has(batch):
            raise ValueError(f"batch {batch.id} is not running")
        if self.following is batch:
            self.following = None
            return None
        search, self.search = self.search, None
        self.batch, self.following = self.following, None
        if self.batch is not None:
            self.batch.started = now
        return search

    def observe(self, batch: Batch, outcome: BatchResult, now: float) -> None:
        """Learn from a call that went well."""
        late = now - batch.due
        self.time.observe(outcome.seconds, batch.predicted + late, batch.computed, len(batch.items))
        if batch.ahead and outcome.idle is not None:
            self.lead.observe(outcome.idle, batch.predicted)

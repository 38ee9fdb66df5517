"""Background items of a one-shot model: work without haste, for instances that no live item wants."""

from chairlift.core.items.batch_time import LinearCost
from chairlift.core.items.bisection import Bisections
from chairlift.core.items.forming import BatchCapacity, Formed, Rules, fill
from chairlift.core.items.item import Item
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.waiting import Waiting

# A call may take this many times what one costs by itself, however little the limit is: nearly all of it would be lost.
_CALLS = 2


class BackgroundItems:
    """Those in line, and in `trials` those whose call failed. They never share a batch with live items."""

    def __init__(self, limits: BatchLimits) -> None:
        self.waiting = Waiting(limits.queue_order)
        self.trials = Bisections(limits)
        self._seconds = limits.background_step

    def __len__(self) -> int:
        return len(self.waiting) + len(self.trials)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self.waiting or item_id in self.trials

    def remove(self, item_id: str) -> None:
        """Forget one of them. Raises KeyError."""
        if item_id in self.trials:
            self.trials.remove(item_id)
        else:
            self.waiting.remove([self.waiting.find(item_id)])

    def room(self, room: BatchCapacity, time: LinearCost) -> BatchCapacity:
        """Cut a batch's room to what is done soon, so that a live item that comes meanwhile does not wait for long.

        Before anything is known of the time, that is one item.
        """
        if time.call <= 0 and time.size <= 0:
            return room._replace(items=1)
        spare = max(self._seconds, _CALLS * time.call) - time.call
        return room if time.size <= 0 else room._replace(size=min(room.size, spare / time.size))

    def board(self, room: BatchCapacity, time: LinearCost, rules: Rules, window: int) -> Formed:
        """Take a batch out of the line that is next. Somebody must wait."""
        line = min(self.waiting.lines.values(), key=lambda each: each.waiters[0].rank)
        waiters = line.waiters[:window]
        chosen, computed = fill(waiters, room, time, rules)
        self.waiting.leave(waiters, chosen, chosen)
        return Formed(chosen, computed, [])

    def ahead(self, item: Item) -> int:
        """How many are tried again or wait before one of those in line. Raises KeyError."""
        rank = self.waiting.find(item.id).rank
        lines = self.waiting.lines.values()
        return len(self.trials) + sum(other.rank < rank for line in lines for other in line.waiters)

"""Background items: work without haste, for instances that no live item wants."""

from collections.abc import Iterable

from chairlift.core.items.bisection import Bisections
from chairlift.core.items.forming import BatchCapacity, Formed, Rules, fill
from chairlift.core.items.learned import LinearCost
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.waiting import WaitingItems

# A call may take this many times what one costs by itself, however little the limit is: nearly all of it would be lost.
_CALLS = 2


class BackgroundItems:
    """Those `waiting`, and in `bisections` those whose call failed. They never share a batch with live items."""

    def __init__(self, limits: BatchLimits) -> None:
        self.waiting = WaitingItems(limits.queue_order)
        self.bisections = Bisections(limits)
        self._seconds = limits.background_step

    def remove(self, item_id: str) -> None:
        """Forget one of them. Raises KeyError."""
        if item_id in self.bisections:
            self.bisections.remove(item_id)
        else:
            self.waiting.remove([self.waiting.find(item_id)])

    def limited(self, capacity: BatchCapacity, time: LinearCost) -> BatchCapacity:
        """Cut a batch's capacity to what is done soon, so that a live item that comes meanwhile does not wait for long.

        Before anything is known of the time, that is one item.
        """
        if time.call <= 0 and time.size <= 0:
            return capacity._replace(items=1)
        spare = max(self._seconds, _CALLS * time.call) - time.call
        return capacity if time.size <= 0 else capacity._replace(size=min(capacity.size, spare / time.size))

    def form(self, capacity: BatchCapacity, time: LinearCost, rules: Rules, window: int) -> Formed:
        """Take a batch out of the queue that is next. Somebody must wait."""
        queue = min(self.waiting.queues.values(), key=lambda each: each.waiting[0].rank)
        waiting = queue.waiting[:window]
        chosen, computed = fill(waiting, capacity, time, rules)
        self.waiting.leave(waiting, chosen, chosen)
        return Formed(chosen, computed, [])

    def num_ahead(self, item_ids: Iterable[str]) -> dict[str, int]:
        """How many are tried again or wait before each of these that wait."""
        return {each: len(self.bisections) + count for each, count in self.waiting.num_ahead(item_ids).items()}

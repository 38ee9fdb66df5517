"""Why an item waits, for a person who asks."""

from chairlift.core.decision import Decision, Reason
from chairlift.core.items.background import BackgroundItems
from chairlift.core.items.instance import Instances
from chairlift.core.items.waiting import WaitingItem, WaitingItems


def explain_waiting(
    waiter: WaitingItem, ahead: int, waiting: WaitingItems, instances: Instances, seconds: float
) -> Decision:
    """Say why a live item waits; its queue's next batch would leave in so many seconds if an instance were free."""
    item = waiter.item
    place = f"{ahead} of {len(waiting)} are ahead of it"
    if waiter.passed_over:
        place += f", and it was passed over {waiter.passed_over} times"
    alive = [instance for instance in instances.values() if instance.alive]
    if not any(instance.batch is None for instance in alive):
        state = f"all {len(alive)} instances are busy" if alive else "no instance is up"
        return Decision(Reason.SLOTS, item.id, f"{state}; {place}", len(waiting))
    company = len(waiting.queues[item.shape_key].waiting)
    detail = f"{company} of its shape wait up to {max(seconds, 0.0):.3g} s for company; {place}"
    return Decision(Reason.WINDOW, item.id, detail, len(waiting))


def explain_background(item_id: str, background: BackgroundItems, num_live: int, ahead: int) -> Decision:
    """Say why a background item waits while so many live ones do."""
    count = len(background.waiting) + len(background.bisections)
    if num_live:
        return Decision(Reason.LIVE, item_id, f"{num_live} live requests wait", count)
    if item_id in background.bisections:
        return Decision(Reason.BATCH, item_id, background.bisections[item_id].detail)
    return Decision(Reason.SLOTS, item_id, f"{ahead} of {count} in the background are ahead of it", count)

"""What is told of the items of a model that answers in one call."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from chairlift.core.decision import Reason
from chairlift.core.items.item import Item
from chairlift.core.items.scheduler import ItemScheduler
from chairlift.core.sequences.overload import Foreseen, ForeseenMoment
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.request_log import EndedRequest, Viewer
from chairlift.server.requests.request_view import (
    MOST_NAMED,
    MOST_OWN,
    WHY_WAITING,
    AheadView,
    PhasesView,
    RequestView,
    created_at,
    ended_view,
    predicted,
)


def live_items(service: ItemService, viewer: Viewer) -> Iterator[Item]:
    """Those that a viewer may see, oldest first."""
    return service.dispatcher.items_of(_owner(viewer))


def find_items(service: ItemService, viewer: Viewer, request_id: str) -> list[Item]:
    """The live one of this id, if the viewer may see it; of one that is done, those that its request waits for."""
    dispatcher, owner = service.dispatcher, _owner(viewer)
    found = dispatcher.find_item(owner, request_id)
    if found is not None:
        return [found]
    (request,) = service.requests_of([request_id])
    if request is None:
        return []
    first = int(request.id.removeprefix(dispatcher.id_prefix))
    ids = (f"{dispatcher.id_prefix}{number}" for number in range(first, first + request.items))
    return [item for each in ids if (item := dispatcher.find_item(owner, each)) is not None]


def _owner(viewer: Viewer) -> str | None:
    return None if viewer.sees_all else viewer.name


def item_views(service: ItemService, viewer: Viewer, items: Sequence[Item]) -> list[RequestView]:
    """What is told of items that have not ended."""
    scheduler, now = service.dispatcher.scheduler, time.monotonic()
    mine = list(islice(live_items(service, viewer), MOST_OWN))
    # Of all at once: there may be a queue of its own for each that waits.
    places = scheduler.num_ahead([item.id for item in (*mine, *items)])
    queue = sorted((places[item.id], item.id) for item in mine if item.id in places and not item.background)
    requests = service.requests_of(item.id for item in items)
    views = []
    for item, request in zip(items, requests, strict=True):
        place = places.get(item.id)
        decision, ahead = scheduler.explain(item.id, place), None if item.background else place
        runs = decision is not None and decision.reason is Reason.ADMITTED
        waits = WHY_WAITING.get(decision.reason, "") if decision is not None else "it has just come"
        waited = None if runs else now - item.arrival
        view = RequestView(
            id=item.id,
            request=item.id if request is None else request.id,
            model=service.name,
            kind="item",
            state="running" if runs else "waiting",
            why="it is computed, with the others of its batch" if runs else waits,
            reason=None if runs or decision is None else decision.reason,
            detail=None if decision is None else decision.detail,
            background=item.background,
            priority=item.priority,
            created=created_at(item.arrival, now),
            phases=PhasesView(queued_s=waited, total_s=now - item.arrival).rounded(),
            items=1,
        )
        if ahead is not None:
            own = [item_id for _, item_id in queue[: bisect_left(queue, (ahead, ""))]]
            view.position, view.ahead = ahead + 1, AheadView(ahead, own[:MOST_NAMED], ahead - len(own), None)
        view.predicted = predicted(_foreseen(scheduler, item, ahead, now), now)
        views.append(view)
    return views


def ended_items(service: ItemService, ended: Iterable[EndedRequest]) -> list[RequestView]:
    """What is told of requests for items that have ended."""
    return [ended_view(each, service.name, "item", show_cached=True) for each in ended]


def _foreseen(scheduler: ItemScheduler, item: Item, ahead: int | None, now: float) -> Foreseen | None:
    """When an item should be computed, from the calls that were timed; None before there were any.

    Nor is it known of one that waits for company, or in the background.
    """
    instances, cost = scheduler.instances, scheduler.instances.quickest()
    if cost.seconds(item.size) <= 0:
        return None
    batches = (batch for each in instances.values() for batch in (each.batch, each.following) if batch is not None)
    for batch in batches:
        if item in batch.items:
            return Foreseen(end=ForeseenMoment(batch.started + batch.predicted))
    if ahead is None or scheduler.has_free:
        return None
    before = scheduler.queue_seconds() * ahead / scheduler.num_waiting
    start = instances.next_free(now) + before
    return Foreseen(ForeseenMoment(start), end=ForeseenMoment(start + cost.seconds(item.size)))

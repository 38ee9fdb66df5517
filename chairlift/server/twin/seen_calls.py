"""A server's calls as the simulator takes them: how long each took, its way, and what was between two."""

from collections.abc import Iterable
from operator import attrgetter

from chairlift.plan.machine_profile import CallSample
from chairlift.server.metrics.items import RecentCall


def seen_calls(calls: Iterable[RecentCall], first: float, at_once: bool) -> list[CallSample]:
    """Return those that succeeded, in the order in which they began, in seconds after the moment `first`.

    `calls` come in the order in which they ended. How long the front took to hear of an end follows, for a call that
    was sent ahead, from when it heard of the end before: between these two lie the gap, the time for which the instance
    had nothing to do, the call, and by how much the one way was longer than the other. With `at_once` batches leave as
    soon as the front asks: what passed until it did, since an item and an instance were there, is the hold.
    """
    found: list[CallSample] = []
    # Of each instance, its last call and how long the way of that was.
    lasts: dict[int, tuple[RecentCall, float]] = {}
    for call in calls:
        if call.failure is not None or call.seconds <= 0:
            lasts.pop(call.instance, None)
            continue
        more = call.ended - call.started - call.seconds
        gap, way, hold = None, more / 2, None
        last = lasts.get(call.instance)
        if not call.ahead:
            if at_once and call.waited is not None:
                hold = max(call.waited if last is None else min(call.waited, call.started - last[0].ended), 0.0)
        else:
            gap = max(more, 0.0) if call.gap is None else call.gap
            # Of the first that is known the way is taken to be none.
            way = 0.0
            if last is not None:
                before, way = last
                way += call.ended - before.ended - call.seconds - gap - (call.idle or 0.0)
        lasts[call.instance] = call, way
        computed = call.computed or call.size
        found.append(CallSample(call.items, computed, call.seconds, call.started - first, max(way, 0.0), gap, hold))
    return sorted(found, key=attrgetter("began"))

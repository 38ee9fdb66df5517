"""A model that answers in one call, and that somebody watches."""

from collections import defaultdict
from itertools import islice, takewhile
from operator import attrgetter

from chairlift.core.decision import Reason
from chairlift.server.live.model_look import LogReader, ModelLook, Tally, TenantLoad, look_of
from chairlift.server.live.slot_board import MOST_BARS, SHOWN_S, Bar, SlotBoard
from chairlift.server.metrics.items import RecentCall
from chairlift.server.models.item_service import ItemService
from chairlift.server.requests.request_view import WHY_WAITING

# Items that are looked at for one that waits.
_MOST_ITEMS = 64
# An item that is tried again may be the first of several calls.
_call = attrgetter("id", "start")


class ItemWatch:
    """Reads what its service and its dispatcher know. An instance counts as a slot, and a call as a request in it."""

    def __init__(self, service: ItemService) -> None:
        self.service = service
        self.load: dict[str | None, TenantLoad] = {}
        self.board = SlotBoard(len(service.dispatcher.executors), _call)
        self._tally = Tally([service.metrics.queue_time])
        self._log = LogReader(service.log)
        # When the last call ended that was seen.
        self._since = 0.0

    def look(self, now: float) -> ModelLook:
        """The model now, with the calls that are new or have changed since the last look."""
        service, scheduler = self.service, self.service.dispatcher.scheduler
        slots = len(service.dispatcher.executors)
        told = look_of(service, "item", slots)
        told.running, told.waiting = scheduler.num_running, scheduler.num_waiting
        told.background_running = scheduler.num_background_running
        told.background_waiting = scheduler.num_background_waiting
        if told.waiting or told.background_waiting:
            told.queue = [(self._why(), told.waiting + told.background_waiting)]
        counts = service.metrics.counts
        calls = sum(count for count, _ in counts.batches.values())
        items = sum(size * count for size, (count, _) in counts.batches.items())
        rates, (told.queue_time,) = self._tally.look(now, items, calls, service.metrics.busy_seconds)
        if rates is not None:
            told.written = rates[0]
            told.batch = rates[0] / rates[1] if rates[1] else None
            told.busy = min(rates[2] / slots, 1.0)
        told.bars = self.board.update(*self._bars(now), now)
        return told

    def _why(self) -> str:
        dispatcher = self.service.dispatcher
        for item in islice(dispatcher.items_of(None), _MOST_ITEMS):
            decision = dispatcher.scheduler.explain(item.id)
            if decision is not None and decision.reason is not Reason.ADMITTED:
                return WHY_WAITING.get(decision.reason, "they have just come")
        return "they have just come"

    def _load(self, now: float) -> dict[str | None, TenantLoad]:
        """The requests that each tenant has, or had: one runs as soon as an item of it does."""
        service = self.service
        instances = service.dispatcher.scheduler.instances.values()
        calls = (batch for each in instances for batch in (each.batch, each.following) if batch is not None)
        running = set(service.requests_of(item.id for call in calls for item in call.items))
        load: defaultdict[str | None, TenantLoad] = defaultdict(TenantLoad)
        for request in service.requests.values():
            if request in running:
                load[request.owner].running += 1
            else:
                load[request.owner].waiting += 1
        for owner, each in self._log.read(now):
            load[owner].ended.append(each)
        return load

    def _bars(self, now: float) -> tuple[list[Bar], list[Bar]]:
        """The bars of calls that run, and of those that ended lately; and what each tenant has."""
        batches = [each.batch for each in self.service.dispatcher.scheduler.instances.values() if each.batch]
        live = [
            Bar(batch.items[0].id, 0, batch.started, background=batch.items[0].background, count=len(batch.items))
            for batch in batches
        ]
        self.load = self._load(now)
        return live, [_ended(call) for call in self._calls(now)]

    def _calls(self, now: float) -> list[RecentCall]:
        """Those that ended since the last look; the first time, those of the last minute."""
        since = max(self._since, now - SHOWN_S)
        newest_first = takewhile(lambda call: call.ended > since, reversed(self.service.metrics.calls))
        found = list(islice(newest_first, MOST_BARS))[::-1]
        self._since = found[-1].ended if found else since
        return found


def _ended(call: RecentCall) -> Bar:
    reason = "done" if call.failure is None else "error"
    return Bar(call.first, 0, call.started, None, call.ended, call.background, call.items, None, reason)

"""A model that answers in one call, and that somebody watches."""

from collections import defaultdict
from itertools import islice

from chairlift.core.decision import Reason
from chairlift.server.live.model_look import LogReader, ModelLook, Tally, TenantLoad, look_of
from chairlift.server.live.slot_board import Bar, SlotBoard
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.request_view import WHY_WAITING

# Items that are looked at for one that waits.
_MOST_ITEMS = 64
# A call begins in the worker a little after it was sent there.
_SAME_S = 0.05


class ItemWatch:
    """Reads what its service and its dispatcher know. An instance counts as a slot, and a call as a request in it."""

    def __init__(self, service: ItemService) -> None:
        self.service = service
        self.load: dict[str | None, TenantLoad] = {}
        self.board = SlotBoard(len(service.dispatcher.executors))
        self._tally = Tally([service.metrics.queue_time])
        self._log = LogReader(service.log)
        # When the calls began that ran at the last look, by the id of their bar.
        self._running: dict[str, float] = {}

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

    def _load(self) -> defaultdict[str | None, TenantLoad]:
        """The requests that each tenant has: one runs as soon as an item of it does."""
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
        return load

    def _bars(self, now: float) -> tuple[list[Bar], list[Bar]]:
        """The bars of calls that run, and of those that ended lately; and what each tenant has."""
        batches = [each.batch for each in self.service.dispatcher.scheduler.instances.values() if each.batch]
        live = [
            Bar(batch.items[0].id, 0, batch.started, background=batch.items[0].background, count=len(batch.items))
            for batch in batches
        ]
        load = self._load()
        # Requests that were computed together ended together.
        calls: dict[float, Bar] = {}
        for owner, each in self._log.read(now):
            load[owner].ended.append(each)
            if each.run_s is not None:
                size = max(round(each.mean_batch or 1), 1)
                start = each.ended - each.run_s
                name = next((bar for bar, began in self._running.items() if abs(began - start) < _SAME_S), each.id)
                calls.setdefault(
                    each.ended, Bar(name, 0, start, None, each.ended, each.background, size, owner, "done")
                )
        self._running = {bar.id: bar.start for bar in live}
        self.load = load
        return live, list(calls.values())

"""A model that answers in one call, and that somebody watches."""

from collections import defaultdict
from collections.abc import Collection
from itertools import islice, takewhile
from operator import attrgetter

from chairlift.core.decision import Reason
from chairlift.core.items.item import Batch
from chairlift.server.live.model_look import BEHIND_LIVE, JUST_COME, LogReader, ModelLook, Tally, TenantLoad, look_of
from chairlift.server.live.slot_board import MOST_BARS, SHOWN_S, Bar, SlotBoard
from chairlift.server.metrics.items import RecentCall
from chairlift.server.models.item_service import ItemService
from chairlift.server.requests.request_view import WHY_WAITING

# Items that wait and are looked at for the first live one, or the first in the background.
_MOST_ITEMS = 4096
# An item that is tried again may be the first of several calls.
_call = attrgetter("id", "start")


class ItemWatch:
    """Reads what its service and its dispatcher know. An instance is a slot, and a call counts as a request in it."""

    def __init__(self, service: ItemService) -> None:
        self.service = service
        self.load: dict[str | None, TenantLoad] = {}
        self.board = SlotBoard(len(service.dispatcher.executors), _call, chooses=False)
        self._tally = Tally([service.metrics.queue_time])
        self._log = LogReader(service.log)
        # When the last call ended that was seen.
        self._since = 0.0
        # What calls took that failed, which the metrics do not time.
        self._failed_seconds = 0.0

    def look(self, now: float) -> ModelLook:
        """The model now, with the calls that are new or have changed since the last look."""
        service, scheduler = self.service, self.service.dispatcher.scheduler
        slots = len(service.dispatcher.executors)
        told = look_of(service, "item", slots)
        told.running, told.waiting = scheduler.num_running, scheduler.num_waiting
        told.background_running = scheduler.num_background_running
        told.background_waiting = scheduler.num_background_waiting
        in_flight = self._in_flight()
        for background, count in ((False, told.waiting), (True, told.background_waiting)):
            if count:
                told.queue = [*told.queue, (self._why(background, in_flight), count)]
        self.load = self._load(in_flight, now)
        told.bars = self.board.update(*self._bars(now), now)
        counts = service.metrics.counts
        calls = sum(count for count, _ in counts.batches.values())
        items = sum(size * count for size, (count, _) in counts.batches.items())
        rates, (told.queue_time,) = self._tally.look(now, items, calls, self._busy_seconds(now))
        if rates is not None:
            told.written = rates[0]
            told.batch = rates[0] / rates[1] if rates[1] else None
            told.busy = min(rates[2] / slots, 1.0)
        return told

    def _in_flight(self) -> set[str]:
        """The ids of items whose calls run, or were sent ahead to run next."""
        instances = self.service.dispatcher.scheduler.instances.values()
        calls = (batch for each in instances for batch in (each.batch, each.following) if batch is not None)
        return {item.id for call in calls for item in call.items}

    def _why(self, background: bool, in_flight: Collection[str]) -> str:
        """Why the first one waits, of the live ones or of those in the background."""
        dispatcher = self.service.dispatcher
        waiting = islice((item for item in dispatcher.items_of(None) if item.id not in in_flight), _MOST_ITEMS)
        first = next((item for item in waiting if item.background is background), None)
        decision = None if first is None else dispatcher.scheduler.explain(first.id, ahead=0)
        if decision is not None and decision.reason is Reason.LIVE:
            return BEHIND_LIVE
        why = JUST_COME if decision is None else WHY_WAITING.get(decision.reason, JUST_COME)
        return f"they are in the background; {why}" if background else why

    def _busy_seconds(self, now: float) -> float:
        """The time that calls have taken, those included that run or failed."""
        instances = self.service.dispatcher.scheduler.instances.values()
        running = sum(max(now - each.batch.started, 0.0) for each in instances if each.batch is not None)
        return self.service.metrics.busy_seconds + self._failed_seconds + running

    def _load(self, in_flight: Collection[str], now: float) -> dict[str | None, TenantLoad]:
        """The requests that each tenant has, or had: one runs as soon as an item of it does."""
        service = self.service
        running = set(service.requests_of(in_flight))
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
        """The bars of calls that run, and of those that ended lately."""
        instances = self.service.dispatcher.scheduler.instances.values()
        live = [_running(each.batch) for each in instances if each.batch is not None]
        calls = self._calls(now)
        failed = (call for call in calls if call.failure is not None)
        self._failed_seconds += sum(max(call.ended - call.started, 0.0) for call in failed)
        return live, [_ended(call) for call in calls]

    def _calls(self, now: float) -> list[RecentCall]:
        """Those that ended since the last look; the first time, those of the last minute."""
        since = max(self._since, now - SHOWN_S)
        newest_first = takewhile(lambda call: call.ended > since, reversed(self.service.metrics.calls))
        found = list(islice(newest_first, MOST_BARS))[::-1]
        self._since = found[-1].ended if found else since
        return found


def _running(batch: Batch) -> Bar:
    first = batch.items[0]
    return Bar(first.id, batch.instance, batch.started, background=first.background, count=len(batch.items))


def _ended(call: RecentCall) -> Bar:
    reason = "done" if call.failure is None else "error"
    return Bar(call.first, call.instance, call.started, None, call.ended, call.background, call.items, None, reason)

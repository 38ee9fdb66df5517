"""The whole server at one moment, as the live page is told it."""

import time
from collections import Counter, defaultdict

import msgspec

from chairlift.jobs.store import Counts, Job
from chairlift.server.batches.record import about
from chairlift.server.batches.service import Batches
from chairlift.server.http.tenants import Keys
from chairlift.server.live.items import ItemWatch
from chairlift.server.live.model_look import ModelLook
from chairlift.server.live.sequences import SequenceWatch
from chairlift.server.live.slot_board import SHOWN_S
from chairlift.server.models.registry import Models, ModelService
from chairlift.server.models.sequence_service import SequenceService

# Of each so many are told at most.
_MOST_MODELS, _MOST_TENANTS, _MOST_BATCHES = 32, 50, 20
# Bars of a model that are told in one message, the last ones; whoever comes anew is told of all. So is, the next time,
# whoever was told less than there was.
_MOST_CHANGES = 300

ModelWatch = SequenceWatch | ItemWatch


class TenantLook(msgspec.Struct):
    """A tenant: what it has under way, what ended within the last minute, and what its limits leave, by their names.

    `name` is null for requests without a key or with that of whoever runs the server.
    """

    name: str | None
    running: int = 0
    waiting: int = 0
    ended: int = 0
    tokens: int = 0
    left: dict[str, tuple[float, int]] = {}


class BatchLook(msgspec.Struct):
    """A batch that is not over, and how far it is; `total` is null until its lines are counted."""

    id: str
    state: str
    endpoint: str
    model: str | None
    tenant: str | None
    total: int | None
    completed: int
    failed: int


class Snapshot(msgspec.Struct, kw_only=True):
    """One message. `now` is CLOCK_MONOTONIC, in which bars are told, and `time` the same moment since 1970.

    `loadable` are models that are not loaded. `control` says whether models may be loaded and unloaded, `keys` whether
    there are tenants. `more` counts what is left out, by kind.
    """

    now: float
    time: float
    full: bool
    models: list[ModelLook]
    loadable: list[str]
    control: bool
    keys: bool
    tenants: list[TenantLook]
    batches: list[BatchLook]
    more: dict[str, int]


class Observer:
    """Looks at everything, a few times a second, as long as somebody watches."""

    def __init__(self, models: Models, batches: Batches, keys: Keys, model_control: bool) -> None:
        self._models, self._batches, self._keys = models, batches, keys
        self._control = keys.needed or model_control
        self._watches: dict[ModelService, ModelWatch] = {}
        # Whether the next message has to tell all: some bars were left out, or a model took the place of another.
        self.needs_full = False
        # Requests and tokens of those that ended, by tenant, for each second of the last minute in which any did.
        self._ended: dict[int, tuple[Counter[str | None], Counter[str | None]]] = {}

    def look(self) -> Snapshot:
        """The present moment, with the bars that are new or have changed since the last one."""
        now = time.monotonic()
        services = self._models.all()
        known, self._watches = self._watches, {}
        for service in services[:_MOST_MODELS]:
            self._watches[service] = known.get(service) or _watch(service)
        looks = [watch.look(now) for watch in self._watches.values()]
        for service, look in zip(self._watches, looks, strict=True):
            look.newest = self._models.find(service.name) is service
        # What is new may have the name of a model that is gone, whose bars nobody would hear the end of.
        has_new = bool(known) and not self._watches.keys() <= known.keys()
        self.needs_full = has_new or any(len(look.bars) > _MOST_CHANGES for look in looks)
        for look in looks:
            look.bars = look.bars[-_MOST_CHANGES:]
        tenants = self._tenants(now) if self._keys.needed else []
        batches = self._batches.under_way()
        loadable = [name for name, service in self._models.index() if service is None]
        more = {
            "models": len(services) - len(looks),
            "loadable": max(len(loadable) - _MOST_MODELS, 0),
            "tenants": max(len(tenants) - _MOST_TENANTS, 0),
            "batches": max(len(batches) - _MOST_BATCHES, 0),
        }
        return Snapshot(
            now=now,
            time=time.time(),
            full=False,
            models=looks,
            loadable=loadable[:_MOST_MODELS],
            control=self._control and self._models.changeable,
            keys=self._keys.needed,
            tenants=tenants[:_MOST_TENANTS],
            batches=[_batch(job, counts) for job, counts in batches[:_MOST_BATCHES]],
            more={kind: count for kind, count in more.items() if count},
        )

    def with_all_bars(self, snapshot: Snapshot) -> Snapshot:
        """The same moment for somebody who knows nothing yet."""
        looks = [
            msgspec.structs.replace(look, bars=watch.board.bars)
            for look, watch in zip(snapshot.models, self._watches.values(), strict=True)
        ]
        return msgspec.structs.replace(snapshot, full=True, models=looks)

    def _tenants(self, now: float) -> list[TenantLook]:
        """The busiest first."""
        found: defaultdict[str | None, TenantLook] = defaultdict(lambda: TenantLook(None))
        for tenant in self._keys.all():
            found[tenant.name] = TenantLook(tenant.name, left=tenant.left())
        for watch in self._watches.values():
            for name, load in watch.load.items():
                found[name].running += load.running
                found[name].waiting += load.waiting
                for each in load.ended:
                    ends, read = self._ended.setdefault(int(each.ended), (Counter(), Counter()))
                    ends[name] += 1
                    read[name] += (each.prompt_tokens or 0) + (each.tokens or 0)
        self._ended = {second: each for second, each in self._ended.items() if second >= now - SHOWN_S}
        for ends, read in self._ended.values():
            for name, count in ends.items():
                found[name].ended += count
                found[name].tokens += read[name]
        for name, look in found.items():
            look.name = name
        return sorted(found.values(), key=lambda look: (-look.running - look.waiting, -look.ended, look.name or ""))


def _watch(service: ModelService) -> ModelWatch:
    return SequenceWatch(service) if isinstance(service, SequenceService) else ItemWatch(service)


def _batch(job: Job, counts: Counts) -> BatchLook:
    noted = about(job)
    return BatchLook(
        job.id, job.state, noted.endpoint, noted.model, job.tenant, job.total, counts.completed, counts.failed
    )

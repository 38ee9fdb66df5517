"""A language model that somebody watches."""

from collections import defaultdict

from chairlift.engine.sequences.messages import EngineStats
from chairlift.server.live.model_look import BEHIND_LIVE, JUST_COME, LogReader, ModelLook, Tally, TenantLoad, look_of
from chairlift.server.live.slot_board import Bar, SlotBoard
from chairlift.server.models.request_log import EndedRequest
from chairlift.server.models.sequence_service import Sample, SequenceService
from chairlift.server.requests.request_view import WHY_WAITING


class SequenceWatch:
    """Reads what its service and its client know; `look` costs what there are live requests, and nothing a token."""

    def __init__(self, service: SequenceService) -> None:
        self.service = service
        self.load: dict[str | None, TenantLoad] = {}
        self.board = SlotBoard(service.slots)
        metrics = service.metrics
        self._tally = Tally([metrics.time_to_first_token, metrics.inter_token, metrics.queue_time])
        self._log = LogReader(service.log)
        self._most = 0.0

    def look(self, now: float) -> ModelLook:
        """The model now, with the bars that are new or have changed since the last look."""
        service, stats = self.service, self.service.client.stats
        told = look_of(service, "sequence", service.client.config.slots)
        told.running, told.waiting = stats.running, stats.waiting
        told.background_running, told.background_waiting = stats.background_running, stats.background_waiting
        if stats.waiting:
            reason = stats.waiting_reason or ""
            told.queue = [(WHY_WAITING.get(reason, JUST_COME), stats.waiting)]
        if stats.background_waiting:
            told.queue = [*told.queue, (BEHIND_LIVE, stats.background_waiting)]
        if stats.kv_blocks_total:
            told.kv = stats.kv_blocks_used, stats.kv_blocks_cached, stats.kv_blocks_total
        metrics = service.metrics
        rates, (told.ttft, told.itl, told.queue_time) = self._tally.look(
            now, metrics.generation_tokens, metrics.computed_tokens
        )
        if rates is not None:
            told.written, told.computed = rates
            self._most = told.most = max(self._most, told.written)
        told.limit = _limit(stats, service)
        told.bars = self.board.update(*self._bars(now), now)
        return told

    def _bars(self, now: float) -> tuple[list[Bar], list[Bar]]:
        """The bars of those that run, and of those that ended lately; and what each tenant has."""
        live: list[Bar] = []
        ended: list[Bar] = []
        load: defaultdict[str | None, TenantLoad] = defaultdict(TenantLoad)
        for owner, samples in self.service.log.live.items():
            for sample in samples.values():
                stream = sample.stream
                if stream.done:
                    ended += _ended_sample(sample)
                elif stream.running_since:
                    load[owner].running += 1
                    live.append(_live_sample(sample))
                else:
                    load[owner].waiting += 1
        for owner, each in self._log.read(now):
            load[owner].ended.append(each)
            ended += _ended(owner, each)
        self.load = load
        return live, ended


def _live_sample(sample: Sample) -> Bar:
    stream, began = sample.stream, sample.stream.beginning
    first = None if began is None else began.first_token
    request = stream.request
    return Bar(request.id, 0, stream.running_since, first, background=request.background, owner=sample.owner)


def _ended_sample(sample: Sample) -> list[Bar]:
    """The bar of one that has been computed, and has yet to be read, if it ever ran."""
    stream, began = sample.stream, sample.stream.beginning
    if began is None or not stream.ended:
        return []
    request = stream.request
    return [Bar(request.id, 0, began.scheduled, began.first_token, stream.ended, request.background, 1, sample.owner)]


def _ended(owner: str | None, each: EndedRequest) -> list[Bar]:
    """The bar of one that ended, if it ever ran."""
    if each.decode_s is None or each.prefill_s is None:
        return []
    first = each.ended - each.decode_s
    start = first - each.prefill_s
    return [Bar(each.id, 0, start, first, each.ended, each.background, 1, owner, each.finish_reason)]


def _limit(stats: EngineStats, service: SequenceService) -> float | None:
    """Tokens a second with all slots taken by requests as long as the present ones; None where it is not known."""
    info, costs = service.client.info, stats.coefficients
    running = stats.running + stats.background_running
    if costs is None or info is None or not running:
        return None
    slots = service.client.config.slots
    read = slots * stats.kv_blocks_used * info.block_size / running
    return slots / (costs.step + costs.token * slots + (costs.kv_token + costs.pair) * read)

"""What would have made a request faster: what there is to try, and what the twin makes of it in words."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from chairlift.config.sequences import SequenceConfig
from chairlift.core.items.limits import BatchLimits
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.what_if import Change, SequenceQuestion, WhatIfAnswer
from chairlift.server.http.api_errors import ApiError
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.request_log import EndedRequest, Viewer
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.requests.request_view import ChangeView, WhatIfView
from chairlift.server.twin.past_traffic import around, past_of
from chairlift.server.twin.twin import Twin

# A change counts if it saves so much, and the twin is believed if it is no further off.
_LEAST_SAVED, _BELIEVED = 0.1, 0.3
_MOST_SLOTS, _MOST_TOKENS = 1024, 2**17
# Slots of continuous batching where there was one place.
_CONTINUOUS_SLOTS = 8
# Before everybody: a level is worth a second of waiting, unless the settings say otherwise.
_FIRST = -1000


class _Alternative(NamedTuple):
    """What to try, in words that follow "with", and the setting that it is, if any."""

    words: str
    change: Change
    setting: str | None = None
    value: Any = None


async def what_if(
    twin: Twin, viewer: Viewer, service: SequenceService | ItemService, ended: EndedRequest
) -> WhatIfView:
    """What would have made a viewer's request faster that was answered.

    Raises ApiError (409) if settings changed while it was there, and as `around` and `Twin.ask`.
    """
    arrival = ended.ended - (ended.total_s or 0.0)
    if not service.former.steady(arrival, ended.ended):
        problem = f"the settings of `{service.name}` changed while it was there, so nothing else can be told from it"
        raise ApiError(409, problem, code="settings_changed")
    past = past_of(service, arrival)
    of = past.of
    tried = list(_of_sequence(of.config, ended) if isinstance(of, SequenceQuestion) else _of_items(of.limits))
    changes = [each.change for each in tried]
    _, answer = await twin.ask(lambda: around(past, ended, changes), viewer)
    return _view(answer, tried, ended.total_s or 0.0)


def _of_sequence(config: SequenceConfig, ended: EndedRequest) -> Iterator[_Alternative]:
    """Other settings of a language model, and another place of the request in its traffic."""
    strategy, slots, tokens = STRATEGIES[config.strategy], config.slots, config.max_num_batched_tokens
    if strategy.slots_setting is not None:
        for more in (2 * slots, 4 * slots):
            if more <= _MOST_SLOTS:
                wanted = {strategy.slots_setting: more, "max_num_batched_tokens": max(tokens, more)}
                changed = msgspec.structs.replace(config, **wanted)
                words = f"{strategy.slots_setting} = {more}{_more_tokens(config, changed)}"
                yield _Alternative(words, Change(config=changed), strategy.slots_setting, more)
    if strategy.closes_batch or strategy.slots_setting is None:
        most = slots if slots > 1 else _CONTINUOUS_SLOTS
        changed = with_strategy(config, "continuous", most)
        words = f'strategy = "continuous" and max_num_seqs = {most}{_more_tokens(config, changed)}'
        yield _Alternative(words, Change(config=changed), "strategy", "continuous")
    for other in (2 * tokens, tokens // 2):
        if slots <= other <= _MOST_TOKENS:
            yield _setting(config, "max_num_batched_tokens", other)
    if "target_itl_ms" in strategy.settings:
        yield from _targets(config, ended)
    if "max_wait_ms" in strategy.settings and config.max_wait_ms:
        yield _setting(config, "max_wait_ms", 0.0)
    missing = (ended.prompt_tokens or 0) - (ended.cached_tokens or 0)
    if config.enable_prefix_caching and missing > config.block_size:
        yield _Alternative("its prompt in the prefix cache", Change(cached=True))
    yield from _other_places()


def _targets(config: SequenceConfig, ended: EndedRequest) -> Iterator[_Alternative]:
    """Another target for the time between tokens, or none."""
    if config.target_itl_ms is not None:
        yield _setting(config, "target_itl_ms", 2 * config.target_itl_ms)
        words = "no target_itl_ms"
        changed = msgspec.structs.replace(config, target_itl_ms=None)
        yield _Alternative(words, Change(config=changed), "target_itl_ms", None)
    elif ended.steps and ended.decode_s:
        # What a step of its answer took on average: those that took longer had prompts of others in them.
        target = round(max(1000 * ended.decode_s / ended.steps, 1.0), 1)
        yield _setting(config, "target_itl_ms", target)


def _of_items(limits: BatchLimits) -> Iterator[_Alternative]:
    """Other limits of a model that answers in one call, and another place of the request in its traffic."""
    size = limits.max_batch_size
    for other in (2 * size, size // 2):
        if 1 <= other <= _MOST_SLOTS:
            changed = msgspec.structs.replace(limits, max_batch_size=other)
            yield _Alternative(f"max_batch_size = {other}", Change(limits=changed), "max_batch_size", other)
    if limits.max_wait:
        changed = msgspec.structs.replace(limits, max_wait=0.0)
        yield _Alternative("max_wait_ms = 0", Change(limits=changed), "max_wait_ms", 0)
    if limits.target_latency is not None:
        changed = msgspec.structs.replace(limits, target_latency=None)
        yield _Alternative("no target_latency_ms", Change(limits=changed), "target_latency_ms", None)
    yield from _other_places()


def _other_places() -> Iterator[_Alternative]:
    yield _Alternative("a priority before all others", Change(priority=_FIRST), "X-Request-Priority", _FIRST)
    yield _Alternative("another machine like this one beside it", Change(replicas=2))


def _more_tokens(config: SequenceConfig, changed: SequenceConfig) -> str:
    """What must be raised along with the slots, each of which needs a token in a step: in words, where it is."""
    tokens = changed.max_num_batched_tokens
    return f" and max_num_batched_tokens = {tokens}" if tokens > config.max_num_batched_tokens else ""


def _setting(config: SequenceConfig, name: str, value: float) -> _Alternative:
    changed = msgspec.structs.replace(config, **{name: value})
    return _Alternative(f"{name} = {value:g}", Change(config=changed), name, value)


def _view(answer: WhatIfAnswer, tried: Sequence[_Alternative], measured: float) -> WhatIfView:
    now = answer.now.target.total_s if answer.now.target is not None else None
    untried = [each.words for each, told in zip(tried, answer.changed, strict=True) if told is None]
    if now is None:
        text = f"the twin does not get to answer it, though the server did in {measured:.2f} s: it can't tell"
        return WhatIfView(round(measured, 4), None, [], untried, text)
    found = []
    for each, told in zip(tried, answer.changed, strict=True):
        times = told.target if told is not None else None
        if times is None or times.total_s is None or times.total_s > (1 - _LEAST_SAVED) * now:
            continue
        first = None if times.first_s is None else round(times.first_s, 4)
        saves = round(1 - times.total_s / now, 3)
        found.append(ChangeView(each.words, each.setting, each.value, first, round(times.total_s, 4), saves))
    found.sort(key=lambda each: each.total_s)
    return WhatIfView(round(measured, 4), round(now, 4), found, untried, _words(found, now, measured))


def _words(found: Sequence[ChangeView], now: float, measured: float) -> str:
    said = [f"it took {measured:.2f} s, and the twin takes {now:.2f} s for it as it was"]
    if abs(now - measured) > _BELIEVED * measured:
        said.append("that is far off, so what follows is a hint at best")
    ways = [f"with {each.change} {each.total_s:.2f} s ({100 * each.saves:.0f}% less)" for each in found]
    said.append(", ".join(ways) if ways else "none of what was tried would have made it 10% faster")
    return "; ".join(said)

"""Settings of a model other than its own: as a client names them, what they make of its own, and what is refused."""

from math import inf
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chairlift.config.sequences import SequenceConfig
from chairlift.config.units import seconds
from chairlift.core.items.limits import BatchLimits
from chairlift.core.sequences.strategy import STRATEGIES, readers_of
from chairlift.errors import ConfigError, InvalidRequest, clip
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.what_if import Change
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.sequence_service import SequenceService

_Count = Annotated[int, Meta(ge=1, le=1024)]
_Milliseconds = Annotated[float, Meta(gt=0, le=60_000)]


class SettingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of a model, named as in the configuration; what is left out stays as it is. A target of null is none."""

    strategy: str | None = None
    max_num_seqs: _Count | None = None
    batch_size: _Count | None = None
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=131_072)] | None = None
    target_itl_ms: _Milliseconds | UnsetType | None = UNSET
    max_wait_ms: Annotated[float, Meta(ge=0, le=60_000)] | None = None
    max_batch_size: _Count | None = None
    target_latency_ms: _Milliseconds | UnsetType | None = UNSET


_TARGETS = ("target_itl_ms", "target_latency_ms")
# What each kind of model has, as it is told; the rest is refused by name.
_OF_SEQUENCES = ("strategy", "max_num_seqs", "batch_size", "max_num_batched_tokens", "target_itl_ms", "max_wait_ms")
_OF_ITEMS = ("max_batch_size", "max_wait_ms", "target_latency_ms")
_TOKENS = "max_num_batched_tokens"
BODY = msgspec.json.Decoder(SettingsBody)


class OtherSettings(NamedTuple):
    """What is to be changed, and the settings as they are told before and after; None if nothing is.

    `unread` are those with which the server was started, and with another strategy would not start: with their
    defaults, which it takes.
    """

    change: Change | None
    now: dict[str, Any]
    wanted: dict[str, Any] | None
    unread: dict[str, Any] = {}


def given_in(body: SettingsBody) -> dict[str, Any]:
    """Those that a body names."""
    return {
        name: value
        for name in SettingsBody.__struct_fields__
        if (value := getattr(body, name)) is not UNSET and (value is not None or name in _TARGETS)
    }


def other_settings(service: SequenceService | ItemService, given: dict[str, Any]) -> OtherSettings:
    """The settings of a model with these instead of its own. Raises InvalidRequest by name."""
    known, kind = (_OF_ITEMS, "one call") if isinstance(service, ItemService) else (_OF_SEQUENCES, "tokens")
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{name} is no setting of `{service.name}`, which answers in {kind}", name)
    if isinstance(service, ItemService):
        service.loaded()
        limits = service.dispatcher.limits
        if not given:
            return OtherSettings(None, _told_limits(limits), None)
        changed_limits = _changed_limits(limits, given)
        return OtherSettings(Change(limits=changed_limits), _told_limits(limits), _told_limits(changed_limits))
    config, tuner = service.client.config, service.metrics.tuner
    if not given:
        return OtherSettings(None, _told_config(config), None)
    slots = given.get(STRATEGIES[config.strategy].slots_setting or "", 0)
    if tuner is not None and slots > config.max_num_batched_tokens:
        # So few tokens nobody has set: the tuner may have as many as were configured.
        given = {_TOKENS: min(slots, tuner.configured.max_num_batched_tokens)} | given
    changed = _changed_config(config, given)
    unread = _unread(service.client.configured, changed.strategy)
    return OtherSettings(Change(config=changed), _told_config(config), _told_config(changed), unread)


def configured_with(given: dict[str, Any], configured: SequenceConfig) -> SequenceConfig:
    """What was configured, with these instead, of a model whose settings may have been turned since then.

    Tokens that are given for the slots that there are now may be too few for those that were configured.
    """
    slots = STRATEGIES[configured.strategy].slots_setting
    if slots is not None and given.get(_TOKENS, inf) < configured.slots:
        given = {slots: given[_TOKENS]} | given
    return msgspec.structs.replace(configured, **given)


def _changed_config(config: SequenceConfig, given: dict[str, Any]) -> SequenceConfig:
    strategy = given.get("strategy", config.strategy)
    if strategy not in STRATEGIES:
        problem = f"strategy must be one of {', '.join(STRATEGIES)}, got {clip(strategy, 100)!r}"
        raise InvalidRequest(problem, "strategy")
    for name in given:
        readers = readers_of(name)
        if readers and strategy not in readers:
            problem = f"{name} has no effect under the {strategy} strategy: it belongs to {' and '.join(readers)}"
            raise InvalidRequest(problem, name)
    if strategy != config.strategy:
        config = with_strategy(config, strategy, config.slots)
    try:
        return msgspec.structs.replace(config, **given)
    except ConfigError as error:
        at_fault = next((name for name in given if name in str(error)), next(iter(given)))
        raise InvalidRequest(str(error), at_fault) from None


def _unread(configured: SequenceConfig, strategy: str) -> dict[str, Any]:
    """The defaults of what was configured and has no effect under a strategy."""
    return {
        field.name: field.default
        for field in msgspec.structs.fields(configured)
        if (readers := readers_of(field.name))
        and strategy not in readers
        and getattr(configured, field.name) != field.default
    }


def _changed_limits(limits: BatchLimits, given: dict[str, Any]) -> BatchLimits:
    wanted = {name: given[name] for name in ("max_batch_size",) if name in given}
    if "max_wait_ms" in given:
        wanted["max_wait"] = given["max_wait_ms"] / 1000
    if "target_latency_ms" in given:
        wanted["target_latency"] = seconds(given["target_latency_ms"])
        if wanted["target_latency"] is not None:
            wanted.setdefault("max_wait", 0.0)
    try:
        return msgspec.structs.replace(limits, **wanted)
    except ValueError:
        problem = "with target_latency_ms the wait follows from it; leave max_wait_ms out, or make the target null"
        raise InvalidRequest(problem, "max_wait_ms") from None


def _told_config(config: SequenceConfig) -> dict[str, Any]:
    """Those that the strategy reads."""
    names = (name for name in _OF_SEQUENCES if not (read := readers_of(name)) or config.strategy in read)
    return {name: getattr(config, name) for name in names}


def _told_limits(limits: BatchLimits) -> dict[str, Any]:
    """Milliseconds as they were given: 1000 times a thousandth of them may differ in the last digits."""
    target = limits.target_latency
    return {
        "max_batch_size": limits.max_batch_size,
        "max_wait_ms": round(1000 * limits.max_wait, 6),
        "target_latency_ms": None if target is None else round(1000 * target, 6),
    }

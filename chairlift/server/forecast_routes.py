"""POST /v1/models/{model}/forecast: what the last minutes would have been like with other settings."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.config.sequences import SequenceConfig
from chairlift.config.units import seconds
from chairlift.core.items.limits import BatchLimits
from chairlift.core.sequences.policy import POLICIES, readers_of
from chairlift.errors import ConfigError, InvalidRequest, clip
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.what_if import Change, Foretold, ItemQuestion, SequenceQuestion
from chairlift.server.http.exchange import as_json, read_body, until_gone
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import model_in_path
from chairlift.server.models.seen import WINDOW_S, lately, past_of
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.models.twin import Twin

_Count = Annotated[int, Meta(ge=1, le=1024)]
_Milliseconds = Annotated[float, Meta(gt=0, le=60_000)]


class ForecastBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings to try, named as in the configuration; what is left out stays as it is. A target of null is none."""

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
_BODY = msgspec.json.Decoder(ForecastBody)


async def show_forecast(request: Request) -> Response:
    """The last minutes as they were, as the twin has them, and as it has them with these settings."""
    body = decode(await read_body(request, untyped=True) or b"{}", _BODY)
    service = model_in_path(request, request.path_params["model"])
    given = {
        name: value
        for name in ForecastBody.__struct_fields__
        if (value := getattr(body, name)) is not UNSET and (value is not None or name in _TARGETS)
    }
    change, now, tried = _tried(service, given)
    past, changes = past_of(service), [] if change is None else [change]
    twin: Twin = request.app.state.twin
    async with until_gone(request.receive):
        question, answer = await twin.ask(lambda: lately(past, changes))
    (foretold,) = answer.changed or [None]
    return as_json(
        {
            "object": "forecast",
            "model": service.name,
            "window_s": WINDOW_S,
            "seen": _seen(question),
            "settings": {"now": now, "tried": tried},
            "measured": answer.measured,
            "now": answer.now.figures,
            "tried": _figures(foretold),
            **_to_copy(now, tried),
        }
    )


def _figures(foretold: Foretold | None) -> Any:
    return None if foretold is None else foretold.figures


def _seen(question: SequenceQuestion | ItemQuestion) -> dict[str, int]:
    """The largest step or call in what the twin knows: beyond it goes by the cost model alone."""
    if isinstance(question, SequenceQuestion):
        most = max(step.requests for step in question.steps), max(step.tokens for step in question.steps)
        return {"steps": len(question.steps), "most_requests": most[0], "most_tokens": most[1]}
    return {"calls": len(question.calls), "most_items": max(call.items for call in question.calls)}


def _tried(
    service: SequenceService | ItemService, given: dict[str, Any]
) -> tuple[Change | None, dict[str, Any], dict[str, Any] | None]:
    """What is to be changed, if anything, and the settings before and after. Raises InvalidRequest by name."""
    known, kind = (_OF_ITEMS, "one call") if isinstance(service, ItemService) else (_OF_SEQUENCES, "tokens")
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{name} is no setting of `{service.name}`, which answers in {kind}", name)
    if isinstance(service, ItemService):
        service.loaded()
        limits = service.dispatcher.limits
        if not given:
            return None, _told_limits(limits), None
        changed_limits = _changed_limits(limits, given)
        return Change(limits=changed_limits), _told_limits(limits), _told_limits(changed_limits)
    config = service.client.config
    if not given:
        return None, _told_config(config), None
    changed = _changed_config(config, given)
    return Change(config=changed), _told_config(config), _told_config(changed)


def _changed_config(config: SequenceConfig, given: dict[str, Any]) -> SequenceConfig:
    strategy = given.get("strategy", config.strategy)
    if strategy not in POLICIES:
        problem = f"strategy must be one of {', '.join(POLICIES)}, got {clip(strategy, 100)!r}"
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
    target = limits.target_latency
    return {
        "max_batch_size": limits.max_batch_size,
        "max_wait_ms": 1000 * limits.max_wait,
        "target_latency_ms": None if target is None else 1000 * target,
    }


def _to_copy(now: dict[str, Any], tried: dict[str, Any] | None) -> dict[str, str]:
    """What to start a server with to have the settings that were tried, where they differ from those it has."""
    changed = {name: value for name, value in (tried or {}).items() if now.get(name, UNSET) != value}
    flags = " ".join(
        f"--{name.replace('_', '-')} {_number(value)}" for name, value in changed.items() if value is not None
    )
    lines = [f"# without {name}" if value is None else f"{name} = {_toml(value)}" for name, value in changed.items()]
    return {"flags": flags, "toml": "\n".join(lines)}


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else _number(value)

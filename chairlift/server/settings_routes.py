"""POST /v1/models/{model}/settings: other settings for a model that runs, from its next step or call on."""

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import InvalidRequest
from chairlift.plan.tuner import COUNTS
from chairlift.server.http.exchange import as_json, read_body
from chairlift.server.http.origins import check_same_site
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import model_in_path
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.twin.settings_change import BODY, OtherSettings, configured_with, given_in, other_settings

log = logging.getLogger(__name__)


async def change_settings(request: Request) -> Response:
    """Have a model go by other settings until it is loaded again. Nobody who runs is stopped."""
    check_same_site(request.scope)
    given = given_in(decode(await read_body(request), BODY))
    service = model_in_path(request, request.path_params["model"])
    if not given:
        raise InvalidRequest("the body names no setting, such as max_num_seqs or max_batch_size")
    other = other_settings(service, given)
    if isinstance(service, ItemService):
        _change_items(service, other)
    else:
        _change_sequences(service, other, given)
    log.info("%s: settings are now %s", service.name, other.wanted)
    return as_json({"object": "model.settings", "model": service.name, "settings": other.wanted, "before": other.now})


def _change_items(service: ItemService, other: OtherSettings) -> None:
    assert other.change is not None
    assert other.change.limits is not None
    limits = other.change.limits
    if limits.max_batch_size > service.most_items:
        raise _too_many("max_batch_size", limits.max_batch_size, service.most_items, service.name)
    service.change_limits(limits)


def _change_sequences(service: SequenceService, other: OtherSettings, given: dict[str, Any]) -> None:
    assert other.change is not None
    assert other.change.config is not None
    config, client = other.change.config, service.client
    if client.info is None:
        raise InvalidRequest(f"`{service.name}` is not loaded yet, and has the settings that it is loaded with")
    _check_live(client.configured, config, given, service.name)
    service.retune(config)
    tuner = service.metrics.tuner
    if tuner is not None:
        tuner.begin_anew(configured_with(given, tuner.configured), config)


def _check_live(configured: SequenceConfig, config: SequenceConfig, given: dict[str, Any], model: str) -> None:
    """Refuse what takes loading the model again. Raises InvalidRequest by name."""
    if config.strategy != configured.strategy:
        problem = f"the strategy of a running model can't change: start `{model}` with --strategy {config.strategy}"
        raise InvalidRequest(problem, "strategy")
    # What memory and buffers are for: no more than a model was loaded with.
    for name in COUNTS:
        most = getattr(configured, name)
        if name in given and most is not None and given[name] > most:
            raise _too_many(name, given[name], most, model)
    if (config.target_itl_ms is None) != (configured.target_itl_ms is None):
        has, other = ("none", "one") if configured.target_itl_ms is None else ("one", "none")
        problem = f"`{model}` was loaded with {has} (target_itl_ms) and can't get {other} while it runs: start it so"
        raise InvalidRequest(problem, "target_itl_ms")


def _too_many(name: str, value: int, most: int, model: str) -> InvalidRequest:
    problem = f"{name} is {value}, and `{model}` was loaded with {most}, which is the most: start it with more"
    return InvalidRequest(problem, name)

"""What a client may change of a model as it is loaded: some of Triton's model configuration, for that one load."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from chairlift.bodies import decode
from chairlift.errors import InvalidRequest
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models
from chairlift.server.oip.parameters import refuse_others
from chairlift.server.oip.statistics import model_config

_decoder = msgspec.json.Decoder(dict[str, Any])
_MAX_DIGITS = 12
# The most that a client may set: microseconds, and processes.
_MAX_BATCH_SIZE, _MAX_DELAY, _MAX_COUNT = 65_536, 60_000_000, 64
Changes = dict[str, Any]


def read_changes(models: Models, name: str, parameters: Mapping[str, Any] | None) -> Changes:
    """The settings that a load is to have instead of its own. Raises InvalidRequest, naming what can't be honoured.

    What can't be changed may be there as the model now has it, so that a configuration that was asked for can be sent
    back.
    """
    refuse_others(parameters, "config")
    given = (parameters or {}).get("config")
    if given is None:
        return {}
    if not isinstance(given, str):
        raise InvalidRequest("the parameter 'config' must be a model configuration as JSON text", "config")
    config = decode(given.encode("utf-8", "surrogatepass"), _decoder, "config")
    model = models.find(name)
    if model is not None and not isinstance(model, ItemService):
        raise InvalidRequest("config is for models that answer in one call, which a language model does not", "config")
    known = model_config(model) if model is not None and model.ready else {"name": name, "backend": "chairlift"}
    changes: Changes = {}
    _take(config, known, _CONFIG, "config", changes)
    return changes


def _take(config: Mapping[str, Any], known: Any, readers: Mapping[str, Any], where: str, changes: Changes) -> None:
    """Read an object of the configuration, with what the model now has there.

    A model without a batch axis has a `max_batch_size` of 0, which is no size.
    """
    now = known if isinstance(known, Mapping) else {}
    for name, value in config.items():
        reader = readers.get(name)
        place = f"{where}.{name[:80]}"
        if isinstance(reader, Mapping) and isinstance(value, dict):
            _take(value, now.get(name), reader, place, changes)
        elif callable(reader) and not (name == "max_batch_size" and now.get(name) == 0):
            changes |= reader(value, place)
        elif name not in now or value != now[name]:
            problem = "is not what the model has, and can't be changed; leave it out"
            raise InvalidRequest(f"{place} {problem}", place)


def _number(least: int, most: int, setting: str, divisor: int = 1) -> Callable[[Any, str], Changes]:
    """A reader of a whole number, which JSON of protobuf may write as text."""

    def read(value: Any, where: str) -> Changes:
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidRequest(f"{where} must be a whole number from {least} to {most}", where)
        return {setting: value if divisor == 1 else value / divisor}

    return read


def _groups(value: Any, where: str) -> Changes:
    """`instance_group`: one of them, with a count and nothing else."""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict) or value[0].keys() != {"count"}:
        raise InvalidRequest(f"{where} must be one group with nothing but a count", where)
    return _number(1, _MAX_COUNT, "instances")(value[0]["count"], f"{where}[0].count")


_CONFIG: dict[str, Any] = {
    "max_batch_size": _number(1, _MAX_BATCH_SIZE, "max_batch_size"),
    "dynamic_batching": {"max_queue_delay_microseconds": _number(0, _MAX_DELAY, "max_wait_ms", divisor=1000)},
    "instance_group": _groups,
}

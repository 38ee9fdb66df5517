"""How the lines of a run are sent: how many at once, in which order, and why."""

from typing import NamedTuple

import msgspec

from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.config.run import Order
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import ModelConfig, ServedModel, Settings
from chairlift.runners.items import ItemInfo

# Batches for each instance: the one that runs, one that is ready to follow, and two to be made ready.
_BATCHES = 4


# Nobody waits for a single text of a job, and more of them in a call cost less each.
_TEXTS, _TOKENS = 128, 32_768


class Plan(NamedTuple):
    """The choice, and a sentence that says why."""

    concurrency: int
    order: Order
    reason: str


def for_throughput(settings: Settings) -> Settings:
    """The same settings, with larger batches for encoders that were given no size, and no deadlines for items."""
    return settings._replace(models=tuple(each._replace(config=_patient(each.config)) for each in settings.models))


def _patient(config: ModelConfig) -> ModelConfig:
    if not isinstance(config, ItemConfig):
        return config
    config = msgspec.structs.replace(config, max_queue_ms=None, timeout_ms=None)
    if config.kind != "encoder" or config.max_batch_size is not None:
        return config
    tokens = config.max_batch_tokens or _TOKENS
    size = min(_TEXTS, config.max_waiting)
    return msgspec.structs.replace(config, max_batch_size=size, max_batch_tokens=tokens)


def least_at_once(settings: Settings) -> int:
    """So many lines must be under way: static batches leave only when they are full, and each waits for the others."""
    configs = [served.config for served in settings.models]
    sizes = [each.slots for each in configs if isinstance(each, SequenceConfig) and each.strategy == "static"]
    return sum(size - 1 for size in sizes) + 1


def plan_for(served: ServedModel, info: ItemInfo | None, max_waiting: int) -> Plan:
    """What suits a model; `info` is what is known of one that answers in one call, `max_waiting` the server's."""
    config = served.config
    if isinstance(config, SequenceConfig):
        return _for_language_model(config, max_waiting)
    assert info is not None
    return _for_items(config, info)


def _for_language_model(config: SequenceConfig, max_waiting: int) -> Plan:
    slots = config.slots
    order: Order = "prefix" if config.enable_prefix_caching else "file"
    reason = f"{config.strategy}, {slots} slots"
    if config.strategy == "continuous":
        reason += ": a slot is taken again at the step after its sequence ended, whatever the others do"
    elif config.strategy != "none":
        reason += ", as asked for: a batch computes until its longest sequence ends, so continuous would be faster"
    else:
        reason = "none, as asked for: one sequence at a time, so continuous would be faster"
    if order == "prefix":
        reason += "; lines that begin alike go together, for the prefix cache"
    return Plan(min(2 * slots, max_waiting), order, reason)


def _for_items(config: ItemConfig, info: ItemInfo) -> Plan:
    size = config.max_batch_size or info.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    concurrency = min(_BATCHES * size * config.instances, config.max_waiting)
    reason = f"batches of {size}"
    if config.kind == "encoder":
        return Plan(concurrency, "file", f"{reason} texts without padding, so in the order of the file")
    return Plan(concurrency, "length", f"{reason}, longest lines first in each window, so that what pads pads little")


class StaticSteps:
    """How many steps static batches would take for what has been generated, in O(1) memory."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._in_batch = self._longest = self._full = 0

    def note(self, tokens: int) -> None:
        """A sequence ended after so many tokens. It shares a batch with those that end next to it."""
        self._longest = max(self._longest, tokens)
        self._in_batch += 1
        if self._in_batch == self._slots:
            self._full += self._longest
            self._in_batch = self._longest = 0

    @property
    def steps(self) -> int:
        """Steps that generate, up to now. Those that only read prompts come on top."""
        return self._full + self._longest

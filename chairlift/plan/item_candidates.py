"""The settings that a plan chooses among for a model that answers in one call, by strategies of the same names."""

from itertools import product
from math import inf
from typing import Any

import msgspec

from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.plan.machine_profile import ItemProfile
from chairlift.plan.targets import LatencyTargets

# What each of them is for items, whose batches are always put together when an instance is free.
ITEM_STRATEGIES = {
    "none": "one item in a call",
    "static": "full batches only, however long they take to come together",
    "dynamic": "what waits when an instance is free, or after a window, or what is done within a target",
}
_SIZES = (2, 4, 8, 16, 32, 64, 128)
# The window that stands for none: whoever waits for so long was forgotten.
FULL_MS = 60_000.0
# Windows in milliseconds, and as shares of what an answer may take; and targets, as such shares.
_WINDOWS, _WINDOW_SHARES = (0.0, 2.0, 10.0), (0.1, 0.3)
_TARGET_SHARES = (0.5, 0.8, 1.0)
_INSTANCES = (2, 4, 8)
# What a call of background items may take, where there are any.
_BACKGROUND_MS = (10.0, 40.0, 160.0)


def item_candidates(
    base: ItemConfig, strategy: str, targets: LatencyTargets, profile: ItemProfile, background: bool
) -> list[ItemConfig]:
    """Return every configuration of a strategy that is worth a try, each once.

    Batches are no larger than those that were measured, and instances no more than have the cores that they keep busy;
    where those are not known, as many as there are.
    """
    largest = max(call.items for call in profile.calls)
    sizes = [size for size in _SIZES if size <= largest] if strategy != "none" else [1]
    waits: list[dict[str, Any]] = [{"max_wait_ms": 0.0}]
    if strategy == "static":
        waits = [{"max_wait_ms": FULL_MS}]
    elif strategy == "dynamic":
        shares = () if targets.e2e == inf else _WINDOW_SHARES
        windows = [*_WINDOWS, *(round(1000 * share * targets.e2e, 1) for share in shares)]
        waits = [{"max_wait_ms": window} for window in windows]
        if targets.e2e < inf:
            waits += [{"target_latency_ms": round(1000 * share * targets.e2e, 1)} for share in _TARGET_SHARES]
    several = [base.instances]
    if profile.cpus:
        several = [1, *(count for count in _INSTANCES if count * profile.cores <= profile.cpus)]
    steps = _BACKGROUND_MS if background else (base.background_step_ms,)
    found = [
        _with(base, profile, max_batch_size=size, instances=count, background_step_ms=step, **wait)
        for size, wait, count, step in product(sizes or [largest], waits, several, steps)
    ]
    return [config for index, config in enumerate(found) if config not in found[:index]]


def _with(base: ItemConfig, profile: ItemProfile, max_batch_size: int, **changes: Any) -> ItemConfig:
    """Settings in place of others; what is the model's own default is left to it."""
    wait = changes.get("max_wait_ms")
    changes = {"max_wait_ms": None, "target_latency_ms": None} | changes
    if wait == (profile.max_wait_ms or 0.0):
        changes["max_wait_ms"] = None
    size = None if max_batch_size == (profile.max_batch_size or DEFAULT_MAX_BATCH_SIZE) else max_batch_size
    return msgspec.structs.replace(base, max_batch_size=size, **changes)

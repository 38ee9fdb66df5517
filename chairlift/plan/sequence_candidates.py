"""The settings that a plan chooses among for a language model."""

from itertools import product
from math import inf
from typing import Any

import msgspec

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES, readers_of
from chairlift.plan.targets import LatencyTargets

_SLOTS = (2, 4, 8, 16, 32, 64, 128)
_TOKENS, _TOKENS_OF_CLOSED = (128, 256, 512, 1024, 2048), (512, 2048)
# Windows in milliseconds, and as shares of what the first token may take.
_WINDOWS, _WINDOW_SHARES = (0.0, 25.0), (0.1, 0.3)
# What a step may take, as shares of the time between two tokens; its tokens are then bounded by time.
_STEP_SHARES = (0.5, 0.8, 1.0)


def with_strategy(config: SequenceConfig, strategy: str, slots: int, **own: Any) -> SequenceConfig:
    """Return the configuration with another strategy and that many slots, whatever the strategy calls them.

    Of `own` settings, and of those that the configuration has, the strategy keeps what it reads.
    """
    kind = STRATEGIES[strategy]
    changes: dict[str, Any] = {"strategy": strategy}
    for field in msgspec.structs.fields(config):
        readers = readers_of(field.name)
        if field.name == kind.slots_setting:
            changes[field.name] = slots
        elif readers and strategy not in readers:
            changes[field.name] = field.default
        elif field.name in own:
            changes[field.name] = own[field.name]
    tokens = changes.get("max_num_batched_tokens", config.max_num_batched_tokens)
    return msgspec.structs.replace(config, **changes | {"max_num_batched_tokens": max(tokens, slots)})


def sequence_candidates(base: SequenceConfig, strategy: str, targets: LatencyTargets) -> list[SequenceConfig]:
    """Return every configuration of a strategy that is worth a try, each once."""
    kind = STRATEGIES[strategy]
    slots = _SLOTS if kind.slots_setting else (1,)
    budgets = _TOKENS_OF_CLOSED if kind.closes_batch or not kind.slots_setting else _TOKENS
    steps: list[dict[str, Any]] = [{"max_num_batched_tokens": each, "target_itl_ms": None} for each in budgets]
    if "target_itl_ms" in kind.settings and targets.itl < inf:
        within = [round(1000 * share * targets.itl, 1) for share in _STEP_SHARES]
        steps += [{"max_num_batched_tokens": _TOKENS[-1], "target_itl_ms": each} for each in within if each > 0]
    windows = [base.max_wait_ms]
    if "max_wait_ms" in kind.settings:
        shares = () if targets.ttft == inf else _WINDOW_SHARES
        windows = [*_WINDOWS, *(round(1000 * share * targets.ttft, 1) for share in shares)]
    found = [
        with_strategy(base, strategy, count, max_wait_ms=window, **step)
        for count, step, window in product(slots, steps, windows)
    ]
    return [config for index, config in enumerate(found) if config not in found[:index]]

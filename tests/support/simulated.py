"""Profiles of machines that are nothing but formulas, for simulations whose outcome can be told beforehand."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from chairlift.core.cost import Coefficients
from chairlift.plan import item_candidates, sequence_candidates
from chairlift.plan.machine_profile import CallSample, ItemProfile, SequenceProfile, StepSample

COST = Coefficients(8e-3, 2e-4, 5e-7, 1e-7)


def exact_profile(cost: Coefficients = COST, gap: float = 0.0, **settings: int) -> SequenceProfile:
    """Steps take what the cost model says, to the last bit but rounding."""
    shapes = [(1 + index % 16, 1 + index % 16, 40 * (1 + index)) for index in range(32)]
    steps = [
        StepSample(
            sequences, tokens, kv, kv, cost.step + cost.token * tokens + cost.kv_token * kv + cost.pair * kv, gap
        )
        for sequences, tokens, kv in shapes
    ]
    limits = {"max_model_len": 4096, "num_blocks": 10_000, "block_size": 16, "max_num_batched_tokens": 512} | settings
    return SequenceProfile(model="formula", cost=cost, steps=steps, **limits)


def noisy_profile(cost: Coefficients = COST, **settings: int) -> SequenceProfile:
    """The same, but every other step took half as long again."""
    profile = exact_profile(cost, 1e-4, **settings)
    for index in range(0, len(profile.steps), 2):
        step = profile.steps[index]
        profile.steps[index] = StepSample(
            step.sequences, step.tokens, step.kv_tokens, step.pairs, 1.5 * step.seconds, 3e-4
        )
    return profile


def exact_calls(call: float, size: float) -> ItemProfile:
    """Calls take `call` + `size` * computed seconds."""
    calls = [CallSample(count, float(count), call + size * count) for count in range(1, 33)]
    return ItemProfile(model="formula", call=call, size=size, calls=calls)


@contextmanager
def few_candidates() -> Iterator[None]:
    """Have a plan choose among a few settings, which takes a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_candidates, "_SLOTS", (4, 64))
        patch.setattr(sequence_candidates, "_TOKENS", (512, 2048))
        patch.setattr(sequence_candidates, "_TOKENS_OF_CLOSED", (512,))
        patch.setattr(sequence_candidates, "_WINDOW_SHARES", ())
        patch.setattr(item_candidates, "_SIZES", (4, 32))
        patch.setattr(item_candidates, "_WINDOWS", (0.0, 10.0))
        yield

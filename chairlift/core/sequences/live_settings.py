"""Settings that may change while sequences run: what a tuner turns, applied between two steps."""

from math import inf

import msgspec

from chairlift.core.sequences.budget import LatencyBudget, StepTimeBudget
from chairlift.core.sequences.scheduler import SequenceScheduler


class LiveSettings(msgspec.Struct, array_like=True, frozen=True):
    """Slots, tokens of a step, and times in seconds; None is no such bound, which no scheduler gets later."""

    slots: int
    max_num_batched_tokens: int
    max_wait: float
    background_step: float
    step_time: float | None = None
    target_itl: float | None = None


def apply_settings(settings: LiveSettings, scheduler: SequenceScheduler) -> None:
    """Have the next step go by these. Nobody who runs is stopped: with fewer slots nobody starts until one is free.

    A step always has a token for each that runs or may, whatever the settings say.
    """
    held = scheduler.num_running + scheduler.num_background_running + len(scheduler.admitted)
    most = max(settings.max_num_batched_tokens, settings.slots, held)
    scheduler.strategy.slots, scheduler.strategy.max_wait = settings.slots, settings.max_wait
    scheduler.max_num_batched_tokens = scheduler.meter.most = most
    budget, background = scheduler.budget, scheduler.background.budget
    if isinstance(budget, StepTimeBudget):
        budget.most, budget.step_time = most, settings.step_time or inf
    elif isinstance(budget, LatencyBudget):
        budget.most, budget.target = most, settings.target_itl or inf
    if isinstance(background, LatencyBudget):
        background.most, background.target = most, min(settings.background_step, settings.target_itl or inf)

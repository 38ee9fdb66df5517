"""A model whose traffic is simulated under whatever settings it has, for a tuner to turn."""

import msgspec
from support.past import BEGAN, seen_requests, seen_steps, served
from support.simulated import COST, exact_profile

from chairlift.config.sequences import SequenceConfig
from chairlift.plan.trace import TraceRequest
from chairlift.plan.what_if import Change, SequenceQuestion


def question_of(config: SequenceConfig, trace: list[TraceRequest], changes: list[Change]) -> SequenceQuestion:
    """What would be asked of the twin after this traffic under these settings."""
    run = served(config, trace)
    return SequenceQuestion(
        requests=seen_requests(run),
        steps=seen_steps(run),
        changes=changes,
        config=msgspec.structs.replace(config, kv_cache_gb=1.0),
        profile=msgspec.structs.replace(exact_profile(), steps=[]),
        cost=COST,
        loaded_slots=config.slots,
        max_waiting=1024,
        since=BEGAN,
    )

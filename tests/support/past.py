"""What a server would have kept of traffic that was simulated: so the past of a model is known to the last bit."""

import random
from typing import Any

from support.simulated import exact_profile

from chairlift.config.sequences import SequenceConfig
from chairlift.plan.machine_profile import SequenceProfile
from chairlift.plan.seen_traffic import SeenRequest, SeenStep
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest

# What no server's clock is near: everything has happened by then.
BEGAN = 1000.0


def traffic(count: int = 60, rate: float = 4.0, **more: Any) -> list[TraceRequest]:
    """Requests of many lengths, which come by chance."""
    rng, now, trace = random.Random(7), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        about = {"input_length": rng.randint(16, 300), "output_length": rng.randint(5, 40)} | more
        trace.append(TraceRequest(arrival=now, **about))
    return trace


def served(
    config: SequenceConfig, trace: list[TraceRequest], profile: SequenceProfile | None = None, **more: Any
) -> SimulatedRun:
    """What becomes of it under these settings."""
    return simulate([SequenceModel(config, profile or exact_profile())], trace, **more)


def seen_requests(run: SimulatedRun, began: float = BEGAN) -> list[SeenRequest]:
    """The requests as a server keeps them."""
    found = []
    for life in run.requests:
        assert None not in (life.scheduled, life.first, life.end)
        found.append(
            SeenRequest(
                began + life.request.arrival,
                life.request.input_length,
                life.num_tokens,
                cached=life.cached_tokens,
                answered=True,
                scheduled=began + (life.scheduled or 0.0),
                first=began + (life.first or 0.0),
                ended=began + (life.end or 0.0),
            )
        )
    return found


def seen_steps(run: SimulatedRun, began: float = BEGAN) -> list[SeenStep]:
    """The steps as a server keeps them."""
    (steps,) = run.steps.values()
    ends = [start + seconds for start, seconds in zip(steps.began, steps.seconds, strict=True)]
    lives = [(life.first or 0.0, life.end or 0.0) for life in run.requests]
    return [
        SeenStep(
            began + end,
            steps.seconds[index],
            steps.running[index],
            int(steps.tokens[index]),
            sum(first <= end + 1e-9 < last for first, last in lives),
            steps.kv_blocks[index],
        )
        for index, end in enumerate(ends)
    ]

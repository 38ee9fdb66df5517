"""Requests to measure with: how long their prompts and outputs are, and when they come."""

import random
from dataclasses import dataclass

from chairlift.errors import ConfigError
from chairlift.plan.traffic import length_sampler


@dataclass(slots=True)
class TimedRequest:
    """One request of a benchmark. `offset` is its arrival in seconds after the start; lengths are in tokens."""

    offset: float
    prompt_ids: list[int]
    output_len: int


def make_jobs(
    count: int,
    prompt_len: str,
    output_len: str,
    *,
    vocab_size: int,
    max_model_len: int,
    rate: float | None = None,
    seed: int = 0,
) -> list[TimedRequest]:
    """Return `count` jobs, the same for the same arguments.

    With `rate`, arrivals are a Poisson process of that many a second; without, all offsets are 0 (closed loop). Lengths
    are cut so that prompt and output fit `max_model_len`. Raises ConfigError for a malformed specification.
    """
    rng = random.Random(seed)
    prompts = length_sampler(prompt_len, rng, lambda request: request.input_length)
    outputs = length_sampler(output_len, rng, lambda request: request.output_length)
    if max_model_len < 2:
        raise ConfigError(f"max_model_len is {max_model_len}; a prompt and an output need at least 2 tokens")
    jobs, offset = [], 0.0
    for _ in range(count):
        if rate is not None:
            offset += rng.expovariate(rate)
        output = min(max(1, outputs()), max_model_len - 1)
        prompt = min(max(1, prompts()), max_model_len - output)
        jobs.append(TimedRequest(offset, [rng.randrange(vocab_size) for _ in range(prompt)], output))
    return jobs

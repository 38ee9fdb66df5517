"""Requests to measure with: how long their prompts and outputs are, and when they come; made up, or of a trace."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.errors import ConfigError
from chairlift.plan.trace import TraceRequest, duration, fitted, scaled, with_answers
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


def jobs_of_trace(
    trace: Sequence[TraceRequest],
    count: int,
    *,
    vocab_size: int,
    max_model_len: int,
    rate: float | None = None,
    seed: int = 0,
) -> list[TimedRequest]:
    """Return the first `count` requests of a trace to language models, at its own moments or sped up to a rate.

    Lengths are cut so that they fit. Raises ConfigError for a trace without such requests, or of a single moment where
    there is to be a rate.
    """
    part = [request for request in with_answers(trace, seed) if not request.items][:count]
    if not part:
        raise ConfigError("the trace has no requests to a language model")
    first = part[0].arrival
    if rate is not None:
        seconds = duration(part) - first
        if not seconds:
            raise ConfigError("all of the trace comes at one moment, which no --rate changes; leave it out")
        part = scaled(part, rate * seconds / len(part))
        first = part[0].arrival
    rng = random.Random(seed)
    return [
        TimedRequest(
            request.arrival - first,
            [rng.randrange(vocab_size) for _ in range(request.input_length)],
            max(request.output_length, 1),
        )
        for request in fitted(part, max_model_len)
    ]

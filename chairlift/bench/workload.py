"""Requests to measure with: how long their prompts and outputs are, and when they come."""

import csv
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ConfigError

FORMS = "constant:N, uniform:LOW:HIGH, exponential:MEAN or trace:FILE.csv"
TRACE_COLUMNS = ("ContextTokens", "GeneratedTokens")


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
    prompts, outputs = _sampler(prompt_len, rng, column=0), _sampler(output_len, rng, column=1)
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


def _sampler(spec: str, rng: random.Random, column: int) -> Callable[[], int]:
    """Return a function that draws lengths; `column` says which of a trace's two columns is meant."""
    form, _, rest = spec.partition(":")
    try:
        if form == "constant":
            value = int(rest)
            return lambda: value
        if form == "uniform":
            low, high = (int(part) for part in rest.split(":"))
            return lambda: rng.randint(low, high)
        if form == "exponential":
            scale = 1 / float(rest)
            return lambda: math.ceil(rng.expovariate(scale))
        if form == "trace":
            lengths = _trace(Path(rest), TRACE_COLUMNS[column])
            return lambda: rng.choice(lengths)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"length {spec!r} is not {FORMS}: {error}") from None
    raise ConfigError(f"length {spec!r} is not {FORMS}")


def _trace(path: Path, column: str) -> list[int]:
    try:
        with path.open(newline="") as file:
            lengths = [int(row[column]) for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from None
    except KeyError:
        raise ConfigError(f"trace {path} has no column {column}; it needs {' and '.join(TRACE_COLUMNS)}") from None
    if not lengths:
        raise ConfigError(f"trace {path} is empty")
    return lengths

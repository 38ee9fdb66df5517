"""The workloads that every engine is compared on: the same prompts and output lengths in every run."""

import math
import random
from typing import NamedTuple

NAMES = ("single", "uniform", "varied")


class TimedRequest(NamedTuple):
    """A request and its arrival in seconds after the start."""

    offset: float
    prompt: list[int]
    length: int


def requests(name: str, vocab: int = 30000, seed: int = 0) -> list[tuple[list[int], int]]:
    """Return (prompt ids, output length) pairs; engines ignore EOS, so all of them make the same number of tokens.

    single: one prompt of 128, 128 tokens out. uniform: 64 of 128, 64 out. varied: 96 prompts of 16 to 384, exponential
    outputs (mean 64, at most 256), like chat.
    """
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return random_ids(rng, length, vocab)

    if name == "single":
        return [(prompt(128), 128)]
    if name == "uniform":
        return [(prompt(128), 64) for _ in range(64)]
    if name == "varied":
        pairs = []
        for _ in range(96):
            ids = prompt(rng.randint(16, 384))
            pairs.append((ids, _chat_length(rng)))
        return pairs
    raise SystemExit(f"unknown workload {name!r}: one of {', '.join(NAMES)}")


def arrivals(rate: float, seconds: float, vocab: int = 30000, seed: int = 0) -> list[TimedRequest]:
    """Return a Poisson process of `rate` requests a second, prompts of 16 to 384 and outputs as in `varied`.

    Another rate means the same lengths in the same order, closer together, but other prompts: a server that remembers
    prompts must not profit from the rates measured before.
    """
    rng, words = random.Random(seed), random.Random(f"{seed} at {rate:.6f}")
    timed, offset = [], 0.0
    while True:
        offset += rng.expovariate(1.0) / rate
        if offset >= seconds:
            return timed
        ids = random_ids(words, rng.randint(16, 384), vocab)
        timed.append(TimedRequest(offset, ids, _chat_length(rng)))


def random_ids(rng: random.Random, length: int, vocab: int) -> list[int]:
    """Token ids without the lowest ones, which are often special."""
    return [rng.randrange(10, vocab) for _ in range(length)]


def _chat_length(rng: random.Random) -> int:
    return max(1, min(256, math.ceil(rng.expovariate(1 / 64))))

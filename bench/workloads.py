"""The workloads that every engine is compared on: the same prompts and output lengths in every run."""

import math
import random

NAMES = ("single", "uniform", "varied")


def requests(name: str, vocab: int = 30000, seed: int = 0) -> list[tuple[list[int], int]]:
    """Return (prompt ids, output length) pairs; engines ignore EOS, so all of them make the same number of tokens.

    single: one prompt of 128, 128 tokens out. uniform: 64 of 128, 64 out. varied: 96 prompts of 16 to 384, exponential
    outputs (mean 64, at most 256), like chat.
    """
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, vocab) for _ in range(length)]

    if name == "single":
        return [(prompt(128), 128)]
    if name == "uniform":
        return [(prompt(128), 64) for _ in range(64)]
    if name == "varied":
        pairs = []
        for _ in range(96):
            ids = prompt(rng.randint(16, 384))
            pairs.append((ids, max(1, min(256, math.ceil(rng.expovariate(1 / 64))))))
        return pairs
    raise SystemExit(f"unknown workload {name!r}: one of {', '.join(NAMES)}")

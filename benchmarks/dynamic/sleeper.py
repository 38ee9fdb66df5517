"""A model that takes alpha + beta * b ms for a batch of b, for `chairlift serve` and, by import, for the peers."""

import time
from typing import Any

MOST = 32


def sleep(alpha_ms: float, beta_ms: float, count: int) -> None:
    """Take as long as a batch of so many."""
    time.sleep((alpha_ms + beta_ms * count) / 1000)


class Sleeper:
    """Sleeps, and gives the sum of each item."""

    max_batch_size = MOST

    def __init__(self, alpha_ms: float, beta_ms: float) -> None:
        self.alpha_ms = alpha_ms
        self.beta_ms = beta_ms

    def predict(self, batch: list[list[float]]) -> list[Any]:
        """Compute one batch."""
        sleep(self.alpha_ms, self.beta_ms, len(batch))
        return [sum(item) for item in batch]

"""BentoML, POST /predict: python -m bentoml serve bentoml_server:Sleep --port P, in an environment with bentoml.

It has no window to set: its dispatcher waits as it has learned to, and refuses what would take `max_latency_ms`.
"""

from typing import Any

import bentoml
from settings import ALPHA_MS, BETA_MS, MOST, WAIT_MS, sleep


@bentoml.service(workers=1)
class Sleep:
    """Sleeps, and gives the sum of each item."""

    @bentoml.api(batchable=True, max_batch_size=MOST, max_latency_ms=int(WAIT_MS))
    def predict(self, x: list[Any]) -> list[Any]:
        """Compute one batch."""
        sleep(ALPHA_MS, BETA_MS, len(x))
        return [sum(item) for item in x]

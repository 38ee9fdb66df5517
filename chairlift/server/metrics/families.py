"""Counting values by bucket, and what the metrics of all models share.

Observations are plain Python on the event loop's thread (a bisect and two additions), with no locks; the text is
put together only when somebody asks for it.
"""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric

SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
ERRORS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts by bucket."""

    __slots__ = ("_counts", "_sum", "_upper")

    def __init__(self, upper: Sequence[float]) -> None:
        self._upper = upper
        self._counts = [0] * (len(upper) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones."""
        self._counts[bisect_left(self._upper, value)] += times
        self._sum += value * times

    def family(self, name: str, help_text: str, model: str) -> HistogramMetricFamily:
        """The histogram as Prometheus wants it: cumulative."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(str, map(float, self._upper)), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(f"chairlift_{name}", help_text, labels=["model"])
        family.add_metric([model], buckets, self._sum)
        return family


def background_requests(model: str, running: int, waiting: int) -> Metric:
    """How many background requests run and wait; other gauges count live ones only."""
    gauge = GaugeMetricFamily("chairlift_background_requests", "Background requests.", labels=["model", "state"])
    gauge.add_metric([model, "running"], running)
    gauge.add_metric([model, "waiting"], waiting)
    return gauge

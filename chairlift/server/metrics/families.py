"""Families of metrics as Prometheus wants them, and values counted by bucket.

Observations are plain Python on the event loop's thread (a bisect and two additions), with no locks; the text is
put together only when somebody asks for it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
ERRORS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# The help text of what both kinds of models count under one name: Prometheus sees one.
REQUESTS_FINISHED = "Requests that ended, by how; of a language model each sequence (4 of a request with n=4)."


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

    def buckets(self) -> list[tuple[str, float]]:
        """How many values were up to each bound, cumulative."""
        bounds = [*map(str, map(float, self._upper)), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many values fell into each bucket; the last is that of the values above all bounds."""
        return tuple(self._counts)

    def quantiles(self, wanted: Sequence[float], before: Sequence[int]) -> list[float] | None:
        """Quantiles, above 0, of the values since `counts` were those, as exact as buckets are; None of none."""
        reached = list(accumulate(now - then for now, then in zip(self._counts, before, strict=True)))
        if not reached[-1]:
            return None
        bounds = (0.0, *self._upper, self._upper[-1])
        found = []
        for quantile in wanted:
            rank = quantile * reached[-1]
            index = bisect_left(reached, rank)
            below = reached[index - 1] if index else 0
            share = (rank - below) / (reached[index] - below)
            found.append(bounds[index] + share * (bounds[index + 1] - bounds[index]))
        return found

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._sum


Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def simple(kind: Family, model: str, rows: Iterable[tuple[str, str, float]]) -> Iterator[Metric]:
    """A family with one value for each row: a name, what it is, and the value."""
    for name, help_text, value in rows:
        family = kind(f"chairlift_{name}", help_text, labels=["model"])
        family.add_metric([model], value)
        yield family


def labelled(kind: Family, model: str, rows: Iterable[tuple[str, str, str, Mapping[str, float]]]) -> Iterator[Metric]:
    """A family with several values for each row: a name, what it is, a label, and the values by what that says."""
    for name, help_text, label, values in rows:
        family = kind(f"chairlift_{name}", help_text, labels=["model", label])
        for which, value in values.items():
            family.add_metric([model, str(which)], value)
        yield family


def histograms(model: str, rows: Iterable[tuple[str, str, Histogram]]) -> Iterator[Metric]:
    """A family for each row: a name, what it is, and the histogram."""
    for name, help_text, histogram in rows:
        family = HistogramMetricFamily(f"chairlift_{name}", help_text, labels=["model"])
        family.add_metric([model], histogram.buckets(), histogram.total)
        yield family


def background_requests(model: str, running: int, waiting: int) -> Iterator[Metric]:
    """How many background requests run and wait; other gauges count live ones only."""
    counts = {"running": running, "waiting": waiting}
    about = "Sequences, or items, of background requests."
    return labelled(GaugeMetricFamily, model, [("background_requests", about, "state", counts)])

"""What Prometheus sees of a one-shot model."""

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from chairlift.engine.dispatcher import Answer
from chairlift.errors import DeadlineExceeded, QueueFull
from chairlift.server.metrics import LONG, SHORT, Histogram


class OneShotMetrics:
    """All that is counted for one one-shot model. Call the methods from the event loop's thread only."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.ready = False
        self._queue_time = Histogram(LONG)
        self._run_time = Histogram(SHORT)
        self._finished: Counter[str] = Counter(dict.fromkeys(("done", "error", "shed", "late", "abort"), 0))

    def on_answers(self, answers: Sequence[Answer]) -> None:
        """Count items that were answered."""
        self._finished["done"] += len(answers)
        for answer in answers:
            self._queue_time.observe(answer.queue_s)
            self._run_time.observe(answer.run_s)

    def on_failure(self, error: BaseException, number: int) -> None:
        """Count a request's items that were not."""
        match error:
            case QueueFull():
                outcome = "shed"
            case DeadlineExceeded():
                outcome = "late"
            case Exception():
                outcome = "error"
            case _:
                outcome = "abort"
        self._finished[outcome] += number

    def collect(self) -> Iterable[Metric]:
        """All metrics, as of now."""
        ready = GaugeMetricFamily("chairlift_ready", "1 while requests are taken in.", labels=["model"])
        ready.add_metric([self.model], float(self.ready))
        yield ready
        finished = CounterMetricFamily(
            "chairlift_items_finished", "Items of requests that ended, by how.", labels=["model", "outcome"]
        )
        for outcome, count in self._finished.items():
            finished.add_metric([self.model, outcome], count)
        yield finished
        yield self._queue_time.family("queue_time_seconds", "From arrival to the first step.", self.model)
        yield self._run_time.family("inference_time_seconds", "Time of the call that an item was in.", self.model)

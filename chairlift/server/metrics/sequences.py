"""What Prometheus sees of a language model."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from chairlift.core.cost import Coefficients
from chairlift.core.decision import Reason
from chairlift.core.finished import FinishReason
from chairlift.engine.sequences.messages import CostStats, EngineStats
from chairlift.server.metrics.histogram import ERRORS, LONG, SHORT, SIZES, TOKENS, Histogram, background_requests

# Those of live requests.
WAITING_REASONS = [each.value for each in Reason if each.value.startswith("waiting_for_") and each is not Reason.LIVE]
FINISH_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


class ObservedEngine(Protocol):
    """The part of SequenceClient that metrics read."""

    stats: EngineStats

    @property
    def restarts(self) -> int:
        """How many workers have died and been replaced."""

    @property
    def ready(self) -> bool:
        """Whether a request would be taken in now."""


class SequenceMetrics:
    """All that is counted for one language model. Call the methods from the event loop's thread only."""

    def __init__(self, model: str, engine: ObservedEngine) -> None:
        self.model = model
        self.time_to_first_token = Histogram(LONG)
        self.inter_token = Histogram(SHORT)
        self.end_to_end = Histogram(LONG)
        self.queue_time = Histogram(LONG)
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FINISH_REASONS})
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._engine = engine
        self._step_requests = Histogram(SIZES)
        self._step_tokens = Histogram(TOKENS)
        self._step_seconds = Histogram(SHORT)
        self._prediction_error = Histogram(ERRORS)
        self._predicted_seconds = self._timed_seconds = 0.0
        self._previous = EngineStats()
        self._preemptions = self._queried = self._hit = 0

    def on_step(self, stats: EngineStats) -> None:
        """Take in the engine's counters after a step."""
        previous = self._previous
        if stats.steps < previous.steps:
            previous = EngineStats()  # another worker, which counts from zero
        self._preemptions += stats.preemptions - previous.preemptions
        self._queried += stats.prefix_queried_tokens - previous.prefix_queried_tokens
        self._hit += stats.prefix_hit_tokens - previous.prefix_hit_tokens
        self._previous = stats
        if stats.step_requests:
            self._step_requests.observe(stats.step_requests)
            self._step_tokens.observe(stats.step_tokens)
            self._step_seconds.observe(stats.step_seconds)
            if stats.cost is not None:
                self._on_prediction(stats.cost)

    def _on_prediction(self, cost: CostStats) -> None:
        if cost.seconds > 0:  # else the step failed
            self._prediction_error.observe(abs(cost.predicted - cost.seconds) / cost.seconds)
            self._predicted_seconds += cost.predicted
            self._timed_seconds += cost.seconds

    def collect(self) -> Iterable[Metric]:
        """All metrics, as of now."""
        yield from self._gauges()
        yield from self._counters()
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between consecutive tokens of a sequence.", self.inter_token),
            ("request_duration_seconds", "From arrival to the last token.", self.end_to_end),
            ("queue_time_seconds", "From arrival until it ran.", self.queue_time),
            ("step_requests", "Sequences in a step: the batch size.", self._step_requests),
            ("step_tokens", "Tokens computed in a step.", self._step_tokens),
            ("step_duration_seconds", "Time of a step.", self._step_seconds),
            ("step_prediction_error_ratio", "|predicted - actual| / actual seconds of a step.", self._prediction_error),
        ):
            yield histogram.family(name, help_text, self.model)

    def _gauges(self) -> Iterable[Metric]:
        stats = self._engine.stats
        ratio = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        for name, help_text, value in (
            ("ready", "1 while requests are taken in.", float(self._engine.ready)),
            ("requests_waiting", "Sequences in line.", stats.waiting),
            ("requests_running", "Sequences on board.", stats.running),
            ("kv_blocks_used", "KV blocks held by sequences.", stats.kv_blocks_used),
            ("kv_blocks", "KV blocks in all.", stats.kv_blocks_total),
            ("kv_usage_ratio", "Share of KV blocks held by sequences.", ratio),
        ):
            gauge = GaugeMetricFamily(f"chairlift_{name}", help_text, labels=["model"])
            gauge.add_metric([self.model], value)
            yield gauge
        reasons = GaugeMetricFamily(
            "chairlift_requests_waiting_by_reason",
            "Sequences in line, by what they wait for.",
            labels=["model", "reason"],
        )
        for reason in WAITING_REASONS:
            waiting = stats.waiting if stats.waiting_reason == reason else 0
            reasons.add_metric([self.model, reason.removeprefix("waiting_for_")], waiting)
        yield reasons
        yield background_requests(self.model, stats.background_running, stats.background_waiting)
        yield from self._cost()

    def _cost(self) -> Iterable[Metric]:
        """What the latency target allows and the cost model believes; nothing where no target is set."""
        cost = self._engine.stats.cost
        if cost is None:
            return
        budget = GaugeMetricFamily("chairlift_step_token_budget", "Tokens that a step may hold.", labels=["model"])
        budget.add_metric([self.model], cost.budget)
        yield budget
        terms = GaugeMetricFamily(
            "chairlift_step_cost_seconds", "The cost model's coefficients.", labels=["model", "term"]
        )
        for term, value in zip(Coefficients._fields, cost.coefficients, strict=True):
            terms.add_metric([self.model, term], value)
        yield terms

    def _counters(self) -> Iterable[Metric]:
        for name, help_text, value in (
            ("prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache.", self._queried),
            ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", self._hit),
            ("preemptions", "Sequences that gave up their blocks to another.", self._preemptions),
            ("worker_restarts", "Workers started after one died.", self._engine.restarts),
            ("prompt_tokens", "Prompt tokens of sequences that began.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("step_predicted_seconds", "Step time that the cost model foresaw.", self._predicted_seconds),
            ("step_timed_seconds", "Time that those steps took.", self._timed_seconds),
        ):
            counter = CounterMetricFamily(f"chairlift_{name}", help_text, labels=["model"])
            counter.add_metric([self.model], value)
            yield counter
        finished = CounterMetricFamily(
            "chairlift_requests_finished", "Requests that ended, by how.", labels=["model", "reason"]
        )
        for reason, count in self.finished.items():
            finished.add_metric([self.model, reason], count)
        yield finished

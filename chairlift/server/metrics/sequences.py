"""What Prometheus sees of a language model."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from chairlift.core.cost import Coefficients
from chairlift.core.decision import Reason
from chairlift.core.finished import FinishReason, ShedReason
from chairlift.core.sequences.overload import LoadShedder
from chairlift.engine.sequences.messages import CostStats, EngineStats
from chairlift.server.metrics.families import (
    ERRORS,
    LONG,
    REQUESTS_FINISHED,
    SHORT,
    SIZES,
    TOKENS,
    Histogram,
    background_requests,
    histograms,
    labelled,
    simple,
)

# Those of live requests.
WAITING_REASONS = [
    reason.value for reason in Reason if reason.value.startswith("waiting_for_") and reason is not Reason.LIVE
]
SHED_REASONS = (ShedReason.QUEUE_FULL, ShedReason.TTFT, ShedReason.DEADLINE)
FINISH_REASONS = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
    FinishReason.INVALID,
    FinishReason.SHED,
    FinishReason.LATE,
)

if TYPE_CHECKING:
    from chairlift.plan.tuner import Tuner

# For help texts: what `requests_` counts are sequences.
_EACH = " (4 of a request with n=4)"
# So many steps are kept, some 3 MB: a minute of them, but for a model whose steps take less than 4 ms.
_MOST_STEPS = 2**14


class RecentStep(NamedTuple):
    """What is kept of a step: when it was over, on CLOCK_MONOTONIC, its seconds, what it held, and what was left.

    `running` counts live and background requests.
    """

    ended: float
    seconds: float
    requests: int
    tokens: int
    waiting: int
    background_waiting: int
    kv_blocks_used: int
    running: int = 0


class ObservedEngine(Protocol):
    """The part of SequenceClient that metrics read."""

    stats: EngineStats
    shedder: LoadShedder

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
        self.steps: deque[RecentStep] = deque(maxlen=_MOST_STEPS)
        # What turns the model's settings, if anything does, and the processor time that this took.
        self.tuner: Tuner | None = None
        self.tuner_cpu_s = 0.0
        self._engine = engine
        self._step_requests = Histogram(SIZES)
        self._step_tokens = Histogram(TOKENS)
        self._step_seconds = Histogram(SHORT)
        self._prediction_error = Histogram(ERRORS)
        self._predicted_seconds = self._timed_seconds = 0.0
        self._previous = EngineStats()
        self._preemptions = self._queried = self._hit = 0

    @property
    def computed_tokens(self) -> float:
        """Tokens of prompts and answers that steps have computed."""
        return self._step_tokens.total

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
            step = RecentStep(
                stats.step_ended,
                stats.step_seconds,
                stats.step_requests,
                stats.step_tokens,
                stats.waiting,
                stats.background_waiting,
                stats.kv_blocks_used,
                stats.running + stats.background_running,
            )
            self.steps.append(step)
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
        yield from histograms(
            self.model,
            (
                ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
                ("inter_token_latency_seconds", "Between consecutive tokens of a sequence.", self.inter_token),
                ("request_duration_seconds", "From arrival to the last token.", self.end_to_end),
                ("queue_time_seconds", "From arrival until it ran.", self.queue_time),
                ("step_requests", "Sequences in a step: the batch size.", self._step_requests),
                ("step_tokens", "Tokens computed in a step.", self._step_tokens),
                ("step_duration_seconds", "Time of a step.", self._step_seconds),
                ("step_prediction_error_ratio", "|predicted - actual| / actual seconds.", self._prediction_error),
            ),
        )

    def _gauges(self) -> Iterable[Metric]:
        stats = self._engine.stats
        ratio = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        rows = [
            ("ready", "1 while requests are taken in.", float(self._engine.ready)),
            ("requests_waiting", f"Sequences that wait{_EACH}.", stats.waiting),
            ("requests_running", f"Sequences that run{_EACH}.", stats.running),
            ("kv_blocks_used", "KV blocks held by sequences.", stats.kv_blocks_used),
            ("kv_blocks", "KV blocks in all.", stats.kv_blocks_total),
            ("kv_usage_ratio", "Share of KV blocks held by sequences.", ratio),
        ]
        shedder = self._engine.shedder
        waiting = {
            reason.removeprefix("waiting_for_"): stats.waiting if stats.waiting_reason == reason else 0
            for reason in WAITING_REASONS
        }
        by_label: list[tuple[str, str, str, Mapping[str, float]]] = [
            ("requests_waiting_by_reason", f"Sequences that wait, by what they wait for{_EACH}.", "reason", waiting)
        ]
        if stats.cost is not None:
            # What the latency target allows and the cost model believes; nothing where no target is set.
            rows.append(("step_token_budget", "Tokens that a step may hold.", stats.cost.budget))
            terms = dict(zip(Coefficients._fields, stats.cost.coefficients, strict=True))
            by_label.append(("step_cost_seconds", "The cost model's coefficients.", "term", terms))
        if shedder.target is not None:
            wait = shedder.expected_wait(time.monotonic())
            rows.append(("ttft_promised_seconds", "Time to first token that decides on a short request.", wait))
            ratios = {"0.5": shedder.likely.value, "0.98": shedder.promised.value}
            by_label.append(("ttft_prediction_ratio", "Actual over predicted TTFT, by quantile.", "quantile", ratios))
        yield from simple(GaugeMetricFamily, self.model, rows)
        yield from labelled(GaugeMetricFamily, self.model, by_label)
        yield from background_requests(self.model, stats.background_running, stats.background_waiting)

    def _counters(self) -> Iterable[Metric]:
        rows = (
            ("prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache.", self._queried),
            ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", self._hit),
            ("preemptions", "Sequences that gave up their blocks to another.", self._preemptions),
            ("worker_restarts", "Workers started after one died.", self._engine.restarts),
            ("prompt_tokens", "Prompt tokens of sequences that began.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("step_predicted_seconds", "Step time that the cost model foresaw.", self._predicted_seconds),
            ("step_timed_seconds", "Time that those steps took.", self._timed_seconds),
        )
        yield from simple(CounterMetricFamily, self.model, rows)
        shed = {reason.value: self._engine.shedder.num_shed[reason] for reason in SHED_REASONS}
        by_label = (
            ("requests_finished", REQUESTS_FINISHED, "reason", self.finished),
            ("requests_shed", f"Live sequences that were refused for the load, by reason{_EACH}.", "reason", shed),
        )
        yield from labelled(CounterMetricFamily, self.model, by_label)
        yield from self._of_tuner()

    def _of_tuner(self) -> Iterable[Metric]:
        """Of a model whose settings are turned: what was, what it cost, and what holds now."""
        tuner = self.tuner
        if tuner is None:
            return
        rows = (
            ("tuner_rounds", "Times that the tuner looked at the traffic.", tuner.rounds),
            ("tuner_cpu_seconds", "Processor time of the tuner.", self.tuner_cpu_s),
        )
        yield from simple(CounterMetricFamily, self.model, rows)
        turned = (
            ("tuner_changes", "Settings that were turned.", "setting", tuner.num_changes),
            ("tuner_changes_taken_back", "Changes that were taken back.", "setting", tuner.num_taken_back),
        )
        yield from labelled(CounterMetricFamily, self.model, turned)
        settings = [("tuned_setting", "What a setting that may be turned is now.", "setting", tuner.settings)]
        yield from labelled(GaugeMetricFamily, self.model, settings)

"""Spans of requests for OpenTelemetry: one for each that a model answered or gave up, made when that is over.

Names are those of the semantic conventions for generative AI, and where these have none (latencies), those of vLLM.
Spans hold no text. Only who wants spans imports this: it needs the packages of the extra `otel`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from chairlift import __version__
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import ConfigError
from chairlift.folders.kind import Task
from chairlift.runners.items import TEXT_TASKS
from chairlift.server.http.exchange import Terms
from chairlift.server.http.trace_context import trace_parent
from chairlift.server.models.request_log import EndedRequest

logger = logging.getLogger(__name__)

_PATH = "/v1/traces"
# How long leaving may take for what has not been sent.
_CLOSE_S = 3.0
# How a request may end that went wrong; a client that left made no error.
_ERRORS = frozenset({"shed", "late", "error", "invalid"})
# What the conventions call what we call otherwise. They have no name for the other tasks, which keep ours.
_OPERATIONS = {"embed": "embeddings"}
# OTLP has whole numbers with a sign, of 64 bits: what is more goes as text.
_LARGEST = 2**63 - 1

Attributes = dict[str, AttributeValue]


class RequestSpans:
    """Makes spans on the event loop, and sends them from a thread to a collector that speaks OTLP over HTTP.

    The SDK's own variables (OTEL_...) hold, but for the endpoint and the protocol. What the collector does not take in
    time is dropped. Raises ConfigError for variables that are no good.
    """

    def __init__(self, endpoint: str) -> None:
        url = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
        ours = Resource.create({SERVICE_NAME: "chairlift", SERVICE_VERSION: __version__})
        try:
            # Who names the service in the environment means that.
            resource = ours.merge(OTELResourceDetector().detect())
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(_SpokenExporter(OTLPSpanExporter(url), url)))
        except ValueError as error:
            raise ConfigError(f"otlp_endpoint: {error}") from None
        # From here on it would say the same for each batch, and for headers that clients get wrong.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._tracer = self._provider.get_tracer("chairlift", __version__)

    def sequences(
        self, model: str, request_id: str, params: SamplingParams, requests: Sequence[Request], terms: Terms
    ) -> Callable[[Request, Terms, EndedRequest], None] | None:
        """What takes the ends of a request's sequences, and makes its span with the last; None where it gets none."""
        return None if terms.headers is None else _SequencesSpan(self, model, request_id, params, requests).ended

    def items(
        self, model: str, task: Task | None, ended: EndedRequest, terms: Terms, sizes: Iterable[float] | None = None
    ) -> None:
        """Make the span of a request for items. `sizes` are their tokens, where they are texts."""
        if terms.headers is None:
            return
        about: Attributes = {"chairlift.items": ended.count, "gen_ai.latency.e2e": ended.total_s or 0.0}
        if ended.id:
            about["gen_ai.response.id"] = ended.id
        if sizes is not None and task in TEXT_TASKS:
            about["gen_ai.usage.input_tokens"] = int(sum(sizes))
        if ended.queued_s is not None and ended.run_s is not None:
            about["gen_ai.latency.time_in_queue"] = ended.queued_s
            about["gen_ai.latency.time_in_model_inference"] = ended.run_s
        if ended.mean_batch is not None:
            about["chairlift.mean_batch"] = float(ended.mean_batch)
        operation = _OPERATIONS.get(task or "", task or "unknown")
        self.make(operation, model, terms, [ended], lambda: about)

    def make(
        self,
        operation: str,
        model: str,
        terms: Terms,
        parts: Sequence[EndedRequest],
        about: Callable[[], Mapping[str, AttributeValue]],
    ) -> None:
        """Make the span of a request whose parts have ended; `about` is asked only if it is sampled."""
        zero = time.time_ns() - time.monotonic_ns()
        begin = min(each.ended - (each.total_s or 0.0) for each in parts)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=_context(terms),
            kind=SpanKind.SERVER,
            # What samplers may look at.
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "chairlift",
                "gen_ai.request.model": model,
            },
            start_time=zero + int(begin * 1e9),
        )
        if span.is_recording():
            span.set_attribute("gen_ai.response.model", model)
            span.set_attributes(about())
            if terms.background:
                span.set_attribute("chairlift.background", True)
            failed = next((each.finish_reason for each in parts if each.finish_reason in _ERRORS), None)
            if failed is not None:
                span.set_attribute("error.type", failed)
                span.set_status(Status(StatusCode.ERROR))
        span.end(zero + int(max(each.ended for each in parts) * 1e9))

    def close(self) -> None:
        """Send what is left, as far as there is time. Blocks."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


class _SequencesSpan:
    """The sequences of one request on their way to its span."""

    def __init__(
        self,
        spans: RequestSpans,
        model: str,
        request_id: str,
        params: SamplingParams,
        requests: Sequence[Request],
    ) -> None:
        self._spans, self._model, self._request_id, self._params = spans, model, request_id, params
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._requests = requests
        self._ended: dict[str, EndedRequest] = {}

    def ended(self, request: Request, terms: Terms, ended: EndedRequest) -> None:
        """Take one's end."""
        self._ended[request.id] = ended
        if len(self._ended) == len(self._requests):
            parts = sorted(self._ended.values(), key=lambda each: self._places[each.id])
            operation = "text_completion" if self._request_id.startswith("cmpl") else "chat"
            self._spans.make(operation, self._model, terms, parts, lambda: self._attributes(parts))

    def _attributes(self, parts: Sequence[EndedRequest]) -> Attributes:
        """All that is said of it; of several sequences, the times of the one that ended last."""
        request, last = self._requests[0], max(parts, key=lambda each: each.ended)
        params = self._params
        about: Attributes = {
            "gen_ai.response.id": self._request_id,
            "gen_ai.response.finish_reasons": [each.finish_reason for each in parts],
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            # A prompt counts once, however many samples are drawn from it.
            "gen_ai.usage.input_tokens": sum(len(each.prompt_ids) for each in self._requests[:: params.n]),
            "gen_ai.usage.output_tokens": sum(each.tokens or 0 for each in parts),
            "gen_ai.latency.e2e": last.total_s or 0.0,
            "gen_ai.latency.time_in_queue": last.queued_s or 0.0,
            "chairlift.priority": request.priority,
            "chairlift.preemptions": sum(each.preemptions or 0 for each in parts),
        }
        if params.top_k > 0:
            about["gen_ai.request.top_k"] = float(params.top_k)
        if params.seed is not None:
            about["gen_ai.request.seed"] = params.seed if params.seed <= _LARGEST else str(params.seed)
        if params.n > 1:
            about["gen_ai.request.choice.count"] = params.n
        if last.cached_tokens is not None:
            about["gen_ai.usage.cache_read.input_tokens"] = sum(each.cached_tokens or 0 for each in parts[:: params.n])
        if last.prefill_s is not None and last.decode_s is not None:
            about["gen_ai.latency.time_to_first_token"] = (last.queued_s or 0.0) + last.prefill_s
            about["gen_ai.latency.time_in_model_prefill"] = last.prefill_s
            about["gen_ai.latency.time_in_model_decode"] = last.decode_s
            about["gen_ai.latency.time_in_model_inference"] = last.prefill_s + last.decode_s
        if last.mean_batch is not None:
            about["chairlift.mean_batch"] = last.mean_batch
        return about


class _SpokenExporter(SpanExporter):
    """Says once that a collector does not answer, and once that it does again."""

    def __init__(self, exporter: OTLPSpanExporter, url: str) -> None:
        self._exporter, self._url = exporter, url
        self._reaches = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, from the thread that does nothing else."""
        result = self._exporter.export(spans)
        reaches = result is SpanExportResult.SUCCESS
        if reaches != self._reaches:
            self._reaches = reaches
            problem = (
                "is not reached, or takes no OTLP over HTTP: spans are dropped until it does, and all else goes on"
            )
            logger.warning("the collector %s %s", self._url, "takes spans again" if reaches else problem)
        return result

    def shutdown(self) -> None:
        """Send nothing more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is held back here."""
        return True


def _context(terms: Terms) -> Context:
    """The caller's span, if the request names one."""
    parent = trace_parent(terms.headers or ())
    if parent is None:
        return Context()
    state = TraceState(list(parent.state))
    flags = TraceFlags(parent.flags)
    return set_span_in_context(
        NonRecordingSpan(SpanContext(parent.trace_id, parent.span_id, True, flags, state)), Context()
    )

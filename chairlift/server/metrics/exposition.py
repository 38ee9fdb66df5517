"""GET /metrics: what is counted for all models, put together, and for the server itself."""

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.models.registry import Models


class Exposition(Collector):
    """All metrics of a server, what `beside` gives included. `http` counts answers by method, route and code."""

    def __init__(self, models: Models, beside: Callable[[], Iterable[Metric]]) -> None:
        self.http: Counter[tuple[str, str, int]] = Counter()
        self.registry = CollectorRegistry(auto_describe=False)
        self._models = models
        self._beside = beside
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """A family for each name, with the samples of every model that has it."""
        families: dict[str, Metric] = {}
        for model in self._models.all():
            for family in model.metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
        yield from self._beside()
        http = CounterMetricFamily("chairlift_http_requests", "Answers.", labels=["method", "route", "code"])
        for (method, route, code), count in self.http.items():
            http.add_metric([method, route, str(code)], count)
        yield http


async def metrics_route(request: Request) -> Response:
    """GET /metrics."""
    metrics: Exposition = request.app.state.metrics
    return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

"""What a server tells of itself: /health, /v1/models and /metrics."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from chairlift import __version__
from chairlift.runners.items import ItemInfo
from chairlift.server.http.api_errors import without_folders
from chairlift.server.http.exchange import as_json
from chairlift.server.live.live_page import show_page, wants_page
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models, ModelService, model_in_path, models_of


async def live(request: Request) -> Response:
    """200 while the process answers and minds its workers, whatever the models do, else 503 with what is wrong."""
    problem = models_of(request).problem
    if problem is None:
        return Response(b'{"status":"live"}', media_type="application/json")
    return Response(msgspec.json.encode({"status": "stuck", "problem": problem}), 503, media_type="application/json")


async def ready(request: Request) -> Response:
    """200 while every model takes requests, but for those that have failed; else 503. Of all, how they are and why."""
    models = models_of(request)
    each = [{"model": model.name} | _state(model) for model in models.all()]
    waits = (model.state for model in models.all() if not model.ready and model.state != "failed")
    worst = "ready" if models.ready else next(waits, "failed")
    about = each[0] if len(each) == 1 else {"status": worst, "models": each}
    headers = {} if models.ready else {"Retry-After": "1"}
    return Response(msgspec.json.encode(about), 200 if models.ready else 503, headers, "application/json")


async def root(request: Request) -> Response:
    """The live page for a browser, and for all others what `ready` says."""
    answer = show_page() if wants_page(request.scope) else await ready(request)
    answer.headers["Vary"] = "Accept"
    return answer


def _state(model: ModelService) -> dict[str, Any]:
    """The model's state, and why it is that, where there is a reason."""
    return {"status": model.state} | ({"failure": without_folders(model.failure)} if model.failure else {})


async def version(request: Request) -> Response:
    """The release."""
    return as_json({"version": __version__})


async def list_models(request: Request) -> Response:
    """All models by all their names, each by its newest version."""
    models = models_of(request)
    return as_json({"object": "list", "data": [_describe(name, models.get(name)) for name in models.names()]})


async def show_model(request: Request) -> Response:
    """One model and how its requests are batched, or 404. KServe v1's clients look at `ready`."""
    name = request.path_params["model"]
    if not name:
        # What the list is called by who ends it with a slash.
        return await list_models(request)
    model = model_in_path(request, name)
    about = _describe(name, model) | {"name": name, "ready": model.ready} | batching_of(model)
    return as_json(about | _tuning_of(model))


def _tuning_of(model: ModelService) -> dict[str, Any]:
    """What was turned of its settings and why, the last first; nothing where nobody turns them."""
    if isinstance(model, ItemService) or (tuner := model.metrics.tuner) is None:
        return {}
    configured = {name: getattr(tuner.configured, name) for name in tuner.settings}
    told = {"configured": configured, "settings": tuner.settings, "on_trial": tuner.on_trial, "rounds": tuner.rounds}
    return {"tuning": told | {"cpu_s": model.metrics.tuner_cpu_s, "decisions": list(tuner.decisions)[::-1]}}


def _describe(name: str, model: ModelService) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "chairlift",
        "max_model_len": model.max_model_len,
        "task": model.task,
    } | _state(model)


# Settings of a language model that say how it is batched; none of them names a file or a person.
_SHOWN = (
    *("strategy", "batch_size", "max_wait_ms", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("step_time_ms", "target_itl_ms", "target_ttft_ms", "background_step_ms"),
    *("order", "order_ageing_ms", "priority_ageing_ms"),
    *("enable_prefix_caching", "dtype", "quantization", "kv_cache_dtype", "kv_cache_gb", "block_size"),
)


def batching_of(model: ModelService) -> dict[str, Any]:
    """The settings that a model's requests are batched by, and what it has of memory; nothing before it is loaded."""
    if isinstance(model, ItemService):
        return {} if model.info is None else _batching_of_items(model, model.info)
    config, info = model.client.config, model.client.info
    if info is None:
        return {}
    settings = {name: getattr(config, name) for name in _SHOWN} | {"max_waiting": model.config.max_waiting}
    memory = ("num_blocks", "block_size", "weight_bytes", "kv_bytes")
    return {"settings": settings, "memory": {name: getattr(info, name) for name in memory}}


def _batching_of_items(model: ItemService, info: ItemInfo) -> dict[str, Any]:
    limits = model.dispatcher.limits
    times = {
        "max_wait_ms": limits.max_wait,
        "max_queue_ms": limits.max_queue_seconds,
        "target_latency_ms": limits.target_latency,
        "timeout_ms": limits.default_timeout,
        "background_step_ms": limits.background_step,
        "order_ageing_ms": limits.order_ageing,
        "priority_ageing_ms": limits.priority_ageing,
    }
    settings = {
        "max_batch_size": limits.max_batch_size,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_waiting": limits.max_waiting,
        "order": limits.order,
        "instances": len(model.dispatcher.executors),
        **{name: None if value is None else 1000 * value for name, value in times.items()},
    }
    return {"settings": settings, "memory": {"weight_bytes": info.weight_bytes}}


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


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    exposition: Exposition = request.app.state.metrics
    return Response(generate_latest(exposition.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

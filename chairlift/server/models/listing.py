"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.http.exchange import as_json, models_of
from chairlift.server.models.registry import ModelService


async def list_models(request: Request) -> Response:
    """All models, each by its newest version."""
    models = models_of(request)
    names = dict.fromkeys(model.name for model in models.all())
    return as_json({"object": "list", "data": [_describe(models.get(name)) for name in names]})


async def show_model(request: Request) -> Response:
    """One model, or 404."""
    return as_json(_describe(models_of(request).get(request.path_params["model"])))


def _describe(model: ModelService) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "chairlift",
        "max_model_len": model.max_model_len,
        "task": model.task,
    }

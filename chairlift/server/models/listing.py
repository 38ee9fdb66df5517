"""GET /v1/models and /v1/models/{id}."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.models.registry import Models, ModelService


async def list_models(request: Request) -> Response:
    """All models, each by its newest version."""
    models: Models = request.app.state.models
    names = dict.fromkeys(model.name for model in models.all())
    return _json({"object": "list", "data": [_describe(models.get(name)) for name in names]})


async def show_model(request: Request) -> Response:
    """One model, or 404."""
    models: Models = request.app.state.models
    return _json(_describe(models.get(request.path_params["model"])))


def _describe(model: ModelService) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "chairlift",
        "max_model_len": model.max_model_len,
        "task": model.task,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

"""GET /v1/models and /v1/models/{id}."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.service import Service


async def list_models(request: Request) -> Response:
    """All models: one."""
    return _json({"object": "list", "data": [_describe(request.app.state.service)]})


async def show_model(request: Request) -> Response:
    """One model, or 404."""
    service: Service = request.app.state.service
    service.check_model(request.path_params["model"])
    return _json(_describe(service))


def _describe(service: Service) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "chairlift",
        "max_model_len": info.max_model_len if info else None,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

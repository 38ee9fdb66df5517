"""GET /health, /health/live and /health/ready."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.http.exchange import models_of


async def live(request: Request) -> Response:
    """The process answers, whatever the models do."""
    return Response(b'{"status":"live"}', media_type="application/json")


async def ready(request: Request) -> Response:
    """200 while every model takes requests, else 503 with the reason: of the only model, or of all."""
    models = models_of(request)
    each = [_about(model.name, model.state, model.failure) for model in models.all()]
    worst = next((model.state for model in models.all() if not model.ready), "ready")
    about = each[0] if len(each) == 1 else {"status": worst, "models": each}
    headers = {} if models.ready else {"Retry-After": "1"}
    return Response(msgspec.json.encode(about), 200 if models.ready else 503, headers, "application/json")


def _about(name: str, state: str, failure: str | None) -> dict[str, Any]:
    about = {"status": state, "model": name}
    return about | {"failure": failure} if failure else about

"""GET /health/live and /health/ready."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.service import Service


async def live(request: Request) -> Response:
    """The process answers, whatever the model does."""
    return Response(b'{"status":"live"}', media_type="application/json")


async def ready(request: Request) -> Response:
    """200 while requests are taken in, else 503 with the reason."""
    service: Service = request.app.state.service
    client = service.client
    about = {"status": client.state, "model": service.model}
    if client.failure:
        about["failure"] = client.failure
    headers = {} if client.ready else {"Retry-After": "1"}
    return Response(msgspec.json.encode(about), 200 if client.ready else 503, headers, "application/json")

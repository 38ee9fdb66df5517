"""The ASGI application: routes, and what surrounds every request."""

import hmac

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.chat import chat_completions
from chairlift.server.completions import completions
from chairlift.server.errors import HANDLED, ApiError, answer_error, as_api_error
from chairlift.server.health import live, ready
from chairlift.server.metrics import Metrics, metrics_route
from chairlift.server.models import list_models, show_model
from chairlift.server.service import Service

ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", show_model, methods=["GET"]),
    Route("/health/live", live, methods=["GET"]),
    Route("/health/ready", ready, methods=["GET"]),
    Route("/metrics", metrics_route, methods=["GET"]),
]


def create_app(service: Service) -> Starlette:
    """The application that serves one model."""
    middleware = [Middleware(_CountAnswers, metrics=service.metrics)]
    if service.config.api_key is not None:
        middleware.append(Middleware(_AskForKey, key=service.config.api_key))
    handlers = dict.fromkeys(HANDLED, answer_error)
    app = Starlette(routes=ROUTES, middleware=middleware, exception_handlers=handlers)
    app.state.service = service
    return app


class _CountAnswers:
    """Counts answers by method, route and code, those to unexpected errors too.

    Unknown paths share one label, so that nobody can make up new ones.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._count = metrics.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the status as it goes out; answer for whatever else failed."""
        started = False

        async def counting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = scope.get("route")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._count[method, route.path if route else "unknown", message["status"]] += 1
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception as error:
            if started:
                raise
            await as_api_error(error).response()(scope, receive, counting)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _AskForKey:
    """Lets nobody into /v1/ without the key. Health and metrics stay open, as probes and scrapers expect."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compare the Authorization header."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                message = "send the server's key as 'Authorization: Bearer KEY'"
                refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

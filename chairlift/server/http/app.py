"""The ASGI application: routes, and what surrounds every request."""

from starlette.datastructures import State
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.config.server import ServerConfig
from chairlift.server.batches.batch_routes import BATCHES
from chairlift.server.batches.file_routes import FILES
from chairlift.server.batches.service import Batches
from chairlift.server.http.api_errors import (
    HANDLED,
    ApiError,
    answer_error,
    as_api_error,
    rerank_shape,
    shape_of,
    tei_shape,
)
from chairlift.server.http.direct import Direct
from chairlift.server.http.endpoint import Endpoint
from chairlift.server.http.health import live, ready
from chairlift.server.http.key import Key
from chairlift.server.items.embeddings import embeddings
from chairlift.server.items.predict import PREDICT
from chairlift.server.items.rerank import rerank
from chairlift.server.items.tei import embed, info, predict
from chairlift.server.metrics.exposition import Exposition, metrics_route
from chairlift.server.models.listing import list_models, show_model
from chairlift.server.models.registry import Models
from chairlift.server.oip.http_routes import INFER
from chairlift.server.oip.http_routes import ROUTES as OIP_ROUTES
from chairlift.server.openai.chat import chat_completions
from chairlift.server.openai.completions import completions

_RERANK = Endpoint(rerank, rerank_shape)
ROUTES: list[Route] = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/embeddings", Endpoint(embeddings), methods=["POST"]),
    *(Route(path, _RERANK, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Route("/embed", Endpoint(embed, tei_shape), methods=["POST"]),
    Route("/predict", Endpoint(predict, tei_shape), methods=["POST"]),
    Route("/info", Endpoint(info, tei_shape), methods=["GET"]),
    *OIP_ROUTES,
    *FILES,
    *BATCHES,
    Route("/v1/models", list_models, methods=["GET"]),
    PREDICT,
    Route("/v1/models/{model:path}", show_model, methods=["GET"]),
    Route("/health", ready, methods=["GET"]),
    Route("/health/live", live, methods=["GET"]),
    Route("/health/ready", ready, methods=["GET"]),
    Route("/metrics", metrics_route, methods=["GET"]),
]


def create_app(models: Models, config: ServerConfig, batches: Batches | None = None) -> ASGIApp:
    """The application that serves these models, and takes the lines of these batches, which are the caller's to close.

    Where no batches are given they begin when the first request for them comes.
    """
    batches = batches or Batches(models, config)
    metrics = Exposition(models, batches.collect)
    state = {"models": models, "config": config, "metrics": metrics, "batches": batches}
    app: ASGIApp = _Routes(State(state))
    if config.api_key is not None:
        app = _AskForKey(app, Key(config.api_key))
    app = _CountAnswers(app, metrics, Direct(models, config, metrics))
    batches.serve(app)
    return app


class _Routes:
    """Starlette's routing, and a short way to the routes that see thousands of small requests a second.

    It is what handlers find as `request.app`. A Starlette application would answer unexpected errors itself.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self._router = ExceptionMiddleware(Router(ROUTES), dict.fromkeys(HANDLED, answer_error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at how the path ends; all else goes through the router."""
        scope["app"] = self
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(_HOT_ENDS):
            for route in _HOT_ROUTES:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found, route=route)
                    await route.app(scope, receive, send)
                    return
        await self._router(scope, receive, send)


_HOT_ROUTES = (*INFER, PREDICT)
_HOT_ENDS = ("/infer", ":predict")


class _CountAnswers:
    """Counts answers by method, route and code, those to unexpected errors too.

    Unknown paths share one label, so that nobody can make up new ones. `direct` is for the HTTP protocol, which asks it
    first.
    """

    def __init__(self, app: ASGIApp, metrics: Exposition, direct: Direct) -> None:
        self.direct = direct
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
            await as_api_error(error).response(shape_of(scope["path"]))(scope, receive, counting)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _AskForKey:
    """Lets nobody in without the key."""

    def __init__(self, app: ASGIApp, key: Key) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look for the key."""
        if scope["type"] == "http" and not self._key.opens(scope):
            message = "send the server's key as 'Authorization: Bearer KEY'"
            refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await refusal.response(shape_of(scope["path"]))(scope, receive, send)
            return
        await self._app(scope, receive, send)

"""The ASGI application: the table of routes, and what surrounds every request."""

import asyncio
import contextlib
from collections.abc import Awaitable

from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.config.server import ServerConfig
from chairlift.server.batches.service import Batches
from chairlift.server.direct import Direct
from chairlift.server.http.api_errors import HANDLED, ApiError, as_api_error
from chairlift.server.http.buffered import too_many
from chairlift.server.http.docs import Docs
from chairlift.server.http.endpoint import Endpoint
from chairlift.server.http.exchange import BACKGROUND, CROWDED, LIMIT, out_of_time, stays
from chairlift.server.http.origins import CheckOrigin, Origins, ShareAnswers, check_local
from chairlift.server.http.tenants import OPEN_PATHS, TENANT, Keys, Tenant, admitted, no_key
from chairlift.server.live.feed import LiveFeed
from chairlift.server.live.live_page import wants_page
from chairlift.server.live.snapshot import Observer
from chairlift.server.models.registry import Models, no_route
from chairlift.server.oip.shared_memory import SharedRegions
from chairlift.server.responses.response_store import ResponseStore
from chairlift.server.routes import ENDPOINTS, hint_for, shape_of
from chairlift.server.status import Exposition
from chairlift.server.twin.twin import Twin


def create_app(
    models: Models,
    config: ServerConfig,
    batches: Batches | None = None,
    keys: Keys | None = None,
    responses: ResponseStore | None = None,
    live: LiveFeed | None = None,
    twin: Twin | None = None,
) -> ASGIApp:
    """The application that serves these models, and takes the lines of these batches, which are the caller's to close.

    Where no batches are given they begin when the first request for them comes. The keys are those of the settings, and
    their owner has them follow their file. Of the responses that are kept, the owner cancels those in the background,
    and it closes the feed of the live page. The twin answers what would have been.
    """
    batches = batches or Batches(models, config)
    keys = keys or Keys(config)
    metrics = Exposition(models, batches.collect)
    responses = responses or ResponseStore(config)
    state = {"models": models, "config": config, "metrics": metrics, "batches": batches, "responses": responses}
    state["regions"] = SharedRegions(config)
    state["live"] = live or make_feed(models, config, batches, keys)
    state["twin"], state["recordings"] = twin or Twin(), set()
    docs = Docs(ENDPOINTS, keys.open_paths if keys.needed else None)
    app: ASGIApp = _Routes(State(state | {"docs": docs}))
    if keys.needed:
        app = _AskForKey(app, keys)
    origins = Origins(config)
    direct = Direct(models, config, metrics, origins, keys)
    app = _CountAnswers(CheckOrigin(app, origins, shape_of), metrics, direct)
    if config.allowed_origins:
        app = ShareAnswers(app, origins, direct)
    batches.serve(app, ENDPOINTS, keys)
    return app


def make_feed(models: Models, config: ServerConfig, batches: Batches, keys: Keys) -> LiveFeed:
    """What the live page watches; its owner closes it, so that nobody who watches keeps the server from leaving."""
    return LiveFeed(lambda: Observer(models, batches, keys, config.model_control))


class _Handled:
    """A row of the table as an ASGI application. What its handler finds in the scope as `endpoint` has the row."""

    def __init__(self, row: Endpoint) -> None:
        self.row = row

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request in its time, if its tenant may send it; errors in the shape of its protocol."""
        if stays(receive):
            await self._answer(scope, receive, send)
            return
        seconds = scope["app"].state.config.request_timeout_s
        try:
            async with asyncio.timeout(seconds) as scope[LIMIT]:
                await self._answer(scope, receive, send)
        except TimeoutError:
            raise out_of_time(seconds) from None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant: Tenant | None = scope.get(TENANT)
        with contextlib.ExitStack() as visit:
            try:
                if BACKGROUND not in scope and (tenant is not None or self.row.right == "admin"):
                    if tenant is None and self.row.local:
                        check_local(scope)
                    else:
                        config: ServerConfig = scope["app"].state.config
                        row, control = self.row, config.model_control
                        visit.enter_context(admitted(tenant, row.right, control, row.counted))
                response = await self.row.handler(Request(scope, receive))
            except Exception as error:
                response = as_api_error(error).response(self.row.shape)
            await response(scope, receive, send)


class _Routes:
    """Starlette's routing, and a short way to paths without parameters and to the hot ones of those that have some.

    It is what handlers find as `request.app`. A Starlette application would answer unexpected errors itself.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        routes = [Route(row.path, _Handled(row), methods=[row.method]) for row in ENDPOINTS]
        rows = list(zip(routes, ENDPOINTS, strict=True))
        self._exact = {(row.method, row.path): route for route, row in rows if "{" not in row.path}
        self._hot = [route for route, row in rows if row.hot]
        self._hot_ends = tuple({row.path.rpartition("}")[2] for row in ENDPOINTS if row.hot})
        self._router = ExceptionMiddleware(Router(routes), dict.fromkeys(HANDLED, _answer_error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look for the path, and at how it ends; all else goes through the router."""
        scope["app"] = self
        if scope["type"] == "http" and (exact := self._exact.get((scope["method"], scope["path"]))) is not None:
            scope.update(endpoint=exact.endpoint, path_params={}, route=exact)
            await exact.app(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(self._hot_ends):
            for route in self._hot:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found, route=route)
                    await route.app(scope, receive, send)
                    return
        await self._router(scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for the errors that are expected."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = no_route(request, hint_for(request.scope["path"]))
    elif isinstance(error, HTTPException) and error.status_code == 405:
        message = f"{request.scope['path']} does not take {request.method}"
        error = ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return as_api_error(error).response(shape_of(request.scope["path"]))


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

        def counting(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = scope.get("route")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._count[method, route.path if route else "unknown", message["status"]] += 1
            return send(message)

        try:
            if CROWDED in scope and not scope["path"].startswith(OPEN_PATHS):
                raise too_many("connections", scope[CROWDED], "max_connections")
            await self._app(scope, receive, counting)
        except Exception as error:
            if started:
                raise
            await as_api_error(error).response(shape_of(scope["path"]))(scope, receive, counting)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _AskForKey:
    """Lets nobody in without a key, and notes whose it is."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look for the key."""
        if scope["type"] == "http" and not self._keys.is_open(scope["path"]):
            tenant = self._keys.find_in(scope)
            if tenant is None and not wants_page(scope):
                refusal = no_key("'Authorization: Bearer KEY' or 'x-api-key: KEY'")
                await refusal.response(shape_of(scope["path"]))(scope, receive, send)
                return
            if tenant is not None:
                scope[TENANT] = tenant
        await self._app(scope, receive, send)

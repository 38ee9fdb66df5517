"""GET /v1/live: the server as it happens, for whoever may see all of it."""

from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import PartStream
from chairlift.server.http.origins import from_this_machine
from chairlift.server.http.paging import page_limit, query_of
from chairlift.server.http.tenants import TENANT
from chairlift.server.live.feed import LiveFeed, Watcher

_MOST_MESSAGES = 100_000
LIVE_QUERY = {"limit": Annotated[int, Meta(ge=1, le=_MOST_MESSAGES)]}


async def watch_server(request: Request) -> Response:
    """Server-sent events, about three a second; with `limit` so many of them."""
    if TENANT not in request.scope:
        check_machine(request.scope)
    query = query_of(request, LIVE_QUERY)
    most = page_limit(query, 1, _MOST_MESSAGES) if "limit" in query else 0
    feed: LiveFeed = request.app.state.live
    watcher = feed.watch(most)
    return PartStream("text/event-stream", _messages(watcher), _last, close=watcher.close)


def check_machine(scope: Scope) -> None:
    """Raise a 403 for whoever is not on this machine."""
    if not from_this_machine(scope):
        message = (
            "without keys only this machine may watch: open the page there, as http://127.0.0.1, or through a tunnel "
            "(ssh -L), or have whoever runs this server give it keys, of which one has the right 'admin'"
        )
        raise ApiError(403, message, code="not_this_machine", kind="permission_error")


async def _messages(watcher: Watcher) -> AsyncGenerator[bytes, None]:
    async for message in watcher:
        yield message


def _last(error: ApiError) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode({"message": error.body.message}) + b"\n\n"

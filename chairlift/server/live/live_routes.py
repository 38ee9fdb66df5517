"""GET /v1/live: the server as it happens, for whoever may see all of it."""

from collections.abc import AsyncGenerator
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import PartStream, sse_event
from chairlift.server.http.origins import check_same_site
from chairlift.server.http.paging import page_limit, query_of
from chairlift.server.live.feed import LiveFeed, Watcher

_MOST_MESSAGES = 100_000
LIVE_QUERY = {"limit": Annotated[int, Meta(ge=1, le=_MOST_MESSAGES)]}


async def watch_server(request: Request) -> Response:
    """Server-sent events, about three a second; with `limit` so many of them."""
    check_same_site(request.scope)
    query = query_of(request, LIVE_QUERY)
    most = page_limit(query, 1, _MOST_MESSAGES) if "limit" in query else 0
    feed: LiveFeed = request.app.state.live
    watcher = feed.watch(most)
    return PartStream("text/event-stream", _messages(watcher), _last, close=watcher.close)


async def _messages(watcher: Watcher) -> AsyncGenerator[bytes, None]:
    async for message in watcher:
        yield message


def _last(error: ApiError) -> bytes:
    return sse_event("error", {"message": error.body.message})

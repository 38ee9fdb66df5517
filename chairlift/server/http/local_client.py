"""Sends requests to the server's own ASGI application, in this process, as any client would over HTTP."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from chairlift.jobs.replies import Reply
from chairlift.server.http.endpoint import ShortWay
from chairlift.server.http.exchange import BACKGROUND
from chairlift.server.http.tenants import OWNER, TENANT, Tenant

_JSON = b"application/json"


class AppClient:
    """Posts to an application, and needs no key. With `background`, the requests take only what others leave over."""

    def __init__(self, app: ASGIApp, background: bool = False) -> None:
        self._app = app
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", _JSON)],
            "client": None,
            "server": None,
            TENANT: OWNER,
        }
        # The short way knows nothing of background work.
        self._direct: ShortWay | None = None if background else getattr(app, "direct", None)
        if background:
            self._scope[BACKGROUND] = True

    def of(self, tenant: Tenant) -> "AppClient":
        """A client like this one, whose requests are a tenant's."""
        made = copy.copy(self)
        made._scope = {**self._scope, TENANT: tenant}
        return made

    def _directly(self, scope: Scope, body: bytes) -> Awaitable[Reply] | None:
        """The answer by the short way, or None if the request has to go the ordinary one."""
        if self._direct is None:
            return None
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def reply(status: int, headers: Mapping[str, str], body: bytes) -> None:
            if not future.done():
                given = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                future.set_result(Reply(status, [(b"content-type", _JSON), *given], body))

        hang_up = self._direct.take(scope, body, reply)
        return None if hang_up is None else _or_hang_up(future, hang_up)

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a JSON body and return the whole answer. Cancelling this cancels the request."""
        decoded, raw = _paths(path)
        scope = {**self._scope, "path": decoded, "raw_path": raw}
        if (answer := self._directly(scope, body)) is not None:
            return await answer
        status, headers = 0, ()
        parts: list[bytes] = []

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], message["headers"]
            elif part := message.get("body"):
                parts.append(part)

        await self._app(scope, _Sent(body), send)
        return Reply(status, headers, parts[0] if len(parts) == 1 else b"".join(parts))


async def _or_hang_up(future: "asyncio.Future[Reply]", hang_up: Callable[[], None]) -> Reply:
    try:
        return await future
    except asyncio.CancelledError:
        hang_up()
        raise


class _Sent:
    """What an application receives: a body in one piece, and then never that the client has gone."""

    __slots__ = ("_message",)
    stays = True

    def __init__(self, body: bytes) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        if message is None:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        return message


@lru_cache(maxsize=256)
def _paths(path: str) -> tuple[str, bytes]:
    """A path as ASGI has it: decoded, and as it was sent."""
    return unquote(path), path.encode()

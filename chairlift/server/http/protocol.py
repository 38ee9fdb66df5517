"""uvicorn, set up: our signals, no logs, a bound on what it reads before it knows the request, and a short way."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from chairlift.config.server import ServerConfig
from chairlift.server.http.exchange import ShortWay
from chairlift.server.http.tls import Tls

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5


def make_server(app: ASGIApp, config: ServerConfig, tls: Tls | None = None) -> uvicorn.Server:
    """A server for the application; it knows nothing of signals, so its owner sets `should_exit`."""
    settings = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    settings.load()
    settings.ssl = None if tls is None else tls.context
    return _Server(settings)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the owner."""
        yield


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request line and headers that are too large or too slow; the parser itself would take in any amount.

    A request whose body came together with its head is first offered to the application's `direct`, if it has one.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a new connection has to say what it wants."""
        self._head_bytes = 0
        self._in_head = True
        self._direct: ShortWay | None = getattr(self.app, "direct", None)
        self._held: tuple[RequestResponseCycle, Any] | None = None
        self._holds = False
        self._hang_up: Callable[[], None] | None = None
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and whatever is done for the client."""
        self._watch_head(False)
        super().connection_lost(exc)
        if self._hang_up is not None:
            self._hang_up()

    def data_received(self, data: bytes) -> None:
        """Count what comes before the headers are complete."""
        self._holds = self._direct is not None
        super().data_received(data)
        self._holds = False
        if self._held is not None:
            (cycle, app), self._held = self._held, None
            super()._start_asgi_task(cycle, app)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request line and headers exceed {MAX_HEAD_BYTES} bytes.")
        self._watch_head(self._in_head)

    def on_message_begin(self) -> None:
        """Count anew for the next request."""
        self._head_bytes, self._in_head = 0, True
        self._watch_head(False)
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        """Stop counting."""
        self._in_head = False
        return super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Answer directly, if that is possible."""
        super().on_message_complete()
        if self._held is None or self.flow.write_paused:
            return
        assert self._direct is not None
        (cycle, app), self._held = self._held, None
        hang_up = self._direct.take(dict(cycle.scope), bytes(cycle.body), partial(self._reply, cycle))
        if hang_up is None:
            super()._start_asgi_task(cycle, app)
        elif not cycle.response_complete:
            self._hang_up = hang_up

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope, direct = cycle.scope, self._direct
        if self._holds and direct is not None and scope["method"] == "POST" and scope["path"].endswith(direct.end):
            self._held = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _reply(self, cycle: RequestResponseCycle, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Write the whole answer at once, as `cycle.send` would in parts."""
        self._hang_up = None
        if cycle.disconnected or self.transport.is_closing():
            return
        lines = [STATUS_LINE[status]]
        for name, value in cycle.default_headers:
            lines += (name, b": ", value, b"\r\n")
        about = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        close = "" if cycle.keep_alive else "connection: close\r\n"
        rest = f"{about}{close}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        lines += (rest.encode("latin-1"), body)
        self.transport.write(b"".join(lines))
        cycle.response_started = cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _watch_head(self, watch: bool = True) -> None:
        """Run the clock while a head is incomplete: one that comes in one piece needs none."""
        if not watch and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif watch and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _too_slow(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self.transport.close()

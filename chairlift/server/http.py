"""uvicorn, set up: our signals, no logs of its own, and a bound on what it reads before it knows the request."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chairlift.server.config import ServerConfig

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5


def make_server(app: ASGIApp, config: ServerConfig) -> uvicorn.Server:
    """A server for the application; it knows nothing of signals, so its owner sets `should_exit`."""
    return _Server(
        uvicorn.Config(
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
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the owner."""
        yield


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request line and headers that are too large or too slow; the parser itself would take in any amount."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a new connection has to say what it wants."""
        self._head_bytes = 0
        self._in_head = True
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._head_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what comes before the headers are complete."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request line and headers exceed {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Count anew for the next request."""
        self._head_bytes, self._in_head = 0, True
        self._head_timer.cancel()
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        """Stop counting."""
        self._in_head = False
        self._head_timer.cancel()
        return super().on_headers_complete()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _too_slow(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self.transport.close()

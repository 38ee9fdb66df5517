"""The server's process: start the worker, listen, serve, and on a signal drain and leave."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from chairlift.engine.client import EngineClient
from chairlift.errors import ChairliftError, ConfigError, InvalidRequest, Unavailable
from chairlift.server.config import ServerConfig
from chairlift.server.settings import Settings, model_name

if TYPE_CHECKING:
    import uvicorn

    from chairlift.text.tokenizer import Tokenizer

_BACKLOG = 2048


def serve(settings: Settings, started: float) -> int:
    """Serve until a signal; returns the exit status. `started` is when the process began, on the monotonic clock."""
    import uvloop

    level = settings.server.log_level
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(message)s")
    os.environ["CHAIRLIFT_LOG_LEVEL"] = level  # the worker's too
    listener = bind(settings.server)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Front(settings, listener, started).run())


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before anything slow begins. Raises ConfigError if it is not to be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        problem = error.strerror or str(error)
        raise ConfigError(
            f"can't listen on {config.host} port {config.port}: {problem}; see --host and --port"
        ) from None
    listener.set_inheritable(False)
    return listener


class _Front:
    """One run of the server, from the worker's start to the exit status."""

    def __init__(self, settings: Settings, listener: socket.socket, started: float) -> None:
        self._engine, self._config = settings
        self._listener = listener
        self._started = started
        self._name = model_name(settings.engine)
        self._client = EngineClient(settings.engine, settings.server.max_waiting)
        self._server: uvicorn.Server | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._status = 0

    async def run(self) -> int:
        """Serve until told to leave."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        await self._client.start()
        try:
            # In a thread, so that the loop can start the worker while this process still imports.
            server, grpc = await asyncio.to_thread(self._prepare)
            self._server = server
            async with grpc as grpc_port:
                announcing = asyncio.create_task(self._announce(grpc_port))
                if self._leaving is None:
                    await server.serve(sockets=[self._listener])
                announcing.cancel()
        except ChairliftError as error:
            print(f"chairlift: {error}", file=sys.stderr)
            self._status = 1
        finally:
            await (self._leaving or self._client.stop())
            self._listener.close()
        return self._status

    def _prepare(self) -> "tuple[uvicorn.Server, contextlib.AbstractAsyncContextManager[int | None]]":
        """The HTTP server, and the gRPC server for as long as that runs."""
        from chairlift.server.app import create_app
        from chairlift.server.http import make_server
        from chairlift.server.oip.beside import grpc_beside
        from chairlift.server.registry import Models
        from chairlift.server.service import Service
        from chairlift.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder(self._engine.model)
        _warm_up(tokenizer)
        service = Service(self._client, tokenizer, self._name, self._config)
        models = Models([service])
        app = create_app(models, self._config)
        return make_server(app, self._config), grpc_beside(models, self._config)

    async def _announce(self, grpc_port: int | None) -> None:
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"Chairlift serves {self._name} at {url}/v1 (loading)", flush=True)
        if grpc_port is not None:
            print(f"gRPC on port {grpc_port}", flush=True)
        try:
            await self._client.wait_ready()
        except Unavailable as error:
            if self._client.state == "failed":
                print(f"chairlift: {error}", file=sys.stderr)
                self._status = 1
                self._stop_server()
            return
        info = self._client.info
        about = f" ({info.dtype} on {info.device}, {info.ops} operations)" if info else ""
        if self._engine.strategy == "static":
            size = self._engine.batch_size
            print(f"static: nobody is served until {size} requests wait; dynamic suits live traffic", flush=True)
        print(f"ready in {time.monotonic() - self._started:.1f} s{about}", flush=True)

    def _on_signal(self, signum: int) -> None:
        if self._leaving is not None:
            # Whoever asks twice does not want to wait; the worker ends when it sees this process gone.
            os._exit(128 + signum)
        self._leaving = asyncio.create_task(self._leave(signal.Signals(signum).name))

    async def _leave(self, name: str) -> None:
        print(f"{name}: finishing what runs, for up to {self._config.drain_timeout_s:g} s", flush=True)
        # Still listening, so that probes see the change and newcomers get a clear 503.
        await self._client.drain(self._config.drain_timeout_s)
        await self._client.stop()
        self._stop_server()

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.should_exit = True


def _warm_up(tokenizer: "Tokenizer") -> None:
    """Pay now for what the first chat would otherwise wait for: importing and compiling its template."""
    with contextlib.suppress(InvalidRequest):
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "hello"}]))

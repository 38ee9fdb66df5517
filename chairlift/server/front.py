"""The server's process: start the workers, listen, serve, and on a signal drain and leave."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from chairlift.config.keys import read_keys
from chairlift.config.server import ServerConfig
from chairlift.config.settings import Settings
from chairlift.engine.machine import Machine
from chairlift.engine.worker_messages import load_failed
from chairlift.errors import ChairliftError, ConfigError, Unavailable
from chairlift.logs import start_logging
from chairlift.server.http.tls import Tls, make_tls
from chairlift.server.models.host import Host, host
from chairlift.server.models.loader import HostLoader

if TYPE_CHECKING:
    import uvicorn

    from chairlift.server.batches.service import Batches
    from chairlift.server.http.tenants import Keys
    from chairlift.server.live.feed import LiveFeed
    from chairlift.server.models.registry import Models, ModelService
    from chairlift.server.models.request_spans import RequestSpans
    from chairlift.server.models.trace_recorder import TraceRecorder
    from chairlift.server.responses.response_store import ResponseStore
    from chairlift.server.twin.tuning import Tuning

log = logging.getLogger(__name__)

_BACKLOG = 2048
# How often one who waits for a model hears that it still loads.
_STILL_S = 10.0
# Files and sockets beside the connections of HTTP and as many of gRPC.
_OTHER_FILES = 512
# As malloc.h of the GNU C library has it.
_M_MMAP_THRESHOLD = -3
_LARGE_BUFFER = 2**20


def serve(settings: Settings, started: float) -> int:
    """Serve until a signal; returns the exit status. `started` is when the process began, on the monotonic clock.

    Raises ConfigError, before anything is started, for a port, keys, certificates, a record, spans or connections that
    can't be had.
    """
    import uvloop

    level = settings.server.log_level
    start_logging(level)
    os.environ["CHAIRLIFT_LOG_LEVEL"] = level  # the worker's too
    tls = make_tls(settings.server)
    if settings.server.api_keys is not None:
        read_keys(Path(settings.server.api_keys))
    settings = settings._replace(server=allow_connections(settings.server))
    listener = bind(settings.server)
    recorder, spans = make_recorder(settings.server), make_spans(settings.server)
    _return_large_buffers()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Front(settings, listener, started, tls, recorder, spans).run())


def make_recorder(config: ServerConfig) -> "TraceRecorder | None":
    """What records requests, if they are to be. Raises ConfigError if its file can't be written."""
    if config.record is None:
        return None
    from chairlift.server.models.trace_recorder import TraceRecorder

    return TraceRecorder(Path(config.record), config.max_record_bytes)


def make_spans(config: ServerConfig) -> "RequestSpans | None":
    """What makes and sends spans, if they are wanted. Raises ConfigError if the packages for that are not there."""
    if config.otlp_endpoint is None:
        return None
    try:
        from chairlift.server.models.request_spans import RequestSpans
    except ImportError as error:
        needed = "otlp_endpoint needs the packages of an extra: pip install 'chairlift[otel]'"
        raise ConfigError(f"{needed} ({error})") from None
    return RequestSpans(config.otlp_endpoint)


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before anything slow begins. Raises ConfigError if it is not to be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        problem = error.strerror or str(error)
        raise ConfigError(
            f"can't listen on {config.host} port {config.port}: {problem}; see --host and --port"
        ) from None
    listener.set_inheritable(False)
    return listener


def page_line(config: ServerConfig, scheme: str, address: str, port: int) -> str | None:
    """Where the live page is, for whom; None where nobody could see anything on it."""
    from chairlift.server.http.origins import is_loopback

    here = "127.0.0.1" if address in ("0.0.0.0", "::") else address
    url = f"{scheme}://{f'[{here}]' if ':' in here else here}:{port}/"
    if config.api_key is not None or config.api_keys is not None:
        return f"Live page: {url} (with a key that has the right 'admin')"
    return f"Live page: {url}" if is_loopback(here) else None


def allow_connections(config: ServerConfig) -> ServerConfig:
    """Raise what this process may have open so far that it can refuse the connections beyond `max_connections`.

    Where the system does not let it, return settings with as many as fit. Raises ConfigError if others were set.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = 1 if config.grpc_port is None else 2
    wanted = each * config.max_connections + _OTHER_FILES
    if resource.RLIM_INFINITY != most < wanted:
        fitting = (most - _OTHER_FILES) // each
        problem = f"{config.max_connections} connections take {wanted} open files, and this process may have {most}"
        raised = "raise that limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
        if fitting < 1:
            raise ConfigError(f"max_connections: {problem}; {raised}")
        if config.max_connections != ServerConfig().max_connections:
            raise ConfigError(f"max_connections: {problem}; {raised}, or set it to {fitting} or fewer")
        log.warning("%s: max_connections is %d instead; for more %s", problem, fitting, raised)
        config, wanted = msgspec.structs.replace(config, max_connections=fitting), most
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return config


def _return_large_buffers() -> None:
    """Have the C library give large buffers back to the system when they are freed.

    Left to itself it raises that size to as much as 32 MB, and keeps several times what bodies of some MB need.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BUFFER)


class _Front:
    """One run of the server, from the workers' start to the exit status."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        started: float,
        tls: Tls | None,
        recorder: "TraceRecorder | None" = None,
        spans: "RequestSpans | None" = None,
    ) -> None:
        self._config = settings.server
        self._note = settings.note
        self._listener = listener
        self._tls = tls
        self._recorder, self._spans = recorder, spans
        self._keys: Keys | None = None
        self._started = started
        machine = Machine() if len(settings.models) > 1 else None
        self._loader = HostLoader(settings, lambda served: host(served, settings.server, machine), recorder, spans)
        self._first = self._loader.begin()
        self._services: list[ModelService] = []
        self._models: Models | None = None
        self._server: uvicorn.Server | None = None
        self._batches: Batches | None = None
        self._responses: ResponseStore | None = None
        self._live: LiveFeed | None = None
        self._tuning: Tuning | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._status = 0

    async def run(self) -> int:
        """Serve until told to leave."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        for each in self._first:
            await each.start()
        try:
            # In a thread, so that the loop can start the workers while this process still imports.
            server, grpc = await asyncio.to_thread(self._prepare)
            self._server = server
            # A full collection walks every object that the imports made, in the middle of somebody's request.
            gc.collect()
            gc.freeze()
            async with grpc as grpc_port:
                beside = [asyncio.create_task(it) for it in (self._announce(grpc_port), *self._watches())]
                if self._leaving is None:
                    await server.serve(sockets=[self._listener])
                for task in beside:
                    task.cancel()
        except ChairliftError as error:
            _say(f"chairlift: {error}", sys.stderr)
            self._status = 1
        finally:
            await (self._leaving or self._stop())
            if self._batches is not None:
                # Only now: those that were under way may have been sending or reading files.
                await self._batches.close()
            for sink in (self._recorder, self._spans):
                if sink is not None:
                    await asyncio.to_thread(sink.close)
            self._listener.close()
        return self._status

    def _prepare(self) -> "tuple[uvicorn.Server, contextlib.AbstractAsyncContextManager[int | None]]":
        """The HTTP server, and the gRPC server for as long as that runs."""
        from chairlift.server.app import create_app, make_feed
        from chairlift.server.batches.service import Batches
        from chairlift.server.http.buffered import Buffered
        from chairlift.server.http.protocol import make_server
        from chairlift.server.http.tenants import Keys
        from chairlift.server.models.registry import Models
        from chairlift.server.oip.grpc_optional import grpc_beside
        from chairlift.server.responses.response_store import ResponseStore
        from chairlift.server.twin.tuning import Tuning
        from chairlift.server.twin.twin import Twin

        self._services = [self._loader.prepare(each) for each in self._first]
        self._models = models = Models(self._services, self._loader, self._config.model_aliases)
        self._batches = Batches(models, self._config)
        self._keys = keys = Keys(self._config)
        self._responses = ResponseStore(self._config)
        self._live = make_feed(models, self._config, self._batches, keys)
        twin = Twin()
        self._tuning = Tuning(models, twin, self._config)
        app = create_app(models, self._config, self._batches, keys, self._responses, self._live, twin)
        self._batches.open()
        buffered = Buffered(self._config.max_buffered_bytes)
        grpc = grpc_beside(models, self._config, keys, self._tls, buffered)
        return make_server(app, self._config, self._tls, buffered), grpc

    def _watches(self) -> "list[Coroutine[Any, Any, None]]":
        """What follows files that may change (keys and certificates) and traffic, and what writes a file."""
        watches = [each.watch() for each in (self._keys, self._tls) if each is not None]
        if self._tuning is not None:
            watches.append(self._tuning.run())
        return watches if self._recorder is None else [*watches, self._recorder.keep_writing()]

    async def _announce(self, grpc_port: int | None) -> None:
        address, port = self._listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        url = f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"
        names = ", ".join(each.served.name for each in self._first)
        _say(f"Chairlift loads {names} at {url}/v1")
        if (page := page_line(self._config, scheme, address, port)) is not None:
            _say(page)
        if self._note:
            _say(self._note)
        if grpc_port is not None:
            _say(f"gRPC on port {grpc_port}")
        if self._batches is not None:
            self._batches.resume()
        first = zip(self._first, self._services, strict=True)
        patience = asyncio.create_task(_say_it_still_loads())
        try:
            about = await asyncio.gather(*(self._announce_model(*each) for each in first))
        finally:
            patience.cancel()
        if None not in about:
            details = f" ({about[0]})" if len(about) == 1 and about[0] else ""
            _say(f"Chairlift serves {names}, ready in {time.monotonic() - self._started:.1f} s{details}")

    async def _announce_model(self, host: Host, service: "ModelService") -> str | None:
        """Wait for a model and return what there is to say of it, or None if it is not going to be served.

        A server of which no model can be loaded leaves.
        """
        try:
            await host.wait_ready()
        except Exception as error:
            if not isinstance(error, Unavailable):
                # A mistake of ours. It must not load for ever because of that.
                log.error("%s has loaded and can't be served", host.served.name, exc_info=error)
                host.give_up(load_failed(error).message)
            served = [] if self._models is None else self._models.all()
            # While the server leaves this says nothing new, nor of one that was unloaded, or loaded anew, meanwhile.
            if self._leaving is None and service in served:
                _say(f"chairlift: {host.served.name}: {error}", sys.stderr)
                if all(each.state == "failed" for each in served):
                    self._status = 1
                    self._stop_server()
            return None
        if len(self._first) > 1:
            details = f" ({host.about})" if host.about else ""
            _say(f"{host.served.name} is ready{details}")
        return host.about

    def _on_signal(self, signum: int) -> None:
        if self._leaving is not None:
            # Whoever asks twice does not want to wait; the workers end when they see this process gone.
            os._exit(128 + signum)
        self._leaving = asyncio.create_task(self._leave(signal.Signals(signum).name))

    async def _leave(self, name: str) -> None:
        until = time.monotonic() + self._config.drain_timeout_s
        _say(f"{name}: finishing what runs, for up to {self._config.drain_timeout_s:g} s")
        # Still listening, so that probes see the change and new requests get a clear 503.
        if self._batches is not None:
            # First, so that slots are free for live requests to end; the next server does what was under way anew.
            await self._batches.leave()
        if self._responses is not None:
            await self._responses.leave()
        await asyncio.gather(*(each.drain(self._config.drain_timeout_s) for each in self._loader.hosts))
        await self._stop()
        if self._live is not None:
            self._live.close()
        self._stop_server(until - time.monotonic())

    async def _stop(self) -> None:
        """End the workers. Whoever still waits for one is told so."""
        if self._batches is not None:
            await self._batches.leave()
        await asyncio.gather(*(each.stop() for each in self._loader.hosts))

    def _stop_server(self, seconds: float = 0.0) -> None:
        """Listen no more, and end once all is over that is under way; it gets so many seconds, and a few in any case.

        Among that are uploads, downloads, and answers that are read more slowly than they were made.
        """
        if self._server is not None:
            config = self._server.config
            config.timeout_graceful_shutdown = max(config.timeout_graceful_shutdown or 0, math.ceil(seconds))
            self._server.should_exit = True


async def _say_it_still_loads() -> None:
    """Until this is cancelled."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(_STILL_S)
        _say(f"still loading, {time.monotonic() - began:.0f} s")


def _say(line: str, to: TextIO | None = None) -> None:
    """Print a line at once. Where nobody reads it any more the server goes on, and leaves when it is told to."""
    with contextlib.suppress(OSError):
        print(line, file=to, flush=True)

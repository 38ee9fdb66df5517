"""uvicorn, set up: our signals, no logs, bounds on connections and on what they hold, and a short way."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from chairlift.config.server import ServerConfig
from chairlift.server.http.buffered import Buffered, HeldBody
from chairlift.server.http.endpoint import ShortWay
from chairlift.server.http.exchange import CROWDED, HELD
from chairlift.server.http.flow import Flow
from chairlift.server.http.part_writer import WRITER, PartQueue, PartWriter
from chairlift.server.http.pieces import PIECE_BYTES, end_of_piece
from chairlift.server.http.places import BUSY, COMING, IDLE, Places
from chairlift.server.http.tls import Tls
from chairlift.server.http.unsent import Unsent

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
HANDSHAKE_TIMEOUT_S = 10.0
# Connections beyond `max_connections` that are let in to be told so, and for probes, which must not fail with them.
SPARE_CONNECTIONS = 32
# Methods of which nobody reads a body, so that it is dropped as it comes.
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
# Headers that come after a body: nobody asked for them, and they must not change what the request is.
_NO_TRAILERS: Any = deque(maxlen=0)
_CLOSE_TIMEOUT_S = 5
# How old the `Date` header may be.
_DATE_S = 1.0


def make_server(
    app: ASGIApp, config: ServerConfig, tls: Tls | None = None, buffered: Buffered | None = None
) -> uvicorn.Server:
    """A server for the application; it knows nothing of signals, so its owner sets `should_exit`.

    `buffered` is given where others hold bytes beside it.
    """
    settings = _Config(
        config,
        buffered or Buffered(config.max_buffered_bytes),
        app,
        http=BoundedProtocol if tls is None else partial(Handshake, tls.context),
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
    return _Server(settings)


class _Config(uvicorn.Config):
    """What each connection finds, with the settings that uvicorn knows nothing of."""

    def __init__(self, limits: ServerConfig, buffered: Buffered, app: ASGIApp, **more: Any) -> None:
        self.limits = limits
        self.buffered = buffered
        self.parts = PartQueue()
        self.places = Places(limits.max_connections)
        super().__init__(app, **more)


class _Server(uvicorn.Server):
    """Sleeps while nobody asks: uvicorn's own looks ten times a second whether it should exit."""

    _tell: Callable[[], object] | None = None

    @property
    def should_exit(self) -> bool:
        """Whether it is to end; may be set in any thread."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._tell is not None:
            self._tell()

    async def main_loop(self) -> None:
        """Renew the `Date` header every second, until told to exit."""
        told = asyncio.Event()
        self._tell = partial(asyncio.get_running_loop().call_soon_threadsafe, told.set)
        try:
            # At 0 of its ticks uvicorn makes the header.
            while not await self.on_tick(0):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(told.wait(), _DATE_S)
        finally:
            self._tell = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the owner."""
        yield


class Handshake(asyncio.Protocol):
    """A connection to a TLS port until it is encrypted, which counts from the start.

    A server of the event loop's with a context tells nobody of connections whose handshake is not over.
    """

    stage = IDLE

    def __init__(self, context: ssl.SSLContext, **given: Any) -> None:
        self._context, self._given = context, given
        self._connections: set[Any] = given["server_state"].connections
        self._places: Places = given["config"].places
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, unless there are too many connections already."""
        try:
            address = _address(get_remote_addr(cast(asyncio.Transport, transport)))
            if self._places.enter(address, self) <= SPARE_CONNECTIONS:
                # Goes on in another transport, as this one may read what is meant for the handshake before that begins.
                own = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                self._connections.add(self)
                self._task = asyncio.get_running_loop().create_task(self._encrypt(own))
                self._task.add_done_callback(self._end)
        finally:
            if self._task is None:
                self._places.leave(self)
            cast(asyncio.Transport, transport).abort()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(self)
        self._places.leave(self)

    def shutdown(self) -> None:
        """Hang up: the server leaves."""
        if self._task is not None:
            self._task.cancel()

    def give_way(self) -> None:
        """Hang up: another client needs the place."""
        self.shutdown()

    async def _encrypt(self, own: socket.socket) -> None:
        # What is wrong with a client's handshake is not the server's to report.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, own, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )

    def _make(self) -> "BoundedProtocol":
        protocol = BoundedProtocol(**self._given)
        protocol.handshake = self
        return protocol


class BoundedProtocol(HttpToolsProtocol):
    """Counts what a connection holds, and closes it where it is one too many, or its client is slow to ask or to read.

    The parser itself would take in a head of any size, and any number of requests, so it is given what came a piece at
    a time. A request whose body came together with its head is first offered to the application's `direct`, if it has
    one.
    """

    # What it was before it was encrypted, if it is.
    handshake: Handshake | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a new connection has to say what it wants."""
        config = cast(_Config, self.config)
        self._limits, self._buffered, self._parts = config.limits, config.buffered, config.parts
        self._places = config.places
        # Bytes of the head so far; later those since the last of the body, which are around chunks, or trailers.
        self._head_bytes = self._body_bytes = 0
        self._in_head, self._in_body = True, False
        self._direct: ShortWay | None = getattr(self.app, "direct", None)
        self._held: tuple[RequestResponseCycle, Any] | None = None
        self._holds = False
        self._hang_up: Callable[[], None] | None = None
        # The last that the application was asked to answer; those after it wait in uvicorn's `pipeline`.
        self._begun: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        cast(set[Any], self.connections).discard(self.handshake)
        super().connection_made(transport)
        self.flow = self._flow = Flow(transport, self.pipeline)
        self._unsent = Unsent(transport, self._flow, self._buffered, self._limits.write_timeout_s)
        self._places.leave(self.handshake)
        beyond = self._places.enter(_address(self.client), self)
        self._is_crowded = beyond > 0
        if beyond > SPARE_CONNECTIONS:
            transport.abort()
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and whatever is done for the client."""
        self._places.leave(self)
        self._watch_head(False)
        self._unsent.end()
        self._keep(b"")
        super().connection_lost(exc)
        # uvicorn tells the newest request alone, which may be one that waits.
        if self._begun is not None and not self._begun.response_complete:
            self._begun.disconnected = True
            self._begun.message_event.set()
        for cycle, _ in self.pipeline:
            _release(cycle)
        self.pipeline.clear()
        if self._hang_up is not None:
            self._hang_up()

    @property
    def stage(self) -> int:
        """What it is in the middle of; where somebody reads an answer, or it is closing anyway, that is left alone."""
        if self.pipeline or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return BUSY
        if self.cycle is None or self.cycle.response_complete:
            return IDLE
        return COMING if self._in_body and not self.cycle.response_started else BUSY

    def give_way(self) -> None:
        """Hang up: another client needs the place."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in what came, after what came before."""
        self._take_in(self._flow.unread + data if self._flow.unread else data)

    def _take_in(self, data: bytes) -> None:
        """Have the parser read what there is room for, and begin what it found."""
        self._holds = self._direct is not None and not self._is_crowded
        self._keep(self._parse_pieces(data))
        self._holds = False
        if self._held is not None:
            (cycle, app), self._held = self._held, None
            self._begin(cycle, app)
        if self._flow.read_paused and (self.pipeline or not self._in_body):
            # uvicorn stops reading as soon as a request has to wait.
            self._flow.resume_reading()
        self._watch_head(self._in_head and not self._flow.read_paused)

    def _parse_pieces(self, data: bytes) -> bytes:
        """Have the parser read a piece after the other, and return what there is no room for."""
        start, size = 0, len(data)
        while start < size and self._flow.has_room() and not self.transport.is_closing():
            end = self._end_of_piece(data, start)
            self._head_bytes += end - start
            self._parse(data if end - start == size else memoryview(data)[start:end])
            start = end
            if not (self._in_head or self._in_body):
                self._head_bytes = 0
            elif self._head_bytes >= MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request line and headers, or the trailers, exceed {MAX_HEAD_BYTES} bytes.")
        return b"" if self.transport.is_closing() else data[start:]

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """What comes of a body of known length can be read at once: nothing begins in it."""
        if self._in_body and len(data) - start > PIECE_BYTES:
            headers = self.cycle.scope["headers"]
            length = next((int(value) for name, value in headers if name == b"content-length"), 0)
            if (left := length - self._body_bytes) > PIECE_BYTES:
                return min(start + left, len(data))
        return end_of_piece(data, start, MAX_HEAD_BYTES - self._head_bytes)

    def _keep(self, unread: bytes) -> None:
        """Keep what came until there is room for it, and read nothing more till then."""
        if unread or self._flow.unread:
            self._buffered.give(len(self._flow.unread))
            self._buffered.add(len(unread))
            self._flow.unread = unread
        if unread:
            self._flow.pause_reading()
            if self._buffered.held > self._buffered.limit:
                self._unsent.drop("it sent more requests than there is room for (max_buffered_bytes)")

    def _read_on(self) -> None:
        """Go on with what had to wait."""
        if not self.transport.is_closing():
            self._take_in(self._flow.unread)

    def _parse(self, piece: bytes | memoryview) -> None:
        """Have the parser read a piece, as HTTP/1.1 whatever else the client would rather speak."""
        rest = piece
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as offer:
                    rest = memoryview(rest)[offer.args[0] :]
                    self._decline()
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _decline(self) -> None:
        """Begin the request anew, without the `Upgrade` for which the parser took its body for another protocol.

        A server may ignore it. Java's client sends one with each first request, and so does `curl --http2`.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        # The old one still has the length of the body that it did not read.
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):
            # As the old one; httptools has it from 0.6.3 on.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join((*lines, b"", b"")))

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong and close, unless the client would take that for the answer to something else."""
        cycle = self.cycle
        answered = cycle is None or cycle.response_complete
        is_next = not (answered or cycle.response_started or self.pipeline) if self._in_body else answered
        if is_next:
            super().send_400_response(msg)
        else:
            self.transport.close()
        self._unsent.watch()

    def on_message_begin(self) -> None:
        """The next request has clocks of its own; whatever else comes leaves a connection as idle as it was."""
        self._in_head, self._body_bytes = True, 0
        self._watch_head(False)
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        """Count anew. On a connection too many this is the last request."""
        if self.parser.should_upgrade():
            # It comes again, see `_decline`.
            return None
        self._in_head, self._in_body, self._head_bytes = False, True, 0
        if self._is_crowded:
            cast(dict[str, Any], self.scope)[CROWDED] = self._limits.max_connections
        super().on_headers_complete()
        self.headers = _NO_TRAILERS
        if self._is_crowded:
            self.cycle.keep_alive = False
        return None

    def on_body(self, body: bytes) -> None:
        """Take in a piece of a body, if there is room for it among all that is held."""
        self._head_bytes, self._body_bytes = 0, self._body_bytes + len(body)
        cycle = self.cycle
        scope = cast(dict[str, Any], cycle.scope)
        if cycle.response_complete or scope["method"] in _BODILESS:
            return
        held: HeldBody | None = scope.get(HELD)
        if held is None:
            held = scope[HELD] = HeldBody(self._buffered)
        if held.take(len(body)):
            super().on_body(body)
        else:
            cycle.body.clear()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Answer directly, if that is possible."""
        if self._in_head:
            # As above.
            return
        self._in_body, self._head_bytes = False, 0
        super().on_message_complete()
        if self._held is None or self.flow.write_paused:
            return
        assert self._direct is not None
        (cycle, app), self._held = self._held, None
        scope: dict[str, Any] = dict(cycle.scope)
        hang_up = None
        if HELD not in scope or not scope[HELD].refused:
            hang_up = self._direct.take(scope, bytes(cycle.body), partial(self._reply, cycle))
        if hang_up is None:
            self._begin(cycle, app)
        elif not cycle.response_complete:
            self._hang_up = hang_up

    def on_response_complete(self) -> None:
        """Close the connection, whether the client reads the rest or not, or go on with what had to wait."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._unsent.watch()
        elif self._in_head:
            # The next request has begun.
            self._unset_keepalive_if_required()
        if self._flow.read_paused:
            # Not now: this may be within the parser.
            self.loop.call_soon(self._read_on)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, as above."""
        super().timeout_keep_alive_handler()
        self._unsent.watch()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._unsent.grow()

    def resume_writing(self) -> None:
        """It has read most of it."""
        self._unsent.shrink()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope, direct = cycle.scope, self._direct
        if self._holds and direct is not None and scope["method"] == "POST" and scope["path"].endswith(direct.end):
            self._held = cycle, app
        else:
            self._begin(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Have the application answer; what is held of the body is let go when it has."""
        self._begun = cycle
        cast(dict[str, Any], cycle.scope)[WRITER] = PartWriter(cycle, self._parts)
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        task.add_done_callback(partial(self._ended, cycle))

    def _ended(self, cycle: RequestResponseCycle, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        # It holds the cycle, which holds the scope.
        cast(dict[str, Any], cycle.scope).pop(WRITER, None)
        _release(cycle)

    def _reply(self, cycle: RequestResponseCycle, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Write the whole answer at once, as `cycle.send` would in parts."""
        self._hang_up = None
        _release(cycle)
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
            self._unsent.watch()


def _address(client: tuple[str, int] | None) -> str:
    """Whose connection it is, without its port; "" if nobody can tell."""
    return client[0] if client is not None else ""


def _release(cycle: RequestResponseCycle) -> None:
    """Hold nothing more of a request's body."""
    held = cast(dict[str, Any], cycle.scope).get(HELD)
    if held is not None:
        held.release()

"""One exchange, as its handler sees it: what the headers say, the body, a client that may hang up, and the answer."""

import asyncio
import contextlib
import hashlib
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.bodies import decode
from chairlift.config.server import ServerConfig
from chairlift.errors import DeadlineExceeded, InvalidRequest
from chairlift.server.http.api_errors import ApiError, as_api_error
from chairlift.server.http.buffered import HeldBody, buffers_full
from chairlift.server.http.compressed import check_encoding, unpacked
from chairlift.server.http.part_sender import PartSender
from chairlift.server.http.part_writer import WRITER
from chairlift.server.http.tenants import TENANT, Tenant, client_in

T = TypeVar("T")

# A key of an ASGI scope: true for a background request. HTTP servers make scopes of their own, so no client can set it.
BACKGROUND = "chairlift.background"
# Others: what the server holds of its body, how long it may take, and that it came over one connection too many.
HELD, LIMIT, CROWDED = "chairlift.held", "chairlift.limit", "chairlift.crowded"
# Whoever still writes at the close may never see the answer, so up to this many times the limit is read and dropped.
DRAIN_FACTOR = 4
# The time that a body gets before its rate counts.
BODY_GRACE_S = 5.0
# Below this many characters tokenizing takes less time than a thread's round trip is worth.
INLINE_SIZE = 16_384
# Above this many it takes long enough to keep others waiting, so that it has threads of its own.
LARGE_SIZE = 2**18

# The status of requests whose clients did not wait for an answer.
CLIENT_GONE = 499
# The last event of a stream.
DONE = b"data: [DONE]\n\n"
_EVENTS = "text/event-stream"

# Few: they share the cores with the model.
_large = ThreadPoolExecutor(2, thread_name_prefix="chairlift-large")
# Whose turn it is, by client: forgotten as soon as nobody has it, or waits for it.
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
_MAX_PRIORITY = 2**31
_MOST_SALT = 64
_OCTETS = "application/octet-stream"
# Lines end at these too for clients that split decoded text the way Python does; JSON lets them through.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


# What its headers say


class Terms(NamedTuple):
    """When and how urgently a request wants its answer; a background one takes what live ones leave.

    `tenant` is whose request it is, where keys are asked for; background requests count against no limit of it.
    `headers` are what may say whose span it belongs to; None for a line of a batch, which has no span.
    """

    timeout: float | None = None
    priority: int = 0
    background: bool = False
    tenant: Tenant | None = None
    headers: Sequence[tuple[bytes, bytes]] | None = None

    def checked(self, tokens: int, sequences: int = 1) -> "Terms":
        """These terms, if the tenant may have them for so many sequences that read so many tokens; else an ApiError."""
        if self.tenant is None:
            return self
        if not self.background:
            self.tenant.check_size(tokens, sequences)
        return self._replace(priority=self.tenant.check_priority(self.priority))

    @property
    def owner(self) -> str | None:
        """The tenant's name; None where nobody is asked for a key."""
        return None if self.tenant is None else self.tenant.name

    def spend(self, tokens: int) -> None:
        """Charge the tenant tokens that were read or generated."""
        if self.tenant is not None and not self.background:
            self.tenant.spend(tokens)

    def salted(self, salt: str) -> str:
        """The salt of cached prefixes, by which no tenant meets another's: a short one, as every sequence has it."""
        if len(salt) > _MOST_SALT:
            salt = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()
        return salt if self.tenant is None else self.tenant.salted(salt)


def terms_of(scope: Scope, priority: int | None = None) -> Terms:
    """What a request's headers say, its body's `priority` if it has one, and whether a caller in here marked it."""
    terms = terms_in(scope["headers"])
    if priority is not None:
        terms = terms._replace(priority=check_priority(priority, "priority"))
    if (tenant := scope.get(TENANT)) is not None:
        terms = terms._replace(tenant=tenant)
    return terms._replace(background=True, headers=None) if scope.get(BACKGROUND) else terms


def terms_in(headers: Sequence[tuple[bytes, bytes]]) -> Terms:
    """What `X-Request-Timeout-Ms` and `X-Request-Priority` say (lower is sooner, 0 is the default)."""
    timeout, priority = None, 0
    for name, value in headers:
        if name == b"x-request-timeout-ms":
            timeout = _milliseconds(value.decode("latin-1"))
        elif name == b"x-request-priority":
            priority = check_priority(_integer(value.decode("latin-1")), "X-Request-Priority")
    return Terms(timeout, priority, headers=headers)


def check_priority(priority: int | None, field: str) -> int:
    """A priority that the scheduler takes."""
    if priority is None or not -_MAX_PRIORITY <= priority < _MAX_PRIORITY:
        raise InvalidRequest(f"{field} must be an integer between -2**31 and 2**31 - 1", field)
    return priority


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        name = "X-Request-Timeout-Ms"
        raise InvalidRequest(f"{name} must be a positive number of milliseconds, got {text!r}", name)
    return value / 1000


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def out_of_time(seconds: float) -> DeadlineExceeded:
    """What to say when a request has taken as long as any may."""
    return DeadlineExceeded(f"the request took more than {seconds:g} s (request_timeout_s)")


# Its body


async def read_json(request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
    """The body, decoded. Raises as `read_body` and `decode`."""
    return decode(await read_body(request), decoder)


async def read_body(request: Request, binary: bool = False, untyped: bool = False, tensors: bool = False) -> bytes:
    """The whole body: JSON, or with `binary` also octets, and with `untyped` also one without Content-Type.

    Raises ApiError: 415 for a wrong type, 413 beyond `max_body_bytes` (for `tensors` `max_tensor_bytes`), 408 after
    `body_timeout_s` seconds or below `min_body_rate`, 429 where other requests hold `max_buffered_bytes`.
    """
    config: ServerConfig = request.app.state.config
    kind = _check_type(request, binary)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        check_encoding(encoding)
    own = "max_tensor_bytes" if tensors else "max_body_bytes"
    limit = min(_Limit(getattr(config, name), name) for name in (own, "max_buffered_bytes"))
    body = await _read_in_time(request, config, limit)
    if encoding != "identity":
        body = await unpacked(body, _room(request, limit))
    if body and not kind and not untyped:
        raise _wrong_type("a body without one")
    return body


class _Limit(NamedTuple):
    """The most bytes that a body may have, and the setting that says so."""

    most: int
    setting: str

    def exceeded(self) -> ApiError:
        """The refusal of a larger one."""
        problem = f"the body is larger than the limit of {self.most} bytes ({self.setting})"
        return ApiError(413, problem, code="body_too_large", headers={"Connection": "close"})


async def _read_in_time(request: Request, config: ServerConfig, limit: _Limit) -> bytes:
    if stays(request.receive):
        return await _read(request, config, limit, None)
    try:
        async with asyncio.timeout(min(config.body_timeout_s, time_for(0, config))) as timer:
            return await _read(request, config, limit, timer)
    except TimeoutError:
        raise too_slow("the body", config) from None


def too_slow(what: str, config: ServerConfig) -> ApiError:
    """The refusal of a body that does not come."""
    limits = f"{config.body_timeout_s:g} s (body_timeout_s) and {config.min_body_rate} bytes a second (min_body_rate)"
    message = f"{what} came too slowly: the limits are {limits}"
    return ApiError(408, message, code="request_timeout", headers={"Connection": "close"})


def time_for(size: int, config: ServerConfig) -> float:
    """The seconds within which more of a body must come that has so many bytes so far."""
    return BODY_GRACE_S + size / config.min_body_rate if config.min_body_rate else math.inf


def _check_type(request: Request, binary: bool) -> str:
    """The body's type, empty where none is given: pages of other sites can post without one, and with most others."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", "application/json") and not kind.endswith("+json") and not (binary and kind == _OCTETS):
        raise _wrong_type(kind)
    return kind


def _room(request: Request, limit: _Limit) -> Callable[[int], None]:
    """What counts a body that grows, and raises where it grows too large."""
    held: HeldBody | None = request.scope.get(HELD)
    size = 0

    def take(more: int) -> None:
        nonlocal size
        size += more
        if size > limit.most:
            raise limit.exceeded()
        if held and not held.take(more):
            raise buffers_full()

    return take


def _wrong_type(given: str) -> ApiError:
    return ApiError(415, f"send JSON with 'Content-Type: application/json', not {given}", code="unsupported_type")


async def _read(request: Request, config: ServerConfig, limit: _Limit, timer: asyncio.Timeout | None) -> bytes:
    """All of it. The timer, if there is one, is set anew to when the next piece must have come."""
    held: HeldBody | None = None
    chunks: list[bytes] = []
    size = seen = 0
    start = asyncio.get_running_loop().time()
    most = limit.most
    more = True
    while more and seen <= most * DRAIN_FACTOR:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_GONE, "the client closed the connection before its body was complete")
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        held = request.scope.get(HELD)
        if held:
            held.charge(client_in(request.scope))
        size += len(chunk)
        seen = size + held.dropped if held else size
        if seen <= most and not (held and held.refused):
            chunks.append(chunk)
        else:
            chunks.clear()
        if more and timer is not None:
            timer.reschedule(start + min(config.body_timeout_s, time_for(seen, config)))
    if seen > most:
        raise limit.exceeded()
    if held and held.refused:
        raise buffers_full(close=more)
    return b"".join(chunks)


# Until it is answered


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do work here and now, or in a thread if its `size` in characters (or numbers to print) would hold up the loop."""
    if size <= INLINE_SIZE:
        return work()
    if size <= LARGE_SIZE:
        return await asyncio.to_thread(work)
    job = _large.submit(work)
    done = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        # What has begun goes on, and keeps its client's turn.
        if not job.cancel():
            await asyncio.wait([done])
        raise


def stays(receive: Receive) -> bool:
    """Whether this is a caller in this process, whose body is there at once and who never hangs up."""
    return getattr(receive, "stays", False)


class until_gone:
    """Cancels what is inside as soon as the client hangs up, and raises a 499. A POST's body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if stays(self._receive):
            return
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and self._task.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise ApiError(CLIENT_GONE, "the client closed the connection") from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


@contextlib.asynccontextmanager
async def in_turn(request: Request, size: int) -> AsyncIterator[None]:
    """Around what is done with a text of that `size` before it is answered: of a client's large ones one at a time.

    It ends if the client hangs up, as in `until_gone`.
    """
    if size <= INLINE_SIZE:
        yield
        return
    async with until_gone(request.receive):
        if size <= LARGE_SIZE:
            yield
            return
        async with _turns.setdefault(client_in(request.scope), asyncio.Lock()):
            yield


# Its answer


def new_id(prefix: str, joint: str = "-") -> str:
    """A request id that nobody can guess."""
    return f"{prefix}{joint}{os.urandom(12).hex()}"


def as_json(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A value as the whole answer."""
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")


class PartStream(Response):
    """An answer in parts. An error before it begins is an ordinary HTTP error; later, what `last` makes of it ends it.

    So does the end of the time that the request may take. It begins with the first part, or if it is one of events,
    with the first comment.

    `close` is called in the end, whether `parts` were ever begun or not.
    """

    def __init__(
        self,
        kind: str,
        parts: AsyncGenerator[bytes, None],
        last: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts, self._last, self._close = parts, last, close
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}, kind)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send parts as they come, until the last one or until the client is gone; to HEAD no part at all."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            self._close()
            await self._parts.aclose()
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        out = PartSender(send, self.raw_headers, scope.get(WRITER))
        waits = self.media_type == _EVENTS and not stays(receive)
        try:
            async with until_gone(receive), contextlib.aclosing(self._parts) as parts:
                with out.telling_to_wait() if waits else contextlib.nullcontext():
                    async for part in parts:
                        await out.part(part)
        except (Exception, asyncio.CancelledError) as error:
            ended = _why(error, scope)
            if not out.begun or ended is None:
                raise
            refusal = as_api_error(ended)
            if refusal.status != CLIENT_GONE:
                await out.last(self._last(refusal))
        else:
            await out.begin()
        finally:
            self._close()
        await send({"type": "http.response.body", "body": b""})


def _why(error: BaseException, scope: Scope) -> Exception | None:
    """What to tell the client of what ended its answer; nothing where the server itself gave it up."""
    if isinstance(error, Exception):
        return error
    limit: asyncio.Timeout | None = scope.get(LIMIT)
    return out_of_time(scope["app"].state.config.request_timeout_s) if limit and limit.expired() else None


def sse_event(kind: str, data: Any) -> bytes:
    """A server-sent event of a kind."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_line(data))


def encode_line(value: Any) -> bytes:
    """JSON that stays one line, whatever the client thinks ends a line."""
    return one_line(msgspec.json.encode(value))


def one_line(raw: bytes) -> bytes:
    """The same JSON without the characters that some clients take for a line's end."""
    if not raw.isascii():
        for character, escape in _LINE_ENDS:
            raw = raw.replace(character, escape)
    return raw

"""The short way for small requests to models that take any JSON: no task, no streams, one write.

Through ASGI such a request costs three times as much. That way stays the one that knows everything: whatever is unusual
about a request is left to it, before anything has been done. Only a large answer takes a task, and a thread writes it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.types import Scope

from chairlift.config.server import ServerConfig
from chairlift.engine.items.dispatcher import Answer
from chairlift.server.http.api_errors import ApiError, as_api_error, oip_shape
from chairlift.server.http.buffered import HeldBody
from chairlift.server.http.endpoint import SendReply
from chairlift.server.http.exchange import CLIENT_GONE, HELD, INLINE_SIZE, Terms, off_loop, out_of_time, terms_of
from chairlift.server.http.origins import Origins
from chairlift.server.http.tenants import TENANT, Keys, Tenant, client_in
from chairlift.server.models.item_service import ItemService, blamed, timing_headers, too_late
from chairlift.server.models.registry import Models
from chairlift.server.models.result_size import size_of
from chairlift.server.oip.predict import PATH, STREAM_KINDS, read_instances, write_predictions
from chairlift.server.oip.tensor_items import takes_json
from chairlift.server.status import Exposition

# Decoding a larger body takes longer than the ordinary way does.
MAX_BYTES = 64 * 1024
# What stands around the model's name in the path.
_BEGIN, _END = PATH.split("{name:path}")
_STREAMS = tuple(kind.encode() for kind in STREAM_KINDS)
_TYPES = frozenset({b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"})
# Whoever sends these has more to be looked at: an encoded body, or a browser in between.
_UNUSUAL = frozenset({b"content-encoding", b"origin", b"sec-fetch-site"})


class Direct:
    """Answers such requests from within the event loop's own callbacks."""

    end = _END

    def __init__(self, models: Models, config: ServerConfig, metrics: Exposition, origins: Origins, keys: Keys) -> None:
        self._models = models
        self._max_bytes = min(config.max_body_bytes, config.max_tensor_bytes, config.max_tensor_json_bytes, MAX_BYTES)
        self._most_s = config.request_timeout_s
        self._keys = keys
        self._origins = origins
        self._count = metrics.http

    def take(self, scope: Scope, body: bytes, reply: SendReply) -> Callable[[], None] | None:
        """Answer a request, or leave it to the ordinary way, as `ShortWay` says."""
        service = self._service_of(scope, body)
        if service is None or not self._let_in(scope):
            return None
        most_s = self._most_s if scope["client"] else None
        exchange = _Exchange(service, partial(self._reply, reply), scope.get(TENANT), most_s)
        exchange.begin(scope, body)
        return exchange.hang_up

    def _service_of(self, scope: Scope, body: bytes) -> ItemService | None:
        """The model, if the request is one to be answered here."""
        path: str = scope["path"]
        if not (path.startswith(_BEGIN) and path.endswith(_END) and len(body) <= self._max_bytes):
            return None
        service = self._models.find(path[len(_BEGIN) : -len(_END)])
        if not isinstance(service, ItemService) or service.info is None:
            return None
        if not takes_json(service.info) or service.info.streams:
            return None
        return service if self._is_plain(scope["headers"]) else None

    def _is_plain(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether it is JSON as it is, asks for no more, and no browser may have been made to send it."""
        has_type = False
        for name, value in headers:
            if name == b"content-type":
                if value.lower() not in _TYPES:
                    return False
                has_type = True
            elif name == b"host":
                if not self._origins.knows(value):
                    return False
            elif name in _UNUSUAL or (name == b"accept" and any(kind in value for kind in _STREAMS)):
                return False
        return has_type

    def _let_in(self, scope: Scope) -> bool:
        """Whether its tenant may send it, who then has entered; if not, the ordinary way says why."""
        tenant = self._keys.find_in(scope) if self._keys.needed else scope.get(TENANT)
        if tenant is None:
            return not self._keys.needed and _has_room(scope)
        scope[TENANT] = tenant
        if not _has_room(scope):
            return False
        try:
            tenant.enter("infer")
        except ApiError:
            return False
        return True

    def _reply(self, reply: SendReply, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._count["POST", PATH, status] += 1
        reply(status, headers, body)


class _Exchange:
    """One request and its answer, within `most_s` seconds unless it comes from this process."""

    __slots__ = ("_futures", "_is_over", "_most_s", "_reply", "_service", "_tenant", "_terms", "_timer", "_writing")

    def __init__(self, service: ItemService, reply: SendReply, tenant: Tenant | None, most_s: float | None) -> None:
        self._service = service
        self._tenant = tenant
        self._terms = Terms()
        self._most_s = most_s
        self._reply = reply
        self._is_over = False
        self._futures: list[asyncio.Future[Answer]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def begin(self, scope: Scope, body: bytes) -> None:
        """Queue the items, or refuse them."""
        try:
            self._terms = terms = terms_of(scope)
            self._futures = self._service.submit(read_instances(body), terms)
        except Exception as error:
            self._refuse(error)
            return
        futures = self._futures
        future: asyncio.Future[Any] = futures[0] if len(futures) == 1 else asyncio.gather(*futures)
        timeout = self._service.timeout_of(terms)
        if timeout is None or (self._most_s is not None and timeout > self._most_s):
            timeout = self._most_s
        if timeout is not None:
            self._timer = future.get_loop().call_later(timeout, self._expire, timeout)
        future.add_done_callback(self._answer)

    def hang_up(self) -> None:
        """Forget it: nobody waits for the answer any more."""
        self._end(asyncio.CancelledError())
        self._send(CLIENT_GONE, {}, b"")

    def _answer(self, future: "asyncio.Future[Any]") -> None:
        if self._is_over:
            if not future.cancelled():
                future.exception()  # or it would be logged that nobody asked
            return
        if (error := future.exception()) is not None:
            self._fail(error)
            return
        if self._timer is not None:
            self._timer.cancel()
        answers = [each.result() for each in self._futures]
        values = [answer.value for answer in answers]
        # A small request may have a large answer.
        size = size_of(values, INLINE_SIZE)
        if size > INLINE_SIZE:
            self._writing = future.get_loop().create_task(self._write_beside(size, answers, values))
        else:
            self._finish(answers, _written(values))

    async def _write_beside(self, size: int, answers: list[Answer], values: list[Any]) -> None:
        written = await off_loop(size, partial(_written, values))
        if not self._is_over:
            self._finish(answers, written)

    def _finish(self, answers: list[Answer], written: bytes | Exception) -> None:
        if isinstance(written, Exception):
            self._refuse(written)
        else:
            self._send(200, timing_headers(answers), written)
        self._service.answered(answers, self._terms)

    def _expire(self, after: float) -> None:
        self._fail(out_of_time(after) if after == self._most_s else too_late())

    def _fail(self, error: BaseException) -> None:
        self._end(error)
        self._refuse(blamed(error, self._futures))

    def _end(self, error: BaseException) -> None:
        """Let nothing more come of it."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._service.failed(self._futures, error, self._terms)

    def _refuse(self, error: BaseException) -> None:
        refusal = as_api_error(error)
        status, body = oip_shape(refusal)
        self._send(status, refusal.headers, msgspec.json.encode(body))

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            tenant.leave()
        self._reply(status, headers, body)


def _has_room(scope: Scope) -> bool:
    """Whether there is room for a request's body beside what else its client has here."""
    held: HeldBody | None = scope.get(HELD)
    return held is None or held.charge(client_in(scope))


def _written(values: Sequence[Any]) -> bytes | Exception:
    """The body of an answer, or why there is none."""
    try:
        return write_predictions(values)
    except Exception as error:
        return error

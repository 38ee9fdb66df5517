"""What surrounds a route of a one-shot model: what its headers ask for and tell, its errors' shape, hanging up."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.engine.items.dispatcher import Answer
from chairlift.errors import InvalidRequest
from chairlift.server.http.api_errors import ApiError, Shape, as_api_error, openai_shape

Handler = Callable[[Request], Awaitable[Response]]

# A key of an ASGI scope: true for a background request. HTTP servers make scopes of their own, so no client can set it.
BACKGROUND = "chairlift.background"

_MAX_PRIORITY = 2**31


class Endpoint:
    """A handler as an ASGI application, its errors in the shape of its protocol."""

    def __init__(self, handler: Handler, shape: Shape = openai_shape) -> None:
        self._handler = handler
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            response = await self._handler(Request(scope, receive))
        except Exception as error:
            response = as_api_error(error).response(self._shape)
        await response(scope, receive, send)


class Terms(NamedTuple):
    """When and how urgently a request wants its answer; a background one takes what live ones leave."""

    timeout: float | None = None
    priority: int = 0
    background: bool = False


def terms_of(scope: Scope) -> Terms:
    """What a request's headers say, and whether whoever called the application in this process marked its scope."""
    terms = terms_in(scope["headers"])
    return terms._replace(background=True) if scope.get(BACKGROUND) else terms


def terms_in(headers: Iterable[tuple[bytes, bytes]]) -> Terms:
    """What `X-Request-Timeout-Ms` and `X-Request-Priority` say (lower is sooner, 0 is the default)."""
    timeout, priority = None, 0
    for name, value in headers:
        if name == b"x-request-timeout-ms":
            timeout = _milliseconds(value.decode("latin-1"))
        elif name == b"x-request-priority":
            priority = check_priority(_integer(value.decode("latin-1")), "X-Request-Priority")
    return Terms(timeout, priority)


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


def timing_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """What a request's slowest item saw: the longest wait, the longest call, and the largest batch."""
    if len(answers) == 1:
        (answer,) = answers
        queue, run, size = answer.queue_s, answer.run_s, answer.batch_size
    else:
        queue = max(answer.queue_s for answer in answers)
        run = max(answer.run_s for answer in answers)
        size = max(answer.batch_size for answer in answers)
    return {
        "X-Queue-Time-Ms": f"{queue * 1000:.3f}",
        "X-Inference-Time-Ms": f"{run * 1000:.3f}",
        "X-Batch-Size": str(size),
    }


def stays(receive: Receive) -> bool:
    """Whether this is a caller in this process, whose body is there at once and who never hangs up."""
    return getattr(receive, "stays", False)


class until_gone:
    """Cancels what is inside as soon as the client hangs up. The body must have been read."""

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
            raise ApiError(499, "the client closed the connection") from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

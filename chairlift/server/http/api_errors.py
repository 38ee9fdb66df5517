"""Every error as an HTTP answer, in the shape of the protocol that the client speaks.

OpenAI: {"error": {"message", "type", "param", "code"}}. OIP and KServe v1: {"error": message}.
TEI: {"error", "error_type"}. Cohere: {"message"}. Jina: {"detail"}.
Anthropic: {"type": "error", "error": {"type", "message", "details"?}, "request_id"}.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from chairlift.errors import (
    ITEM_ENDS_WORKER,
    ChairliftError,
    ConfigError,
    DeadlineExceeded,
    InputTooLong,
    InvalidRequest,
    JobError,
    QueueFull,
    RequestFailed,
    StorageFull,
    Unavailable,
    UnsupportedModel,
    WorkerLost,
    clip,
)

log = logging.getLogger(__name__)


class ErrorBody(msgspec.Struct):
    """The inside of an error response."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The outside of an error response."""

    error: ErrorBody


class OipErrorBody(msgspec.Struct):
    """An error as the Open Inference Protocol and KServe v1 have it."""

    error: str


class RerankErrorBody(msgspec.Struct):
    """An error as Cohere (`message`) and Jina (`detail`) have it."""

    message: str
    detail: str


class TeiErrorBody(msgspec.Struct):
    """An error as text-embeddings-inference has it."""

    error: str
    error_type: str


class AnthropicErrorBody(msgspec.Struct, omit_defaults=True):
    """The inside of an error as Anthropic has it; `details` has the `error_code`, where there is one."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorResponse(msgspec.Struct):
    """The outside of it; the id is that of an answer that had begun."""

    error: AnthropicErrorBody
    type: str = "error"
    request_id: str | None = None


class ApiError(Exception):
    """An error with everything that an HTTP answer needs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # What a client sent may be in it, and is sent back and logged at no great length.
        message = clip(message)
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorBody(message, kind, None if param is None else clip(param, 200), code)

    def encode(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode(ErrorResponse(self.body))

    def response(self, shape: "Shape | None" = None) -> Response:
        """The error as an HTTP answer, in OpenAI's shape if no other is given."""
        status, body = (shape or openai_shape)(self)
        return Response(msgspec.json.encode(body), status, self.headers, "application/json")


class PromptTooLong(ApiError):
    """The refusal of a prompt that has at least so many tokens, whatever they are, for a model that takes fewer."""

    def __init__(self, least: int, limit: int) -> None:
        message = f"This model's maximum context length is {limit} tokens. However, your prompt has at least {least}."
        super().__init__(400, f"{message} Shorten it.", "prompt", "context_length_exceeded")
        self.least, self.limit = least, limit


Shape = Callable[[ApiError], tuple[int, msgspec.Struct]]


def openai_shape(error: ApiError) -> tuple[int, ErrorResponse]:
    """As the OpenAI API has it."""
    return error.status, ErrorResponse(error.body)


def oip_shape(error: ApiError) -> tuple[int, OipErrorBody]:
    """As the Open Inference Protocol and KServe v1 have it."""
    return error.status, OipErrorBody(error.body.message)


def rerank_shape(error: ApiError) -> tuple[int, RerankErrorBody]:
    """As Cohere and Jina have it."""
    return error.status, RerankErrorBody(error.body.message, error.body.message)


def tei_shape(error: ApiError) -> tuple[int, TeiErrorBody]:
    """As text-embeddings-inference has it: kinds of its own, and a status for each of them."""
    status, kind = _TEI_CODES.get(error.body.code or "") or (
        _TEI_STATUS.get(error.status, error.status),
        _TEI_KINDS.get(error.status, "Validation"),
    )
    return status, TeiErrorBody(error.body.message, kind)


def anthropic_shape(error: ApiError) -> tuple[int, AnthropicErrorResponse]:
    """As Anthropic's API has it."""
    return error.status, anthropic_error(error)


def anthropic_error(error: ApiError, request_id: str | None = None) -> AnthropicErrorResponse:
    """An error of Anthropic's kinds; it has none for what is wrong with a request beyond these."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    details = None if error.body.code is None else {"error_code": error.body.code}
    body = AnthropicErrorBody(_ANTHROPIC_KINDS.get(error.status, usual), error.body.message, details)
    return AnthropicErrorResponse(body, request_id=request_id)


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TEI_CODES = {
    "context_length_exceeded": (413, "Validation"),
    "too_many_inputs": (413, "Validation"),
    "empty_input": (400, "Empty"),
    "wrong_task": (424, "Backend"),
}
_TEI_KINDS = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}
# Of an answer to a request that was alone in its worker, or in its call, as that ended: not all shapes have a code.
_ENDS_WORKER = {"X-Ends-Worker": "alone"}
# Whatever else is wrong with a request is 422 there, and a failed inference 424.
_TEI_STATUS = {400: 422, 500: 424}


def as_api_error(error: BaseException) -> ApiError:
    """Map any error to its HTTP answer; what is not a client's business is logged and stays here."""
    match error:
        case ApiError():
            return error
        case InputTooLong():
            return ApiError(400, str(error), error.param, "context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(error), error.param, error.code)
        case QueueFull():
            return try_later(str(error), "queue_full", error.retry_after)
        case Unavailable():
            retry = _retry_after(error.retry_after)
            code = "worker_lost" if isinstance(error, WorkerLost) else "unavailable"
            retry |= _ENDS_WORKER if isinstance(error, WorkerLost) and error.alone else {}
            return ApiError(503, without_folders(str(error)), code=code, kind="service_unavailable", headers=retry)
        case DeadlineExceeded():
            return ApiError(504, str(error), code="deadline_exceeded", kind="timeout")
        case ConfigError() | UnsupportedModel():
            return ApiError(400, _told_without_folders(error))
        case RequestFailed():
            message = _told_without_folders(error)
            headers = _ENDS_WORKER if error.code == ITEM_ENDS_WORKER else None
            return ApiError(500, message, code=error.code, kind="server_error", headers=headers)
        case StorageFull():
            message = _told_without_folders(error)
            return ApiError(507, message, code="storage_full", kind="server_error")
        case JobError():
            message = _told_without_folders(error)
            return ApiError(503, message, code="storage_failed", kind="server_error")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case _:
            log.error("unexpected error", exc_info=error)
            return ApiError(500, "the server failed on this request; its log says why", kind="server_error")


def try_later(problem: str, code: str, retry_after: float = 1, close: bool = False) -> ApiError:
    """The refusal (429) of what may be asked again in so many seconds; with `close`, over another connection."""
    headers = _retry_after(retry_after) | ({"Connection": "close"} if close else {})
    return ApiError(429, problem, code=code, kind="rate_limit_exceeded", headers=headers)


HANDLED: tuple[type[Exception], ...] = (ApiError, ChairliftError, HTTPException)


def without_folders(text: str) -> str:
    """A text with only the last part of each absolute path: where things lie is not a client's business."""
    return _FOLDERS.sub("", clip(text))


# In quotes a path may have spaces, and goes on up to the quote.
_FOLDERS = re.compile(
    r"""(?<=['"])/(?:[^'"\n/]*/)*(?=[^'"\n/]+['"])|(?<![\w./~'"*)-])/(?!/)(?:[^\s'"/,;:()<>]+/)*(?=[\w.-])"""
)


def _told_without_folders(error: Exception) -> str:
    """What to tell of an error; the log gets all of it, if that is more."""
    told = without_folders(str(error))
    if told != str(error) or isinstance(error, JobError):
        log.error("%s", error)
    return told


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(math.ceil(seconds), 1))}

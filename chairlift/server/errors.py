"""Every error as the OpenAI API shapes it: {"error": {"message", "type", "param", "code"}}."""

import logging
import math
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import ChairliftError, InvalidRequest, QueueFull, RequestFailed, Unavailable

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
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorBody(message, kind, param, code)

    def encode(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode(ErrorResponse(self.body))

    def response(self) -> Response:
        """The error as an HTTP answer."""
        return Response(self.encode(), self.status, self.headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """Map any error to its HTTP answer; what is not a client's business is logged and stays here."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), error.param)
        case QueueFull():
            retry = _retry_after(error.retry_after)
            return ApiError(429, str(error), code="queue_full", kind="rate_limit_exceeded", headers=retry)
        case Unavailable():
            retry = _retry_after(error.retry_after)
            return ApiError(503, str(error), code="unavailable", kind="service_unavailable", headers=retry)
        case RequestFailed():
            return ApiError(500, str(error), code="request_failed", kind="server_error")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case _:
            log.error("unexpected error", exc_info=error)
            return ApiError(500, "the server failed on this request; its log says why", kind="server_error")


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for the errors that are expected."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = ApiError(404, f"there is no {request.url.path} here", code="not_found")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        error = ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return as_api_error(error).response()


HANDLED: tuple[type[Exception], ...] = (ApiError, ChairliftError, HTTPException)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(math.ceil(seconds), 1))}

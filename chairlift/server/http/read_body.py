"""Bodies, read up to a limit in size and time."""

import asyncio

from starlette.requests import Request

from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.endpoint import stays

# A client that still writes when the connection closes may never see the answer, so this much more is read and dropped.
DRAIN_FACTOR = 4
_OCTETS = "application/octet-stream"


async def read_body(request: Request, max_bytes: int, timeout: float, binary: bool = False) -> bytes:
    """The whole body: JSON, or with `binary` also octets.

    Raises ApiError: 415 for a wrong type, 413 beyond `max_bytes`, 408 after `timeout` seconds.
    """
    _check_type(request, binary)
    if stays(request.receive):
        return await _read(request, max_bytes)
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, max_bytes)
    except TimeoutError:
        message = f"the body took more than {timeout:g} s to arrive (body_timeout_s)"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


def _check_type(request: Request, binary: bool) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Any other type could be posted by any web page that the user of a local server happens to visit.
    if kind != "application/json" and not kind.endswith("+json") and not (binary and kind == _OCTETS):
        raise ApiError(415, f"send JSON with 'Content-Type: application/json', not {kind}", code="unsupported_type")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"a body with Content-Encoding {encoding} is not supported", code="unsupported_encoding")


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    more = True
    while more and size <= max_bytes * DRAIN_FACTOR:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client closed the connection before its body was complete")
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
    if size > max_bytes:
        problem = f"the body is larger than the limit of {max_bytes} bytes (max_body_bytes)"
        raise ApiError(413, problem, code="body_too_large", headers={"Connection": "close"})
    return b"".join(chunks)

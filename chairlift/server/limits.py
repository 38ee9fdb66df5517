"""Bodies: read up to a limit, decode strictly, and say exactly what is wrong with them."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from chairlift.server.endpoint import stays
from chairlift.server.errors import ApiError

T = TypeVar("T")

# A client that still writes when the connection closes may never see the answer, so this much more is read and dropped.
DRAIN_FACTOR = 4
_OCTETS = "application/octet-stream"
_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(.*?)`")


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


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode a body, or raise a 400 that names the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _describe(str(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def _describe(message: str) -> ApiError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.n`" into our words and the field's name."""
    path = match[1].lstrip(".") if (match := _PATH.search(message)) else ""
    if field := _FIELD.match(message):
        name = f"{path}.{field[1]}" if path else field[1]
        if "unknown" in message:
            return ApiError(400, f"unknown field {name!r}", name, "unknown_field")
        return ApiError(400, f"the field {name!r} is required", name, "missing_field")
    problem = _PATH.sub("", message).replace("`", "")
    return ApiError(400, f"{path}: {problem[:1].lower()}{problem[1:]}" if path else problem, path or None)

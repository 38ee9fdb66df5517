"""Bodies that come compressed."""

import asyncio
import zlib
from collections.abc import Callable

from chairlift.server.http.api_errors import ApiError

# What bodies may be compressed as; zlib tells one from the other.
_ENCODINGS = ("gzip", "deflate")
_ANY_HEADER = zlib.MAX_WBITS | 32
# Bytes that are unpacked at a time.
_PIECE = 2**20


def check_encoding(encoding: str) -> None:
    """Raise ApiError (415) for a Content-Encoding that can't be undone."""
    if encoding.strip().lower() not in _ENCODINGS:
        problem = f"a body with Content-Encoding {encoding} is not supported, only {' and '.join(_ENCODINGS)}"
        raise ApiError(415, problem, code="unsupported_encoding")


async def unpacked(body: bytes, take: Callable[[int], None]) -> bytes:
    """A compressed body as it was, made a piece at a time, so that others have their turns.

    `take` counts the bytes of each piece, and raises where there is no room. Raises ApiError (400) if it is none.
    """
    unpack = zlib.decompressobj(_ANY_HEADER)
    pieces: list[bytes] = []
    while not unpack.eof and body:
        try:
            piece = unpack.decompress(body, _PIECE)
        except zlib.error as error:
            raise _not_packed(str(error)) from None
        take(len(piece))
        pieces.append(piece)
        body = unpack.unconsumed_tail
        await asyncio.sleep(0)
    if not unpack.eof:
        raise _not_packed("it ends too early")
    if unpack.unused_data:
        raise _not_packed("something follows its end")
    return b"".join(pieces)


def _not_packed(problem: str) -> ApiError:
    return ApiError(400, f"the body is not what its Content-Encoding says: {problem}", code="invalid_encoding")

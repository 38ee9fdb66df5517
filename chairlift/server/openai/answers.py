"""Server-sent events, and what to do when the client is gone."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.server.http.api_errors import as_api_error
from chairlift.server.http.endpoint import stays
from chairlift.server.openai.body_types import StreamOptions
from chairlift.server.openai.samples import Piece, Sample, close_all, pieces, usage

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"

# Lines end at these too for clients that split decoded text the way Python does; JSON lets them through.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


class EventStream(Response):
    """An answer in events. An error before the first event is an ordinary HTTP error; later, it is the last event."""

    def __init__(self, request_id: str, samples: Sequence[Sample], events: AsyncGenerator[bytes, None]) -> None:
        self._samples = samples
        self._events = events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": request_id}
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come, until the last one or until the client is gone."""
        started = False
        try:
            async with _cancelled_on_disconnect(receive, self._samples), contextlib.aclosing(self._events) as events:
                async for event in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not started:
                raise
            event = b"data: " + as_api_error(error).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            close_all(self._samples)
        if started:
            await send({"type": "http.response.body", "body": b""})


def encode_line(value: Any) -> bytes:
    """JSON that stays one line, whatever the client thinks ends a line."""
    return one_line(encode(value))


def one_line(raw: bytes) -> bytes:
    """The same JSON without the characters that some clients take for a line's end."""
    if not raw.isascii():
        for character, escape in _LINE_ENDS:
            raw = raw.replace(character, escape)
    return raw


class Events:
    """Renders one request's events. What never changes is encoded once; a token costs two or three copies."""

    def __init__(
        self, request_id: str, kind: str, created: int, model: str, n: int, options: StreamOptions | None
    ) -> None:
        constant = encode({"id": request_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + constant[:-1] + b',"choices":['
        self._heads: dict[int, bytes] = {}
        self._n = n
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._tail = b',"usage":null}\n\n' if self._usage else b"}\n\n"

    def event(self, index: int, rest: bytes, samples: Sequence[Sample]) -> bytes:
        """An event with one choice; `rest` is the choice's JSON after its index, with the closing brace."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + b'{"index":%d,' % index
        if self._continuous:
            return b"".join((head, rest, b'],"usage":', encode(usage(samples, self._n)), b"}\n\n"))
        return b"".join((head, rest, b"]", self._tail))

    def last(self, samples: Sequence[Sample]) -> bytes:
        """What follows the last choice: the usage, if it was asked for, and the end."""
        if not self._usage:
            return DONE
        return b"".join((self._head, b'],"usage":', encode(usage(samples, self._n)), b"}\n\n", DONE))


async def render(
    samples: Sequence[Sample], events: Events, write: Callable[[Piece], bytes]
) -> AsyncGenerator[bytes, None]:
    """One chunk for each step: the events that `write` makes of its pieces."""
    unfinished = len(samples)
    async with contextlib.aclosing(pieces(samples)) as groups:
        async for group in groups:
            chunk = b"".join([write(piece) for piece in group])
            unfinished -= sum(piece.finish_reason is not None for piece in group)
            if not unfinished:
                chunk += events.last(samples)
            if chunk:
                yield chunk


async def collect(request: Request, samples: Sequence[Sample], keep: Callable[[Piece], None]) -> bool:
    """Hand all pieces to `keep`; False if the client left before the end."""
    async with _cancelled_on_disconnect(request.receive, samples), contextlib.aclosing(pieces(samples)) as groups:
        async for group in groups:
            for piece in group:
                keep(piece)
    return all(sample.finish_reason is not None for sample in samples)


@contextlib.asynccontextmanager
async def _cancelled_on_disconnect(receive: Receive, samples: Sequence[Sample]) -> AsyncIterator[None]:
    """Cancel the samples as soon as the client closes its connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for sample in samples:
            sample.stream.cancel()

    if stays(receive):
        yield
        return
    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()

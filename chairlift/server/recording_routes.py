"""GET /v1/recording: what comes from now on, as lines of a trace, for as long as somebody reads them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import Unavailable
from chairlift.server.http.api_errors import ApiError, try_later
from chairlift.server.http.exchange import PartStream, off_loop
from chairlift.server.http.origins import check_same_site
from chairlift.server.http.paging import query_of, whole_number
from chairlift.server.models.registry import Models, models_of
from chairlift.server.models.trace_notes import SeenLine, TraceNotes

# How often lines are sent.
_PERIOD_S = 1.0
# So many at once, for so long.
MOST_RECORDINGS, _MOST_SECONDS = 4, 86_400
RECORDING_QUERY = {"seconds": Annotated[int, Meta(ge=1, le=_MOST_SECONDS)]}
# About what a line takes, in characters.
_LINE = 200
_RETRY_S = 5


async def stream_recording(request: Request) -> Response:
    """A line for each request of any model, until the reader leaves, or for so many `seconds`."""
    check_same_site(request.scope)
    given = query_of(request, RECORDING_QUERY).get("seconds")
    seconds = None if given is None else whole_number(given, _MOST_SECONDS, "seconds")
    recordings: set[TraceNotes] = request.app.state.recordings
    if len(recordings) >= MOST_RECORDINGS:
        message = f"{MOST_RECORDINGS} record this server already, which is the limit; try again"
        raise try_later(message, "too_many_recordings", _RETRY_S)
    notes, models = TraceNotes(), models_of(request)
    recordings.add(notes)

    def close() -> None:
        notes.stop()
        recordings.discard(notes)
        for service in models.all():
            if notes in service.recorders:
                service.recorders.remove(notes)

    until = None if seconds is None else time.monotonic() + seconds
    return PartStream("application/x-ndjson", _lines(notes, models, until), _last, close=close)


async def _lines(notes: TraceNotes, models: Models, until: float | None) -> AsyncGenerator[bytes, None]:
    yield b""  # so that the reader knows that it has begun
    while True:
        for service in models.all():
            if notes not in service.recorders:
                service.recorders.append(notes)
        left = _PERIOD_S if until is None else until - time.monotonic()
        await asyncio.sleep(max(min(left, _PERIOD_S), 0.0))
        if not notes.is_open:
            raise Unavailable(f"{notes.taker} is slower than requests come")
        seen = notes.take()
        if seen:
            size = sum(_LINE + len(each.prompt_ids) for each in seen)
            yield await off_loop(size, partial(_joined, notes, seen))
        if left <= _PERIOD_S and until is not None:
            return
        if {service.state for service in models.all()} == {"draining"}:
            return  # the server leaves


def _joined(notes: TraceNotes, seen: list[SeenLine]) -> bytes:
    return b"".join(notes.encoded(seen))


def _last(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": {"message": error.body.message}}) + b"\n"

"""/v1/batches, as OpenAI's API has it."""

import re
import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.jobs.store import Counts, Job
from chairlift.server.batches.file_routes import check_life
from chairlift.server.batches.record import About, as_batch
from chairlift.server.batches.service import Batches
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import as_json, read_json
from chairlift.server.http.paging import check_metadata, page_limit, query_of
from chairlift.server.http.tenants import TENANT

_DEFAULT_PAGE, _MAX_PAGE = 20, 100
LIST_QUERY = {"after": str, "limit": Annotated[int, Meta(ge=1, le=_MAX_PAGE)]}
_WINDOW = re.compile(r"(\d{1,8})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW_S = 30 * 86400


class OutputExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """When result files are deleted, counted from when they are made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=0)]


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None


_decoder = msgspec.json.Decoder(BatchBody)


async def create_batch(request: Request) -> Response:
    """POST: begin a batch."""
    batches: Batches = request.app.state.batches
    body = await read_json(request, _decoder)
    batches.endpoints.find(body.endpoint)
    check_metadata(body.metadata)
    life = body.output_expires_after
    noted = About(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        expires_at=time.time() + _seconds(body.completion_window),
        metadata=body.metadata,
        output_seconds=None if life is None else check_life(life.seconds, "output_expires_after.seconds"),
    )
    return _answer(await batches.create(noted, request.scope.get(TENANT)), None)


async def list_batches(request: Request) -> Response:
    """GET: batches, newest first."""
    batches: Batches = request.app.state.batches
    query = query_of(request, LIST_QUERY)
    limit = page_limit(query, _DEFAULT_PAGE, _MAX_PAGE)
    page, more = await batches.page(query.get("after"), limit, request.scope.get(TENANT))
    answer = {
        "object": "list",
        "data": [as_batch(job, counts) for job, counts in page],
        "first_id": page[0][0].id if page else None,
        "last_id": page[-1][0].id if page else None,
        "has_more": more,
    }
    return as_json(answer)


async def show_batch(request: Request) -> Response:
    """GET /v1/batches/{id}."""
    batches: Batches = request.app.state.batches
    return _answer(*await batches.get(request.path_params["batch"], request.scope.get(TENANT)))


async def cancel_batch(request: Request) -> Response:
    """POST /v1/batches/{id}/cancel."""
    batches: Batches = request.app.state.batches
    return _answer(*await batches.cancel(request.path_params["batch"], request.scope.get(TENANT)))


def _seconds(window: str) -> int:
    """How long a batch may take."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _SECONDS[match[2]] if match is not None else 0
    if not 1 <= seconds <= _LONGEST_WINDOW_S:
        problem = f"completion_window must be a time such as 24h, 30m or 2d, and at most 30d, got {window!r}"
        raise ApiError(400, problem, "completion_window", "invalid_completion_window")
    return seconds


def _answer(job: Job, counts: Counts | None) -> Response:
    return as_json(as_batch(job, counts))

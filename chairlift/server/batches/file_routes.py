"""/v1/files, as OpenAI's API has it."""

import re
import time
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from chairlift.jobs.store import StoredFile
from chairlift.server.batches.data_folder import MAX_FILES
from chairlift.server.batches.record import as_file
from chairlift.server.batches.service import Batches, new_file_id
from chairlift.server.batches.upload import Upload
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import as_json
from chairlift.server.http.paging import page_limit, query_of
from chairlift.server.http.tenants import TENANT, Tenant

SHORTEST_LIFE_S, LONGEST_LIFE_S = 3600, 30 * 86400

LIST_QUERY = {
    "after": str,
    "limit": Annotated[int, Meta(ge=1, le=MAX_FILES)],
    "order": Literal["asc", "desc"],
    "purpose": str,
}

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_NUMBER = re.compile(r"\d{1,12}")


class FileForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of POST /v1/files."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = msgspec.field(default=None, name=_ANCHOR)
    seconds: int | None = msgspec.field(default=None, name=_SECONDS)


_FIELDS = frozenset(FileForm.__struct_encode_fields__) - {"file"}


async def create_file(request: Request) -> Response:
    """POST: keep a file."""
    batches: Batches = request.app.state.batches
    tenant: Tenant | None = request.scope.get(TENANT)
    owner = tenant.name if tenant is not None else None
    folder = await batches.upload_folder(owner)
    file_id = new_file_id()
    upload = Upload(folder, folder.place(file_id), batches.config, _FIELDS, owner)
    try:
        await upload.receive(request)
        file = _describe(file_id, upload, owner)
        await batches.add_file(file)
    except BaseException:
        upload.discard()
        raise
    return as_json(as_file(file))


async def list_files(request: Request) -> Response:
    """GET: files by the time that they came."""
    batches: Batches = request.app.state.batches
    query = query_of(request, LIST_QUERY)
    limit, order = page_limit(query, MAX_FILES, MAX_FILES), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order!r}", "order")
    viewer = request.scope.get(TENANT)
    files = await batches.files(viewer)
    if order == "desc":
        files.reverse()
    if (after := query.get("after")) is not None:
        last, _ = await batches.file(after, viewer)
        files = files[files.index(last) + 1 :]
    wanted = [file for file in files if query.get("purpose") in (None, file.purpose)]
    page = wanted[:limit]
    return as_json(
        {
            "object": "list",
            "data": [as_file(file) for file in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(wanted) > limit,
        }
    )


async def show_file(request: Request) -> Response:
    """GET /v1/files/{id}."""
    batches: Batches = request.app.state.batches
    file, _ = await batches.file(request.path_params["file"], request.scope.get(TENANT))
    return as_json(as_file(file))


async def file_content(request: Request) -> Response:
    """GET /v1/files/{id}/content."""
    batches: Batches = request.app.state.batches
    file, path = await batches.content(request.path_params["file"], request.scope.get(TENANT))
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete_file(request: Request) -> Response:
    """DELETE /v1/files/{id}."""
    batches: Batches = request.app.state.batches
    file_id = request.path_params["file"]
    await batches.remove_file(file_id, request.scope.get(TENANT))
    return as_json({"id": file_id, "object": "file", "deleted": True})


def check_life(seconds: int, field: str) -> int:
    """How long a file may be asked to live."""
    if not SHORTEST_LIFE_S <= seconds <= LONGEST_LIFE_S:
        problem = f"{field} must be between {SHORTEST_LIFE_S} (an hour) and {LONGEST_LIFE_S} (30 days), got {seconds}"
        raise ApiError(400, problem, field)
    return seconds


def _describe(file_id: str, upload: Upload, owner: str | None) -> StoredFile:
    """What is kept of an upload. Raises a 400 for fields that are wrong."""
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise ApiError(400, "the field 'purpose' is required", "purpose", "missing_field")
    if purpose != "batch":
        raise ApiError(400, f"files here are for batches: purpose must be 'batch', got {purpose!r}", "purpose")
    now = time.time()
    life = _life(upload.fields)
    return StoredFile(
        id=file_id,
        bytes=upload.size,
        created_at=now,
        filename=upload.filename or "",
        purpose=purpose,
        expires_at=None if life is None else now + life,
        tenant=owner,
    )


def _life(fields: Mapping[str, str]) -> int | None:
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ApiError(400, f"{_ANCHOR} must be 'created_at', got {anchor!r}", _ANCHOR)
    if seconds is None or not _NUMBER.fullmatch(seconds):
        raise ApiError(400, f"{_SECONDS} must be a number of seconds, got {seconds!r}", _SECONDS)
    return check_life(int(seconds), _SECONDS)

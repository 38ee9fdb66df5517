"""A multipart upload, written to the disk as it comes: one file, and short fields beside it."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from chairlift.config.server import ServerConfig
from chairlift.errors import JobError
from chairlift.jobs.result_file import explain, sync_folder
from chairlift.server.batches.data_folder import FILE_MODE, Folder, has_room
from chairlift.server.http.api_errors import ApiError, as_api_error
from chairlift.server.http.buffered import HeldBody, buffers_full, too_many
from chairlift.server.http.exchange import DRAIN_FACTOR, HELD, time_for, too_slow

_FORM = b"multipart/form-data"
_FILE = "file"
# All but the file's bytes: names, headers and fields.
_MAX_AROUND = 64 * 1024
# RFC 2046.
_MAX_BOUNDARY = 70
# As long as file systems have them: lists tell all names.
_MAX_NAME = 255
_WRITE_BYTES = 2**20
# How much of an upload that is refused at its head is read, so that a client that only listens when it has sent all of
# a small one sees why.
_TURNED_AWAY_BYTES = 2**20


class Upload:
    """Takes in a tenant's body, and its file to `path`; `fields` are those that `known` names. `discard` undoes it.

    What is wrong is said at the end, when the client listens; whatever comes till then is dropped.
    """

    def __init__(
        self, folder: Folder, path: Path, config: ServerConfig, known: frozenset[str], tenant: str | None = None
    ) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._folder, self._path, self._config, self._known = folder, path, config, known
        self._tenant = tenant
        self._refusal: ApiError | None = None
        self._fd: int | None = None
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._disposition = b""
        self._name = ""
        self._value = bytearray()
        self._around = 0
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._ended = False
        self._delimiter = b""
        self._received = 0
        self._waited = 0.0

    async def receive(self, request: Request) -> None:
        """Read the whole body. Raises ApiError: 400, 408, 413, 415, 429, 499 or 507."""
        uploads = self._folder.uploads
        if not has_room(uploads, self._config.max_uploads, self._tenant):
            count = uploads.total()
            more = await self._drop_body(request)
            raise too_many("uploads", count, "max_uploads", close=more)
        uploads[self._tenant] += 1
        try:
            await self._receive(request)
        finally:
            uploads[self._tenant] -= 1

    async def _drop_body(self, request: Request) -> bool:
        """Read the body of an upload that is refused at its head; return whether there is more of it than that."""
        more = True
        while more and self._received <= _TURNED_AWAY_BYTES:
            chunk, more = await self._next(request)
            _give(request, len(chunk))
        return more

    async def _receive(self, request: Request) -> None:
        try:
            boundary = _boundary(request)
        except ApiError as error:
            if await self._drop_body(request):
                error.headers["Connection"] = "close"
            raise
        self._delimiter = b"\r\n--" + boundary
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        most = DRAIN_FACTOR * (self._config.max_file_bytes + _MAX_AROUND)
        more = True
        while more and self._received <= most:
            chunk, more = await self._next(request)
            buffered = self._buffered + len(chunk)
            if self._refusal is None:
                await self._take(parser, chunk)
            _give(request, buffered - self._buffered)
        if self._refusal is None and not self._ended:
            self._refuse(ApiError(400, "the multipart body ends before its last part does", code="invalid_multipart"))
        if self._refusal is None and self.filename is None:
            self._refuse(ApiError(400, "the field 'file' is required", _FILE, "missing_field"))
        if self._refusal is not None:
            if more:
                self._refusal.headers["Connection"] = "close"
            raise self._refusal
        await self._write(self._keep)

    def discard(self) -> None:
        """Take back whatever was written."""
        self._close()
        self._path.unlink(missing_ok=True)
        self._folder.used[self._tenant] -= self.size
        self.size = 0

    async def _next(self, request: Request) -> tuple[bytes, bool]:
        """The next piece of the body. It may take any time in all, but must not pause for long, nor only drip."""
        config, loop = self._config, asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(min(config.body_timeout_s, time_for(self._received, config) - self._waited)):
                message = await request.receive()
        except TimeoutError:
            raise too_slow("the upload", config) from None
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client closed the connection before its upload was complete")
        # What the disk takes is not the client's time.
        self._waited += loop.time() - start
        chunk: bytes = message.get("body", b"")
        held: HeldBody | None = request.scope.get(HELD)
        self._received += len(chunk)
        if held is not None and held.refused:
            self._received += held.dropped
            held.dropped = 0
            self._refuse(self._refusal or buffers_full())
        return chunk, message.get("more_body", False)

    async def _take(self, parser: MultipartParser, chunk: bytes) -> None:
        try:
            # What is only like the end of a part keeps the parser busy.
            if chunk.count(self._delimiter) > len(self._known) + 2:
                message = "lines of the file begin with the boundary, which may be between parts alone: choose another"
                raise ApiError(400, message, code="invalid_multipart")
            parser.write(chunk)
            if self._buffered >= _WRITE_BYTES:
                await self._write(self._flush)
        except MultipartParseError as error:
            self._refuse(ApiError(400, f"the body is not valid multipart/form-data: {error}", code="invalid_multipart"))
        except (ApiError, JobError) as error:
            self._refuse(as_api_error(error))

    def _refuse(self, refusal: ApiError) -> None:
        self._refusal = refusal
        self._chunks.clear()
        self._buffered = 0

    # What the parser finds

    def _begin_part(self) -> None:
        self._disposition = b""
        self._value = bytearray()

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        name, value = self._header
        self._header = (name + data[start:end], value)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        name, value = self._header
        self._header = (name, value + data[start:end])

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = (b"", b"")

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = name = options.get(b"name", b"").decode("utf-8", "replace")
        if name != _FILE and name not in self._known:
            raise ApiError(400, f"unknown field {name!r}", name, "unknown_field")
        if name in self.fields or (name == _FILE and self.filename is not None):
            raise ApiError(400, f"the field {name!r} is there twice", name, "invalid_multipart")
        if name == _FILE:
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
            if len(self.filename) > _MAX_NAME:
                problem = f"the file's name has {len(self.filename)} characters, more than {_MAX_NAME}"
                raise ApiError(400, problem, "file", "name_too_long")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._reserve(end - start)
            self._chunks.append(data[start:end])
            self._buffered += end - start
        else:
            self._count(end - start)
            self._value += data[start:end]

    def _end_part(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True

    def _count(self, more: int) -> None:
        self._around += more
        if self._around > _MAX_AROUND:
            raise ApiError(413, f"fields beside the file may have {_MAX_AROUND} bytes in all", code="body_too_large")

    def _reserve(self, more: int) -> None:
        """Count bytes of the file, on which two limits lie."""
        config, folder = self._config, self._folder
        if self.size + more > config.max_file_bytes:
            problem = f"the file is larger than the limit of {config.max_file_bytes} bytes (max_file_bytes)"
            raise ApiError(413, problem, _FILE, "file_too_large")
        if not has_room(folder.used, config.max_files_bytes, self._tenant, more):
            limit = f"all files together may have {config.max_files_bytes} bytes (max_files_bytes)"
            problem = f"{limit}, and those of one key no more than are left free: delete some"
            raise ApiError(413, problem, _FILE, "storage_limit_exceeded")
        self.size += more
        folder.used[self._tenant] += more

    # The disk

    async def _write(self, work: Callable[[], None]) -> None:
        """Work in a thread, and put what goes wrong into words. Being cancelled, wait for the thread."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._explained, work))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise

    def _explained(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            raise explain(error, self._path) from error

    def _flush(self) -> None:
        fd = self._open() if self._fd is None else self._fd
        view = memoryview(b"".join(self._chunks))
        self._chunks.clear()
        self._buffered = 0
        while view:
            view = view[os.write(fd, view) :]

    def _keep(self) -> None:
        """See to it that the file is there after a power cut."""
        self._flush()
        assert self._fd is not None
        os.fsync(self._fd)
        self._close()
        sync_folder(self._path.parent)

    def _open(self) -> int:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _give(request: Request, size: int) -> None:
    """Bytes of the body are held no more: they are on the disk, or dropped."""
    held: HeldBody | None = request.scope.get(HELD)
    if held is not None:
        held.give(size)


def _boundary(request: Request) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        problem = f"an upload with Content-Encoding {encoding[:_MAX_NAME]} is not supported; send the file as it is"
        raise ApiError(415, problem, code="unsupported_encoding")
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != _FORM or not boundary:
        given = kind.decode("latin-1") or "nothing"
        problem = f"send the file as multipart/form-data with a boundary, not {given}"
        raise ApiError(415, problem, code="unsupported_type")
    if len(boundary) > _MAX_BOUNDARY:
        problem = f"the multipart boundary has {len(boundary)} characters, and may have {_MAX_BOUNDARY}"
        raise ApiError(400, problem, code="invalid_multipart")
    return boundary

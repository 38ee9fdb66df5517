"""One request for each line of an input, read a window at a time. A line that is wrong is a line with an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from chairlift.bodies import decode
from chairlift.errors import InvalidRequest, JobError

MAX_LINE_BYTES = 16 * 2**20
# A line is a body and what stands around it.
ENVELOPE_BYTES = 2**16

_BOM = b"\xef\xbb\xbf"
_SKIPPED_BYTES = 2**20


class LineError(msgspec.Struct):
    """Why a line can't be sent; `code` is for programs."""

    code: str
    message: str
    param: str | None = None


class Line(msgspec.Struct, kw_only=True):
    """Line `number` (from 1) as a request: `body` is JSON, to be posted to the path `url`; `custom_id` is JSON too.

    With an `error` there is nothing to send. A blank line wants no result.
    """

    number: int
    custom_id: bytes = b"null"
    url: str = ""
    body: bytes = b""
    error: LineError | None = None
    blank: bool = False


Parse = Callable[[int, bytes], Line]


class Reader(Protocol):
    """Reads an input from front to back. `number` lines are read, and end at byte `offset`, if the format has such."""

    number: int
    offset: int

    def skip_to(self, number: int, offset: int) -> None:
        """Go on after line `number`, which ends at `offset`. Comes before the first `read`."""
        ...

    def read(self, most: int, max_bytes: int) -> list[Line]:
        """The next lines, `most` or as many as hold `max_bytes`; none at the end. Raises JobError."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class JsonLines:
    """A file of one JSON document a line, each made a request by `parse`. Lines above `max_line_bytes` are errors.

    Takes LF and CRLF, a byte order mark, and a last line that no newline ends. Raises JobError if it can't be read.
    """

    def __init__(self, path: Path, parse: Parse, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.number = 0
        self.offset = 0
        self._path = path
        self._parse = parse
        self._most = max_line_bytes
        try:
            self._file = path.open("rb", buffering=2**18)
        except OSError as error:
            raise unreadable(path, error) from None

    def skip_to(self, number: int, offset: int) -> None:
        """Seek."""
        self._file.seek(offset)
        self.number, self.offset = number, offset

    def read(self, most: int, max_bytes: int) -> list[Line]:
        """The next lines."""
        lines: list[Line] = []
        end = self.offset + max_bytes
        try:
            while len(lines) < most and self.offset < end and (raw := self._file.readline(self._most + 1)):
                self.number += 1
                self.offset += len(raw)
                lines.append(self._line(raw))
        except OSError as error:
            raise unreadable(self._path, error) from None
        return lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, raw: bytes) -> Line:
        if self.number == 1:
            raw = raw.removeprefix(_BOM)
        if len(raw) > self._most and not raw.endswith(b"\n"):
            self._skip_rest()
            return Line(number=self.number, error=_too_long(self.number, self._most))
        if raw.isspace() or not raw:
            return Line(number=self.number, blank=True)
        return self._parse(self.number, raw)

    def _skip_rest(self) -> None:
        while raw := self._file.readline(_SKIPPED_BYTES):
            self.offset += len(raw)
            if raw.endswith(b"\n"):
                return


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of OpenAI's batch format."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: Any = None


_batch_line = msgspec.json.Decoder(BatchLine)
_streamed = msgspec.json.Decoder(_Streamed)


def parse_batch_line(number: int, raw: bytes) -> Line:
    """A line of OpenAI's batch format as a request."""
    try:
        given = decode(raw, _batch_line)
        body = bytes(given.body)
        _check(given, body)
    except InvalidRequest as error:
        code = error.code or "invalid_line"
        problem = LineError(code, f"line {number}: {error}", error.param)
        return Line(number=number, custom_id=_custom_id(raw), error=problem)
    return Line(number=number, custom_id=msgspec.json.encode(given.custom_id), url=given.url, body=body)


def lines_for(model: str) -> Parse:
    """As `parse_batch_line`, of lines that name no model: their requests name this one."""
    named = b'"model":%b}' % msgspec.json.encode(model)

    def parse(number: int, raw: bytes) -> Line:
        line = parse_batch_line(number, raw)
        if line.error is None:
            # Of several fields of a name the last one counts.
            fields = line.body.rstrip()[:-1].rstrip()
            line.body = fields + (named if fields == b"{" else b"," + named)
        return line

    return parse


def _check(given: BatchLine, body: bytes) -> None:
    """Raise InvalidRequest for what no route would take."""
    if given.method != "POST":
        raise InvalidRequest(f"method must be POST, got {given.method!r}", "method", "invalid_method")
    if not given.url.startswith("/") or "?" in given.url or "#" in given.url:
        message = f"url must be a path such as /v1/chat/completions, got {given.url!r}"
        raise InvalidRequest(message, "url", "invalid_url")
    if not body.startswith(b"{"):
        raise InvalidRequest("body must be an object", "body", "invalid_body")
    if decode(body, _streamed).stream:
        message = "stream must be false: a batch gives each line's answer as a whole"
        raise InvalidRequest(message, "body.stream", "stream_not_supported")


class _Named(msgspec.Struct):
    custom_id: str


_named = msgspec.json.Decoder(_Named)


def _custom_id(raw: bytes) -> bytes:
    """The id of a line that is otherwise wrong, if that much can be read."""
    try:
        return msgspec.json.encode(_named.decode(raw).custom_id)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b"null"


def count_newlines(path: Path, stop: Callable[[], bool] = lambda: False) -> int:
    """About how many lines a file has: its newlines, and one more if the last line has none.

    Reads all of it, or as far as it comes before it is to `stop`.
    """
    count, last = 0, b"\n"
    with path.open("rb", buffering=0) as file:
        while not stop() and (chunk := file.read(2**20)):
            count += chunk.count(b"\n")
            last = chunk[-1:]
    return count + (last != b"\n")


def unreadable(path: Path, error: OSError) -> JobError:
    """An input that can't be read, in words."""
    return JobError(f"{path} can't be read: {error.strerror or error}")


def _too_long(number: int, most: int) -> LineError:
    return LineError("line_too_long", f"line {number}: a line may have {most} bytes")

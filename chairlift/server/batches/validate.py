"""Looks through a batch's input before anything of it runs."""

import asyncio
from hashlib import blake2b
from pathlib import Path

import msgspec

from chairlift.config.server import ServerConfig
from chairlift.errors import InvalidRequest, clip
from chairlift.jobs.lines import JsonLines, Line, parse_batch_line
from chairlift.server.batches.endpoints import BatchEndpoint
from chairlift.server.batches.record import Problem
from chairlift.server.http.api_errors import ApiError, as_api_error

MAX_PROBLEMS = 100
# A batch's record tells what is wrong with so many lines, whatever these have for names.
_NAME_CHARS, _PARAM_CHARS = 100, 200

# So few at a time that live requests hardly notice.
_WINDOW_LINES = 256
_WINDOW_BYTES = 2**20


class _NamesModel(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_NamesModel)


class Validation:
    """Goes through an input, a window at a time. What it remembers of a line is a short hash of its id.

    `lines` counts those that are not blank; `problems` are the first `MAX_PROBLEMS`, in the order of the file. `model`
    is the one that all lines name, if they name one.
    """

    def __init__(self, path: Path, endpoint: BatchEndpoint, config: ServerConfig) -> None:
        self.lines = 0
        self.problems: list[Problem] = []
        self.model: str | None = None
        self._path, self._endpoint, self._max_lines = path, endpoint, config.max_batch_lines
        self._max_line_bytes = endpoint.max_line_bytes(config)
        self._seen: dict[bytes, int] = {}
        self._first: int | None = None
        self._blank = 0

    async def run(self, ending: asyncio.Event) -> bool:
        """Go through all of it, unless told to end; whether it came to an end. Raises JobError if it can't be read."""
        if not self._endpoint.bodies_name_models:
            self._check_failure(None, None)
        reader = await asyncio.to_thread(JsonLines, self._path, parse_batch_line, self._max_line_bytes)
        try:
            while not ending.is_set():
                window = await asyncio.to_thread(reader.read, _WINDOW_LINES, _WINDOW_BYTES)
                if not window or not await asyncio.to_thread(self._check_window, window):
                    break
        finally:
            reader.close()
        if not self.lines and not self.problems:
            self._add("empty_file", "the input has no lines", None, None)
        return not ending.is_set()

    def _check_window(self, window: list[Line]) -> bool:
        """Check some lines; False if no more are wanted."""
        for line in window:
            self.lines += not line.blank
            self._blank += line.blank
            # Blank ones take time, too.
            if max(self.lines, self._blank) > self._max_lines:
                blank = "blank " if self._blank > self._max_lines else ""
                message = f"the input has more {blank}lines than the limit of {self._max_lines} (max_batch_lines)"
                self._add("too_many_lines", message, line.number, None)
                return False
            if line.blank:
                continue
            self._check(line)
            if len(self.problems) == MAX_PROBLEMS:
                return False
        return True

    def _check(self, line: Line) -> None:
        if line.error is not None:
            self._add(line.error.code, line.error.message, line.number, line.error.param)
            return
        earlier = self._seen.setdefault(blake2b(line.custom_id, digest_size=16).digest(), line.number)
        if earlier != line.number:
            message = f"lines {earlier} and {line.number} have the same custom_id {line.custom_id.decode()[:100]}"
            self._add("duplicate_custom_id", message, line.number, "custom_id")
        elif line.url != self._endpoint.path:
            url = clip(line.url, _NAME_CHARS)
            message = f"line {line.number}: url is {url!r}, and the batch is for {self._endpoint.path!r}"
            self._add("mismatched_url", message, line.number, "url")
        elif self._endpoint.bodies_name_models:
            self._check_model(line)

    def _check_model(self, line: Line) -> None:
        try:
            model = _named.decode(line.body).model
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = f"line {line.number}: body.model must be a string"
            self._add("invalid_model", message, line.number, "body.model")
            return
        if self._first is None:
            self._first, self.model = line.number, model
            self._look_up(line.number, model)
        elif model != self.model:
            message = f"line {line.number} is for {_quoted(model)}, line {self._first} for {_quoted(self.model)}"
            self._add("mismatched_model", f"{message}: a batch has one model", line.number, "body.model")

    def _look_up(self, number: int, model: str | None) -> None:
        try:
            self._endpoint.model(model)
        except (ApiError, InvalidRequest) as error:
            body = as_api_error(error).body
            self._add(body.code or "invalid_model", f"line {number}: {body.message}", number, "body.model")
        else:
            self._check_failure(model, number)

    def _check_failure(self, model: str | None, number: int | None) -> None:
        """A new batch does not wait for a model that has failed; one that had begun may, for the next server's."""
        if (failure := self._endpoint.failure(model)) is not None:
            self._add("model_failed", f"the model can't be served: {failure}", number, None)

    def _add(self, code: str, message: str, line: int | None, param: str | None) -> None:
        self.problems.append(Problem(code, clip(message), line, param and clip(param, _PARAM_CHARS)))


def _quoted(model: str | None) -> str:
    return "no model" if model is None else f"model {clip(model, _NAME_CHARS)!r}"

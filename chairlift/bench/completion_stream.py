"""One streamed answer: ready-made bytes go out, and the moments at which text came back are kept.

The client shares its cores with the server that it measures, so this is a bare protocol on httptools. A token costs one
parser call, a split and a few searches in its line; only the line with the usage is parsed as JSON.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

# Text in an event of a completion or of a chat, not empty.
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"[^"]')


class Target(NamedTuple):
    """A server, the model to ask for, and fields and headers that every request carries."""

    host: str
    port: int
    path: str
    model: str
    extra: dict[str, Any]
    headers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        url: str,
        model: str,
        extra: dict[str, Any] | None = None,
        path: str = "/v1/completions",
        headers: tuple[str, ...] = (),
    ) -> "Target":
        """Take the address apart; a trailing /v1 may be there or not. Raises ValueError for one that is none."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// address")
        path = parts.path.rstrip("/").removesuffix("/v1") + path
        return cls(parts.hostname, parts.port or 80, path, model, extra or {}, headers)

    def request(self, prompt: list[int], max_tokens: int, **fields: Any) -> bytes:
        """The whole HTTP request for a greedy, streamed completion of exactly `max_tokens` tokens."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self.post(body | fields)

    def post(self, body: dict[str, Any], headers: tuple[str, ...] = ()) -> bytes:
        """The whole HTTP request for a body, of which `extra` fields go before its own."""
        raw = json.dumps(body | self.extra, separators=(",", ":")).encode()
        head = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(raw)}",
            *self.headers,
            *headers,
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


@dataclass(slots=True)
class Outcome:
    """What became of a request, in seconds of the performance counter, as uvloop's own clock
    counts whole milliseconds.

    `due` is when it should have been sent, `sent` when it was, `ended` when the answer was complete. `times` has a
    moment for each event with text, or that of an answer which comes as a whole; `tokens` is what the server says it
    made, or else the number of those events.
    """

    due: float
    sent: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


class _Reader(asyncio.Protocol):
    """Fills in an outcome as the answer arrives; `done` is set at its end, good or bad."""

    def __init__(self, outcome: Outcome, loop: asyncio.AbstractEventLoop) -> None:
        self._outcome = outcome
        self._parser: Any = httptools.HttpResponseParser(self)
        self._rest = b""
        self._refused = self._whole = False
        self._now = 0.0
        self._usage: int | None = None
        self.done: asyncio.Future[None] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError, KeyError) as error:
            self._end(f"malformed answer: {error!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = time.perf_counter()
        self._end("the connection closed before the end")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._whole = value.lower().startswith(b"application/json")

    def on_headers_complete(self) -> None:
        self._refused = self._parser.get_status_code() != 200

    def on_body(self, body: bytes) -> None:
        if self._refused:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line)

    def on_message_complete(self) -> None:
        if self._refused:
            self._end(f"HTTP {self._parser.get_status_code()}: {self._rest[:200].decode(errors='replace')}")
        elif self._whole:
            self._outcome.times.append(self._now)
            self._usage = 0
            self._end(None)
        else:
            self._end(None if self._outcome.times or self._usage else "an answer without tokens")

    def _take(self, line: bytes) -> None:
        if _TEXT.search(line):
            self._outcome.times.append(self._now)
        elif b'"error"' in line:
            self._end(f"error event: {line[5:205].decode(errors='replace')}")
        if b'"usage":{' in line or b'"usage": {' in line:
            self._usage = json.loads(line[5:])["usage"]["completion_tokens"]

    def _end(self, error: str | None) -> None:
        if self.done.done():
            return
        outcome = self._outcome
        outcome.ended, outcome.error = self._now, error
        outcome.tokens = len(outcome.times) if self._usage is None else self._usage
        if not outcome.times and outcome.tokens:
            outcome.times.append(self._now)
        self.done.set_result(None)


async def stream(target: Target, request: bytes, due: float) -> Outcome:
    """Send a request and read its answer to the end; failures are told in the outcome. Cancelling it hangs up."""
    loop = asyncio.get_running_loop()
    outcome = Outcome(due, time.perf_counter())
    try:
        transport, reader = await loop.create_connection(lambda: _Reader(outcome, loop), target.host, target.port)
    except OSError as error:
        outcome.ended, outcome.error = time.perf_counter(), f"no connection: {error.strerror or error}"
        return outcome
    try:
        outcome.sent = time.perf_counter()
        transport.write(request)
        await reader.done
    finally:
        transport.abort()
    return outcome

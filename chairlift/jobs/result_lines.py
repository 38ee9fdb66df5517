"""Result lines as OpenAI's batch format has them."""

import contextlib
import re

import msgspec

from chairlift.jobs.lines import Line, LineError
from chairlift.jobs.replies import Reply

# Answers that say how many tokens they took do so at their end, and no text in JSON holds an unescaped quote.
_USAGE = re.compile(rb'"usage":(\{.*\})\}$')
_USAGE_BYTES = 300


class Details(msgspec.Struct):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int = 0


class WrittenDetails(msgspec.Struct):
    """How much of what was written was reasoning."""

    reasoning_tokens: int = 0


class LineUsage(msgspec.Struct):
    """The tokens that an answer says it took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None
    completion_tokens_details: WrittenDetails | None = None


class ResponseUsage(msgspec.Struct):
    """The same, as a response of /v1/responses names it."""

    input_tokens: int
    output_tokens: int
    input_tokens_details: Details | None = None
    output_tokens_details: WrittenDetails | None = None


_usage = msgspec.json.Decoder(LineUsage)
_response_usage = msgspec.json.Decoder(ResponseUsage)
_NO_USAGE = LineUsage()


def answered(result_id: str, line: Line, reply: Reply) -> bytes:
    """The result of a line that was answered, well or with an error."""
    request_id = reply.header(b"x-request-id") or result_id.encode()
    return b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":"%b","body":%b},"error":null}\n' % (
        result_id.encode(),
        line.custom_id,
        reply.status,
        request_id,
        _one_line(reply),
    )


def unanswered(result_id: str, line: Line, error: LineError) -> bytes:
    """The result of a line that never got an answer."""
    about = msgspec.json.encode({"code": error.code, "message": error.message, "param": error.param})
    return b'{"id":"%b","custom_id":%b,"response":null,"error":%b}\n' % (result_id.encode(), line.custom_id, about)


def usage_of(body: bytes) -> LineUsage:
    """What an answer says of its tokens; zeros if it says nothing."""
    found = _USAGE.search(body, max(len(body) - _USAGE_BYTES, 0))
    try:
        if found is None:
            return _NO_USAGE
        if b'"input_tokens":' in found[1]:
            usage = _response_usage.decode(found[1])
            read, written = usage.input_tokens_details, usage.output_tokens_details
            return LineUsage(usage.input_tokens, usage.output_tokens, read, written)
        return _usage.decode(found[1])
    except msgspec.DecodeError:
        return _NO_USAGE


def _one_line(reply: Reply) -> bytes:
    """A JSON document without line ends; whatever is not JSON becomes a string."""
    body = reply.body
    kind = (reply.header(b"content-type") or b"").partition(b";")[0]
    if kind == b"application/json" and body:
        if b"\n" not in body and body[:1] in b"{[":
            return body
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.format(body, indent=-1)
    return msgspec.json.encode(body.decode("utf-8", "replace"))

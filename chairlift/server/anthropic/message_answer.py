"""A reply as Anthropic's message: its blocks, as events while they come or as one document in the end."""

import contextlib
import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.core.finished import FinishReason
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.conversation import OpenConversation
from chairlift.server.conversations.reply_steps import EarlyParts, reply_steps
from chairlift.server.http.api_errors import ApiError, anthropic_error
from chairlift.server.http.exchange import PartStream, as_json, new_id, sse_event, until_gone
from chairlift.server.http.part_writer import WRITER, PartWriter
from chairlift.server.models.sequence_service import Sample, SequenceService, close_all
from chairlift.text.reply import ArgumentsPart, CallPart, ContentPart, ReasoningPart, ReplyPart

_PING = sse_event("ping", {"type": "ping"})
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_arguments_decoder = msgspec.json.Decoder(dict[str, Any])


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event, named as its type is."""
    return sse_event(data["type"], data)


class MessageBlocks:
    """The blocks of one reply, and the events that tell of them, as its parts come.

    With `omit_thinking` it is said that the model thought, and not what.
    """

    def __init__(self, omit_thinking: bool) -> None:
        self._omit_thinking = omit_thinking
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        # Of the block that is open; of a tool_use, its input as JSON.
        self._text: list[str] = []
        self.calls = 0

    def push(self, part: ReplyPart) -> bytes:
        """Another part."""
        match part:
            case ContentPart():
                return self._say("text", part.text)
            case ReasoningPart():
                return self._say("thinking", part.text)
            case CallPart():
                self.calls += 1
                block = {"type": "tool_use", "id": new_id("toolu", "_"), "name": part.name, "input": {}}
                return self._begin(block)
            case ArgumentsPart():
                self._text.append(part.text)
                return self._delta({"type": "input_json_delta", "partial_json": part.text})

    def finish(self) -> bytes:
        """There are no more parts. A message has at least one block."""
        made = b"" if self._done or self._open is not None else self._begin({"type": "text", "text": ""})
        return made + self._end()

    def content(self) -> list[dict[str, Any]]:
        """All blocks, after `finish`."""
        return self._done

    def _say(self, kind: str, text: str) -> bytes:
        made = b""
        if self._open is None or self._open["type"] != kind:
            empty = {"type": kind, kind: ""}
            made = self._begin(empty | {"signature": ""} if kind == "thinking" else empty)
        self._text.append(text)
        if kind == "thinking" and self._omit_thinking:
            return made
        name, field = _DELTAS[kind]
        return made + self._delta({"type": name, field: text})

    def _begin(self, block: dict[str, Any]) -> bytes:
        made = self._end()
        self._open = block
        return made + event({"type": "content_block_start", "index": len(self._done), "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": len(self._done), "delta": delta})

    def _end(self) -> bytes:
        """The block that is open is complete."""
        block, text = self._open, "".join(self._text)
        if block is None:
            return b""
        made, self._text = b"", []
        match block["type"]:
            case "thinking":
                # For clients that send back only what is signed. Nobody checks it: it is the text's own hash.
                signature = hashlib.sha256(text.encode()).hexdigest()
                made = self._delta({"type": "signature_delta", "signature": signature})
                block |= {"thinking": "" if self._omit_thinking else text, "signature": signature}
            case "tool_use":
                block["input"] = _arguments(text)
            case _:
                block["text"] = text
        made += event({"type": "content_block_stop", "index": len(self._done)})
        self._done.append(block)
        self._open = None
        return made


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as far as they came: none, where they were cut off or are nested too deeply to be read."""
    try:
        return decode(text.encode(), _arguments_decoder)
    except InvalidRequest:
        return {}


class MessageAnswer:
    """One message on its way out. `clamped` says that the model's length ends it before the client's max_tokens."""

    def __init__(
        self,
        service: SequenceService,
        sample: Sample,
        opened: OpenConversation,
        request_id: str,
        clamped: bool,
        omit_thinking: bool,
    ) -> None:
        self._sample, self._opened, self._id, self._clamped = sample, opened, request_id, clamped
        self._show_cached = service.config.show_cached_tokens
        self._model = service.name
        self._blocks = MessageBlocks(omit_thinking)

    async def respond(self, request: Request, streams: bool) -> Response:
        """The HTTP answer. Raises a 499 if the client leaves before the end."""
        headers = {"X-Request-Id": self._id, "request-id": self._id}
        if streams:
            rendered = self._render(request.scope.get(WRITER))
            return PartStream("text/event-stream", rendered, self._last, headers, self._close)
        async with until_gone(request.receive), contextlib.aclosing(reply_steps(self._sample, self._opened)) as steps:
            async for parts in steps:
                for part in parts:
                    self._blocks.push(part)
        self._blocks.finish()
        return as_json(self._message(self._blocks.content()) | self._ending(), headers)

    def _close(self) -> None:
        close_all([self._sample])

    def _last(self, error: ApiError) -> bytes:
        return sse_event("error", anthropic_error(error, self._id))

    async def _render(self, writer: PartWriter | None) -> AsyncGenerator[bytes, None]:
        """One chunk for each step, which the writer may have written before."""
        begun = False
        found = reply_steps(self._sample, self._opened, early=EarlyParts(writer, self._events), streams=True)
        async with contextlib.aclosing(found) as steps:
            async for parts in steps:
                chunk = self._events(parts)
                if not begun:
                    # Only now is it known what the prefix cache had.
                    begun = True
                    nothing = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
                    chunk = event({"type": "message_start", "message": self._message([]) | nothing}) + _PING + chunk
                if self._sample.finish_reason is not None:
                    chunk += self._blocks.finish() + self._end()
                if chunk:
                    yield chunk

    def _events(self, parts: list[ReplyPart]) -> bytes:
        return b"".join([self._blocks.push(part) for part in parts])

    def _end(self) -> bytes:
        ending = self._ending()
        counted = ending.pop("usage")
        return event({"type": "message_delta", "delta": ending, "usage": counted}) + event({"type": "message_stop"})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _ending(self) -> dict[str, Any]:
        """How it ended, and what it took."""
        sample, sequence = self._sample, None
        if sample.finish_reason == FinishReason.LENGTH.value:
            reason = "model_context_window_exceeded" if self._clamped else "max_tokens"
        elif isinstance(sample.stop_reason, str):
            reason, sequence = "stop_sequence", sample.stop_reason
        else:
            reason = "tool_use" if self._blocks.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence, "usage": self._usage(sample.num_tokens)}

    def _usage(self, written: int) -> dict[str, Any]:
        """Tokens; those of the prompt that were cached count apart, as Anthropic has it."""
        read = len(self._sample.prompt_ids)
        cached = self._sample.num_cached_tokens if self._show_cached else 0
        return {
            "input_tokens": read - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": written,
        }

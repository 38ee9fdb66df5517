"""A reply as the items of a response's output, and the events that tell of them as they come."""

from math import inf
from typing import Any

import msgspec

from chairlift.bodies import decode
from chairlift.core.sequences.step import TokenLogprob
from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import new_id
from chairlift.server.models.sequence_service import Sample
from chairlift.server.openai.answers import check_logprobs, logprobs_size, named_logprobs
from chairlift.server.responses.item_ids import make_item_id
from chairlift.server.responses.response_body import ResponseItem
from chairlift.text.reply import ArgumentsPart, CallPart, ContentPart, ReasoningPart, ReplyPart
from chairlift.text.tokenizer import Tokenizer

# An event as a dict; whoever sends it adds its number.
ItemEvent = dict[str, Any]

_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_NO_LOGPROBS = b"[]"
_any = msgspec.json.Decoder()


class TextLogprobs:
    """The log-probabilities of a sample's tokens, of which each part of the answer gets those that it is made of.

    `entries` are those that no part has yet.
    """

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self.entries: list[TokenLogprob] = []
        self._sample, self._tokenizer = sample, tokenizer
        self._each = logprobs_size(1 + (sample.stream.request.params.logprobs or 0))
        self._before = 0

    @property
    def size(self) -> int:
        """About how many characters those have that no part has yet. Raises InvalidRequest for too many in all."""
        left = len(self.entries)
        check_logprobs((self._before + left) * self._each, "ask for fewer (top_logprobs)")
        return left * self._each

    def of(self, part: ContentPart) -> bytes:
        """Those of a part as JSON; parts come in order, and a token of two is the first one's."""
        offsets, end, found, taken = self._sample.offsets, part.start + len(part.text), [], 0
        for index, entry in enumerate(self.entries, self._before):
            if offsets[index] >= end:
                break
            taken += 1
            after = offsets[index + 1] if index + 1 < len(offsets) else inf
            if offsets[index] >= part.start or after > part.start:
                found.append(entry)
        del self.entries[:taken]
        self._before += taken
        return msgspec.json.encode(named_logprobs(self._tokenizer, found))


class OutputItems:
    """The items of one reply, a response's. A part of another kind than the last begins the next item.

    All log-probabilities have `size` characters. Events and items have them as they were written once.
    """

    def __init__(self, response: str, logprobs: TextLogprobs | None = None) -> None:
        self.done: list[ResponseItem] = []
        self.reasoning: list[str] = []
        self.size = 0
        self._response = response
        self._logprobs = logprobs
        self._open: ResponseItem | None = None
        # Of the item that is open: its text, or a call's arguments, and the log-probabilities of a message.
        self._text: list[str] = []
        self._found: list[bytes] = []

    def push(self, part: ReplyPart) -> list[ItemEvent]:
        """Another part."""
        match part:
            case ContentPart():
                found = _NO_LOGPROBS if self._logprobs is None else self._logprobs.of(part)
                return self._say("message", part.text, found)
            case ReasoningPart():
                self.reasoning.append(part.text)
                return self._say("reasoning", part.text)
            case CallPart():
                call = {"call_id": new_id("call", "_"), "name": part.name, "arguments": ""}
                return self._begin({"type": "function_call", **call, "status": "in_progress"}, "fc")
            case ArgumentsPart():
                self._text.append(part.text)
                return [self._of_item("response.function_call_arguments.delta", delta=part.text)]

    def finish(self, complete: bool) -> list[ItemEvent]:
        """There are no more parts, as the reply is complete or because it was cut off."""
        events = [] if self.done or self._open is not None else self._begin_text("message")
        return events + self._end("completed" if complete else "incomplete")

    def _say(self, kind: str, text: str, logprobs: bytes = _NO_LOGPROBS) -> list[ItemEvent]:
        events = [] if self._open is not None and self._open["type"] == kind else self._begin_text(kind)
        self._text.append(text)
        if logprobs != _NO_LOGPROBS:
            self._found.append(logprobs[1:-1])
            self.size += len(logprobs)
        more: ItemEvent = {"logprobs": msgspec.Raw(logprobs)} if kind == "message" else {}
        return [*events, self._of_item(f"{_TEXT_EVENTS[kind]}.delta", content_index=0, delta=text, **more)]

    def _begin_text(self, kind: str) -> list[ItemEvent]:
        own: ResponseItem = {"role": "assistant"} if kind == "message" else {"summary": []}
        item = {"type": kind, **own, "status": "in_progress", "content": []}
        events = self._begin(item, "msg" if kind == "message" else "rs")
        return [*events, self._of_item("response.content_part.added", content_index=0, part=_part(kind, ""))]

    def _begin(self, item: ResponseItem, prefix: str) -> list[ItemEvent]:
        events = self._end("completed")
        item = {"id": make_item_id(prefix, self._response, len(self.done)), **item}
        self._open = item
        return [*events, {"type": "response.output_item.added", "output_index": len(self.done), "item": item.copy()}]

    def _end(self, status: str) -> list[ItemEvent]:
        """The item that is open has all that it gets."""
        item = self._open
        if item is None:
            return []
        events: list[ItemEvent] = []
        if item["type"] == "function_call" and status == "completed" and not self._text:
            # Clients parse it as JSON.
            events = self.push(ArgumentsPart(0, "{}"))
        text, self._text = "".join(self._text), []
        found, self._found = b"[%b]" % b",".join(self._found), []
        if item["type"] == "function_call" and not _is_json(text):
            # A client's own stop may be in the midst of it.
            status = "incomplete"
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append(self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text))
        else:
            part = _part(item["type"], text, found)
            item["content"] = [part]
            more: ItemEvent = {"logprobs": msgspec.Raw(found)} if item["type"] == "message" else {}
            events += [
                self._of_item(f"{_TEXT_EVENTS[item['type']]}.done", content_index=0, text=text, **more),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._open = None
        return events

    def _of_item(self, kind: str, **more: Any) -> ItemEvent:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.done), **more}


def _is_json(text: str) -> bool:
    """Whether clients can read it: models write what is nested without end, too."""
    try:
        decode(text.encode(), _any)
    except InvalidRequest:
        return False
    return True


def _part(kind: str, text: str, logprobs: bytes = _NO_LOGPROBS) -> ResponseItem:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": msgspec.Raw(logprobs)}

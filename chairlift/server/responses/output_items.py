"""A reply as the items of a response's output, and the events that tell of them as they come."""

from typing import Any

from chairlift.server.http.exchange import new_id
from chairlift.server.responses.response_body import ResponseItem
from chairlift.text.reply import ArgumentsPart, CallPart, ContentPart, ReasoningPart, ReplyPart

# An event as a dict; whoever sends it adds its number.
ItemEvent = dict[str, Any]

_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class OutputItems:
    """The items of one reply. A part of another kind than the last begins the next item."""

    def __init__(self) -> None:
        self.done: list[ResponseItem] = []
        self._open: ResponseItem | None = None
        # Of the item that is open: its text, or a call's arguments.
        self._text: list[str] = []
        self.reasoning: list[ReasoningPart] = []

    def push(self, part: ReplyPart) -> list[ItemEvent]:
        """Another part."""
        match part:
            case ContentPart():
                return self._say("message", part.text)
            case ReasoningPart():
                self.reasoning.append(part)
                return self._say("reasoning", part.text)
            case CallPart():
                call = {"id": new_id("fc", "_"), "call_id": new_id("call", "_"), "name": part.name, "arguments": ""}
                return self._begin({"type": "function_call", **call, "status": "in_progress"})
            case ArgumentsPart():
                self._text.append(part.text)
                return [self._of_item("response.function_call_arguments.delta", delta=part.text)]

    def finish(self, complete: bool) -> list[ItemEvent]:
        """There are no more parts, as the reply is complete or because it was cut off."""
        events = [] if self.done or self._open is not None else self._begin_text("message")
        return events + self._end("completed" if complete else "incomplete")

    def _say(self, kind: str, text: str) -> list[ItemEvent]:
        events = [] if self._open is not None and self._open["type"] == kind else self._begin_text(kind)
        self._text.append(text)
        more: ItemEvent = {"logprobs": []} if kind == "message" else {}
        return [*events, self._of_item(f"{_TEXT_EVENTS[kind]}.delta", content_index=0, delta=text, **more)]

    def _begin_text(self, kind: str) -> list[ItemEvent]:
        if kind == "message":
            item: ResponseItem = {"type": kind, "id": new_id("msg", "_"), "role": "assistant", "status": "in_progress"}
        else:
            item = {"type": kind, "id": new_id("rs", "_"), "summary": [], "status": "in_progress"}
        events = self._begin(item | {"content": []})
        return [*events, self._of_item("response.content_part.added", content_index=0, part=_part(kind, ""))]

    def _begin(self, item: ResponseItem) -> list[ItemEvent]:
        events = self._end("completed")
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
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append(self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text))
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            more: ItemEvent = {"logprobs": []} if item["type"] == "message" else {}
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


def _part(kind: str, text: str) -> ResponseItem:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

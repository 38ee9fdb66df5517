"""The items of a response's input: checked, put into the one form in which they are kept, and made messages of."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from chairlift.bodies import convert
from chairlift.errors import InvalidRequest
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import new_id
from chairlift.server.responses.response_body import ResponseItem, TypedObject

MAX_ITEMS = 16_384
# What stands between the parts of one text, and between instructions and what else the system says at the beginning.
_BETWEEN_PARTS, _BETWEEN_SYSTEM = "", "\n\n"
# The parts that each role may say, and the one that a plain string is.
_PARTS = {
    "user": ("input_text",),
    "system": ("input_text",),
    "developer": ("input_text",),
    "assistant": ("output_text", "refusal", "input_text"),
}


class MessageItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What somebody says."""

    role: str
    content: str | list[ResponseItem]
    type: str | None = "message"
    id: str | None = None
    status: Any = None
    phase: Any = None


class TextPartItem(TypedObject):
    """A part of a text, of whatever type."""

    text: str
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class RefusalPartItem(TypedObject):
    """What a model said instead of an answer."""

    refusal: str


class FunctionCallItem(TypedObject):
    """A call of a tool."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Any = None
    caller: Any = None


class FunctionOutputItem(TypedObject):
    """What came of a call."""

    call_id: str
    output: str | list[ResponseItem]
    id: str | None = None
    status: Any = None
    caller: Any = None
    name: str | None = None


class ReasoningItem(TypedObject):
    """What the model thought before it answered: the text itself, or at least its summary."""

    summary: list[ResponseItem] = []
    content: list[ResponseItem] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Any = None


class ReferenceItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An item of an answer that the server keeps."""

    id: str
    type: str | None = None


def references_in(given: str | list[ResponseItem]) -> dict[str, str]:
    """The ids of answers' items that an input refers to, and where. What else is wrong with it `read_items` says.

    Raises InvalidRequest for one that is there twice, so that little input can't be a long conversation.
    """
    found: dict[str, str] = {}
    if isinstance(given, str) or len(given) > MAX_ITEMS:
        return found
    for index, item in enumerate(given):
        if _kind(item) == "item_reference" and isinstance(name := item.get("id"), str):
            where = f"input[{index}].id"
            if name in found:
                raise InvalidRequest(f"{where} is that of {found[name]} again; refer to an item once", where)
            found[name] = where
    return found


def no_item(name: str, where: str) -> ApiError:
    """The refusal of a reference to what is not there."""
    message = f"{where}: there is no item {name!r} in an answer that is kept; the oldest go first. Send the item itself"
    return ApiError(404, message, where, "item_not_found")


def read_items(given: str | list[ResponseItem], kept: Mapping[str, ResponseItem]) -> list[ResponseItem]:
    """Items in the form in which they are kept and listed, each with an id. `kept` are those that may be referred to.

    Raises InvalidRequest naming the field, or ApiError for a reference to what is not kept.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input must be a text or at least one item", "input")
    if len(given) > MAX_ITEMS:
        raise InvalidRequest(f"input holds {len(given)} items, more than {MAX_ITEMS}", "input")
    return [_read(item, f"input[{index}]", kept) for index, item in enumerate(given)]


def _kind(item: ResponseItem) -> Any:
    """Its type. Messages and references need not say it."""
    return item.get("type") or ("item_reference" if "id" in item and "role" not in item else "message")


def _read(item: ResponseItem, where: str, kept: Mapping[str, ResponseItem]) -> ResponseItem:
    kind = _kind(item)
    match kind:
        case "message":
            return _message(convert(item, MessageItem, where), where)
        case "function_call":
            call = convert(item, FunctionCallItem, where)
            same = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            return {"type": kind, "id": call.id or new_id("fc", "_"), **same, "status": "completed"}
        case "function_call_output":
            found = convert(item, FunctionOutputItem, where)
            output = found.output
            if not isinstance(output, str):
                output = _joined(_texts(output, ("input_text", "output_text"), f"{where}.output"))
            made = {"type": kind, "id": found.id or new_id("fco", "_"), "call_id": found.call_id, "output": output}
            return made | {"status": "completed"}
        case "reasoning":
            return _reasoning(convert(item, ReasoningItem, where), where)
        case "item_reference":
            name = convert(item, ReferenceItem, where).id
            if name not in kept:
                raise no_item(name, f"{where}.id")
            return kept[name]
    known = "message, function_call, function_call_output, reasoning and item_reference"
    raise InvalidRequest(f"{where}.type {kind!r} is not supported, only {known}", f"{where}.type")


def _message(item: MessageItem, where: str) -> ResponseItem:
    if item.role not in _PARTS:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_PARTS)}, not {item.role!r}", f"{where}.role")
    kinds = _PARTS[item.role]
    if isinstance(item.content, str):
        texts = [(kinds[0], item.content)]
    else:
        texts = _texts(item.content, kinds, f"{where}.content")
    content = [_part(kind, text) for kind, text in texts]
    made = {"type": "message", "id": item.id or new_id("msg", "_"), "role": item.role, "status": "completed"}
    return made | {"content": content}


def _part(kind: str, text: str) -> ResponseItem:
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    part: ResponseItem = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


def _texts(parts: Sequence[ResponseItem], kinds: Sequence[str], where: str) -> list[tuple[str, str]]:
    """The type and text of each part. Raises InvalidRequest for those of other types."""
    found = []
    for index, part in enumerate(parts):
        place, kind = f"{where}[{index}]", part.get("type")
        if kind not in kinds:
            shown = " or ".join(map(repr, kinds))
            raise InvalidRequest(f"{place}.type {kind!r} is not supported here, only {shown}", f"{place}.type")
        if kind == "refusal":
            found.append((kind, convert(part, RefusalPartItem, place).refusal))
        else:
            found.append((kind, convert(part, TextPartItem, place).text))
    return found


def _joined(texts: Iterable[tuple[str, str]]) -> str:
    return _BETWEEN_PARTS.join(text for _, text in texts)


def _reasoning(item: ReasoningItem, where: str) -> ResponseItem:
    if item.encrypted_content is not None:
        message = f"{where}.encrypted_content can only be read by the server that made it; leave it out"
        raise InvalidRequest(message, f"{where}.encrypted_content")
    summary = _texts(item.summary, ("summary_text",), f"{where}.summary")
    content = _texts(item.content or (), ("reasoning_text",), f"{where}.content")
    made: ResponseItem = {"type": "reasoning", "id": item.id or new_id("rs", "_")}
    made["summary"] = [{"type": kind, "text": text} for kind, text in summary]
    made["content"] = [{"type": kind, "text": text} for kind, text in content]
    return made | {"status": "completed"}


def messages_of(instructions: str | None, items: Iterable[ResponseItem]) -> list[dict[str, Any]]:
    """Messages in the form of chat completions. Raises InvalidRequest for the output of a call that there is not.

    What the assistant thinks, says and calls in a row is one message of its own. Instructions, and what system and
    developer say before anybody else, are one message of the system.
    """
    made = _Chat(instructions)
    for item in items:
        made.take(item)
    return made.all()


class _Chat:
    """Messages, put together of items."""

    def __init__(self, instructions: str | None) -> None:
        self._made: list[dict[str, Any]] = []
        self._assistant: dict[str, Any] | None = None
        # Of the message that is open, and of the first one of the system.
        self._thoughts: list[str] = []
        self._rules: list[str] = [instructions] if instructions else []
        self._names: dict[str, str] = {}

    def take(self, item: ResponseItem) -> None:
        """The next item."""
        match item["type"]:
            case "message" if item["role"] == "assistant":
                message = self._open(lambda now: not now["content"] and "tool_calls" not in now)
                message["content"] = _said(item["content"])
            case "message":
                self._close()
                self._say(item["role"], _said(item["content"]))
            case "reasoning":
                if thoughts := _said(item["content"] or item["summary"]):
                    self._open(lambda now: not now["content"] and "tool_calls" not in now)
                    self._thoughts.append(thoughts)
            case "function_call":
                self._names[item["call_id"]] = item["name"]
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                self._open(lambda now: True).setdefault("tool_calls", []).append(call)
            case _:
                self._close()
                self._made.append(self._result(item))

    def all(self) -> list[dict[str, Any]]:
        """The messages; there are no more items."""
        self._close()
        rules = _BETWEEN_SYSTEM.join(self._rules)
        return [{"role": "system", "content": rules}, *self._made] if self._rules else self._made

    def _say(self, role: str, text: str) -> None:
        if role == "user":
            self._made.append({"role": role, "content": text})
        elif not self._made:
            # Most templates know one message of the system, and only at the beginning.
            self._rules.append(text)
        else:
            self._made.append({"role": "system", "content": text})

    def _result(self, item: Mapping[str, Any]) -> dict[str, Any]:
        call = item["call_id"]
        if call not in self._names:
            raise InvalidRequest(f"no function_call before it has the call_id {call!r} of an output", "input")
        return {"role": "tool", "tool_call_id": call, "name": self._names[call], "content": item["output"]}

    def _open(self, suits: Any) -> dict[str, Any]:
        """The assistant's message to add to: the one that is open, or a new one where it does not suit."""
        if self._assistant is not None and not suits(self._assistant):
            self._close()
        if self._assistant is None:
            self._assistant = {"role": "assistant", "content": ""}
        return self._assistant

    def _close(self) -> None:
        if self._assistant is not None:
            if self._thoughts:
                self._assistant["reasoning_content"] = "".join(self._thoughts)
            self._made.append(self._assistant)
            self._assistant = None
            self._thoughts = []


def _said(parts: Iterable[ResponseItem]) -> str:
    return _BETWEEN_PARTS.join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)

"""Anthropic's messages, which are lists of blocks, as a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from chairlift.bodies import convert
from chairlift.errors import InvalidRequest
from chairlift.server.anthropic.message_body import Block, CountBody, PickToolBody, ThinkingBody, TurnBody
from chairlift.server.conversations.conversation import Conversation, Tool, ToolChoice, can_bound, can_reason
from chairlift.text.model_dialect import ModelDialect
from chairlift.text.structured import schema_grammar

MAX_BLOCKS = 16_384
# What stands between the blocks of one message, which templates know as one text.
_BETWEEN = "\n"
_CHOICES: Mapping[str, Any] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class TextBlock(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """Text. Prefixes are cached by themselves, and citations are of documents, which there are none of."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(msgspec.Struct, tag="thinking", forbid_unknown_fields=True):
    """What the model thought before it answered; nobody looks at the signature."""

    thinking: str
    signature: Any = None
    cache_control: Any = None


class ToolUseBlock(msgspec.Struct, tag="tool_use", forbid_unknown_fields=True):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(msgspec.Struct, tag="tool_result", forbid_unknown_fields=True):
    """What came of a call. No template has a place for `is_error`: the text says it."""

    tool_use_id: str
    content: str | list[Block] | None = None
    is_error: Any = None
    cache_control: Any = None


class MessageTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Any = None
    input_examples: Any = None
    defer_loading: Any = None


_AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: Mapping[str, type[_AnyBlock]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
_SAID_BY = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


def conversation_of(body: CountBody, size: int, model_dialect: ModelDialect) -> Conversation:
    """All that makes the prompt. Raises InvalidRequest that names the block at fault. `size` is that of the body.

    Clients name an effort for every model, and bounds of its reasoning, which they must; where it knows no degrees
    there is none to choose, and where its reasoning can't be bounded it is not.
    """
    choice, parallel = _choice(body.tool_choice)
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    thinking, output = body.thinking, body.output_config
    messages = _messages(body)
    # A last message of the assistant is the beginning of the answer.
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise InvalidRequest("the last of messages must not call a tool: its tool_result has to follow", "messages")
    return Conversation(
        messages=messages,
        size=size,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        grammar=_grammar(body),
        reasoning_effort=output.effort if output is not None and model_dialect.takes_effort else None,
        thinking=_thinks(thinking, model_dialect),
        thinking_tokens=thinking.budget_tokens if thinking is not None and can_bound(model_dialect) else None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _grammar(body: CountBody) -> str | None:
    """The form of the answer, by either of its names."""
    given, where = None if body.output_config is None else body.output_config.format, "output_config.format"
    if body.output_format is not None:
        if given is not None:
            message = "output_format and output_config.format both say what form the answer has; send one of them"
            raise InvalidRequest(message, "output_format")
        given, where = body.output_format, "output_format"
    if given is None:
        return None
    if given.type != "json_schema":
        raise InvalidRequest(f"{where}.type must be 'json_schema', not {given.type!r}", f"{where}.type")
    return schema_grammar(given.schema, where)


def _thinks(given: ThinkingBody | None, model_dialect: ModelDialect) -> bool | None:
    """Whether the model is to reason; None: as it likes. Unless it is asked to it does not, if it can be switched."""
    if given is None:
        return False if model_dialect.switch is not None else None
    return {"enabled": True if can_reason(model_dialect) else None, "disabled": False}.get(given.type)


def _choice(given: PickToolBody | None) -> tuple[ToolChoice, bool]:
    """Which tools, and whether several at once."""
    if given is None:
        return ToolChoice(), True
    if given.type not in _CHOICES:
        raise InvalidRequest(f"tool_choice.type must be one of {', '.join(_CHOICES)}", "tool_choice.type")
    if (given.name is None) is (given.type == "tool"):
        problem = "is needed with" if given.name is None else "has no meaning without"
        raise InvalidRequest(f"tool_choice.name {problem} type 'tool'", "tool_choice.name")
    return ToolChoice(_CHOICES[given.type], given.name), not given.disable_parallel_tool_use


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type") or "custom"
    if kind != "custom":
        raise InvalidRequest(f"{where}.type {kind!r} is not supported: only tools with an input_schema are", where)
    body = convert(given, MessageTool, where)
    for name in ("input_examples", "defer_loading"):
        if getattr(body, name):
            raise InvalidRequest(f"{where}.{name} is not supported; leave it out", f"{where}.{name}")
    if body.allowed_callers not in (None, [], ["direct"]):
        raise InvalidRequest(f"{where}.allowed_callers may only be ['direct']", f"{where}.allowed_callers")
    return Tool(name=body.name, description=body.description, parameters=body.input_schema, strict=bool(body.strict))


def _messages(body: CountBody) -> list[dict[str, Any]]:
    if not body.messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    blocks = sum(1 if isinstance(turn.content, str) else len(turn.content) for turn in body.messages)
    if blocks > MAX_BLOCKS:
        raise InvalidRequest(f"messages hold {blocks} texts and blocks, more than {MAX_BLOCKS}", "messages")
    made = _Messages()
    if body.system:
        made.take("system", _blocks(body.system, "system", ("text",)), "system")
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        if turn.role not in _SAID_BY:
            raise InvalidRequest(f"{where}.role must be 'user' or 'assistant', not {turn.role!r}", f"{where}.role")
        made.take(turn.role, _content(turn, where), f"{where}.content")
    messages = made.all()
    if not messages:
        raise InvalidRequest("messages must say something", "messages")
    return messages


def _content(turn: TurnBody, where: str) -> list[_AnyBlock]:
    return _blocks(turn.content, f"{where}.content", _SAID_BY[turn.role])


def _blocks(given: str | list[Block], where: str, allowed: Sequence[str]) -> list[_AnyBlock]:
    """Blocks of these types. Raises InvalidRequest that names any other."""
    if isinstance(given, str):
        return [TextBlock(given)]
    found: list[_AnyBlock] = []
    for index, block in enumerate(given):
        kind: Any = block.get("type")
        if kind not in allowed:
            shown = " or ".join(map(repr, allowed))
            message = f"{where}[{index}].type {kind!r} is not supported here, only {shown}"
            raise InvalidRequest(message, f"{where}[{index}].type")
        found.append(convert(block, _BLOCKS[kind], f"{where}[{index}]"))
    return found


class _Messages:
    """Messages in the form of chat completions, put together of blocks; turns of one role in a row are one."""

    def __init__(self) -> None:
        self._made: list[dict[str, Any]] = []
        self._role = ""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolUseBlock] = []
        self._names: dict[str, str] = {}

    def take(self, role: str, blocks: Sequence[_AnyBlock], where: str) -> None:
        """Another turn."""
        if role != self._role:
            self._close()
            self._role = role
        for index, block in enumerate(blocks):
            match block:
                case TextBlock():
                    self._texts.append(block.text)
                case ThinkingBlock():
                    self._thoughts.append(block.thinking)
                case ToolUseBlock():
                    self._calls.append(block)
                    self._names[block.id] = block.name
                case ToolResultBlock():
                    self._close()
                    self._made.append(self._result(block, f"{where}[{index}]"))

    def all(self) -> list[dict[str, Any]]:
        """The messages; there are no more turns."""
        self._close()
        return self._made

    def _result(self, block: ToolResultBlock, where: str) -> dict[str, Any]:
        if block.tool_use_id not in self._names:
            message = f"{where}.tool_use_id is that of no tool_use block before it"
            raise InvalidRequest(message, f"{where}.tool_use_id")
        content = _blocks(block.content or "", f"{where}.content", ("text",))
        text = _BETWEEN.join(part.text for part in content if isinstance(part, TextBlock))
        called = self._names[block.tool_use_id]
        return {"role": "tool", "tool_call_id": block.tool_use_id, "name": called, "content": text}

    def _close(self) -> None:
        """What was said so far is a message, if it was anything."""
        message: dict[str, Any] = {"role": self._role, "content": _BETWEEN.join(self._texts)}
        if self._thoughts:
            message["reasoning_content"] = _BETWEEN.join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _written(call.input)}}
                for call in self._calls
            ]
        if self._texts or self._thoughts or self._calls:
            self._made.append(message)
        self._texts, self._thoughts, self._calls = [], [], []


def _written(arguments: dict[str, Any]) -> str:
    return msgspec.json.encode(arguments).decode()

"""A conversation in no protocol's words: every route that chats makes one of its body, and opens it for a model."""

import hashlib
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import INLINE_SIZE, LARGE_SIZE, off_loop
from chairlift.server.models.sequence_service import SequenceService
from chairlift.text.call_grammar import ReasoningStart, ReplyShape, reply_grammar
from chairlift.text.chat_template import TooSlow
from chairlift.text.dialect import NAME, Dialect
from chairlift.text.lark import LarkRules, Unbounded
from chairlift.text.model_dialect import ModelDialect
from chairlift.text.reply import ReplyReader
from chairlift.text.reply_reader import DialectMarkers, DialectReader
from chairlift.text.structured import check_size

# As many as OpenAI takes.
MAX_TOOLS = 128
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
# What makes the grammar of a short schema long, or long to make.
_SLOW_WORDS = (b'"$ref"', b'"pattern')


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolChoice(msgspec.Struct):
    """Whether tools may be called, must be, or (`required` with a `name`) which one must be."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """Messages in the form of OpenAI's chat completions, and how the model is to answer.

    `grammar`, made by text/structured.py, constrains the answer itself: what follows the reasoning, and is no call.
    `continue_final_message` leaves the last message open, for the model to go on with. `thinking` is None where the
    template decides; `thinking_tokens` bounds the reasoning. `size` is about how many bytes all of it has.
    """

    messages: list[dict[str, Any]]
    size: int
    tools: list[Tool] = []
    tool_choice: ToolChoice = msgspec.field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    grammar: str | None = None
    reasoning_effort: str | None = None
    thinking: bool | None = None
    thinking_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: dict[str, Any] = {}


class OpenConversation(msgspec.Struct):
    """What a conversation is for one model: the prompt's tokens, the grammar of all that is generated (None: free),
    and for each sample a reader of its own (None: all its text is the answer's), which has to see the special tokens
    `shown`."""

    prompt_ids: list[int]
    grammar: str | None
    make_reader: Callable[[], ReplyReader] | None
    shown: frozenset[int] = frozenset()


async def open_conversation(service: SequenceService, conversation: Conversation) -> OpenConversation:
    """Render and tokenize. Raises InvalidRequest for what this model's template or dialect can't say."""
    model_dialect = service.model_dialect
    if not model_dialect.spells and _is_plain(conversation):
        prompt_ids, _ = await _prompt(service, conversation)
        return OpenConversation(prompt_ids, conversation.grammar, None)
    check_tools(conversation)
    if conversation.tool_choice.mode == "none":
        conversation = msgspec.structs.replace(conversation, tools=[])
    _check_dialect(model_dialect, conversation)
    conversation = msgspec.structs.replace(conversation, template_arguments=_arguments(model_dialect, conversation))
    prompt_ids, reasoning = await _prompt(service, conversation)
    return await off_loop(
        _grammar_size(conversation), lambda: _opened(model_dialect, conversation, prompt_ids, reasoning)
    )


def _is_plain(conversation: Conversation) -> bool:
    """Whether it has neither tools nor wishes for the reasoning."""
    if conversation.tools or conversation.tool_choice.mode == "required" or conversation.reasoning_effort is not None:
        return False
    return conversation.thinking is None and conversation.thinking_tokens is None


def _grammar_size(conversation: Conversation) -> int:
    """The size, for `off_loop`, of what `_opened` does: a thread's, however few bytes the schemas of tools have, where
    definitions go with each that refers to them, and where patterns are tried."""
    size = conversation.size
    if size <= INLINE_SIZE and conversation.tools:
        written = msgspec.json.encode([tool.parameters for tool in conversation.tools])
        if any(word in written for word in _SLOW_WORDS):
            return INLINE_SIZE + 1
    return size


def _opened(
    model_dialect: ModelDialect, conversation: Conversation, prompt_ids: list[int], reasoning: ReasoningStart
) -> OpenConversation:
    """The conversation in the model's dialect, if one is known."""
    tools = (
        _callable_tools(conversation) if model_dialect.dialect is not None and model_dialect.dialect.tool_calls else {}
    )
    if model_dialect.dialect is None or model_dialect.markers is None or not (tools or model_dialect.spells):
        return OpenConversation(prompt_ids, conversation.grammar, None)
    bound, bounded_by = _thinking_bound(model_dialect, conversation)
    reply = ReplyShape(
        tools=tools,
        strict=frozenset(tool.name for tool in conversation.tools if tool.strict),
        must_call=conversation.tool_choice.mode == "required",
        parallel=conversation.parallel_tool_calls and conversation.tool_choice.name is None,
        answer=conversation.grammar,
        reasoning=reasoning,
        thinking_tokens=bound,
        continues=conversation.continue_final_message,
    )
    try:
        grammar = reply_grammar(model_dialect.dialect, model_dialect.tokens, reply)
    except Unbounded as error:
        raise InvalidRequest(f"{bounded_by}: {error}; leave it out", bounded_by) from None
    except ValueError as error:
        raise InvalidRequest(str(error), "tools") from None
    if tools and grammar is not None:
        check_size(grammar, "tools")
    markers = DialectMarkers(model_dialect.dialect, tools) if tools else model_dialect.markers

    def make_reader() -> ReplyReader:
        continues, parallel = reply.continues, reply.parallel
        return DialectReader(markers, reasoning == "open", bound is not None, continues=continues, parallel=parallel)

    return OpenConversation(prompt_ids, grammar, make_reader, model_dialect.shown(bool(tools)))


def check_tools(conversation: Conversation) -> None:
    """Refuse tools that are none, and a choice that is none of them. Raises InvalidRequest."""
    tools, choice = conversation.tools, conversation.tool_choice
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(tools)} tools, more than {MAX_TOOLS}", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        if NAME.fullmatch(tool.name) is None:
            wanted = "must be 1 to 128 letters, digits, '_', '-' and '.'"
            raise InvalidRequest(f"{where}.name {wanted}, got {tool.name[:80]!r}", f"{where}.name")
        if tool.name in names:
            raise InvalidRequest(f"{where}.name {tool.name!r} is there twice", f"{where}.name")
        names.add(tool.name)
        if tool.parameters and tool.parameters.get("type", "object") != "object":
            raise InvalidRequest(f"{where}.parameters must be the JSON schema of an object", f"{where}.parameters")
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice.name is not None and choice.name not in names:
        raise InvalidRequest(f"tool_choice names {choice.name[:80]!r}, which is none of the tools", "tool_choice")


def _check_dialect(model_dialect: ModelDialect, conversation: Conversation) -> None:
    """Refuse what the model's template and dialect have no words for."""
    if conversation.tools and not model_dialect.takes_tools:
        raise InvalidRequest("this model's chat template has no place for tools", "tools")
    if conversation.tool_choice.mode == "required" and (
        model_dialect.dialect is None or not model_dialect.dialect.tool_calls
    ):
        message = "tool_choice can't be kept to: it is not known how this model writes calls; the server's setting"
        raise InvalidRequest(f"{message} tool_dialect can name it", "tool_choice")
    if conversation.thinking_tokens is not None:
        if conversation.thinking_tokens < 0:
            raise InvalidRequest("thinking_token_budget must not be negative", "thinking_token_budget")
        if not model_dialect.reasons:
            raise InvalidRequest(
                "thinking_token_budget: it is not known how this model reasons", "thinking_token_budget"
            )
    if conversation.thinking and not can_reason(model_dialect):
        raise InvalidRequest("enable_thinking: it is not known how this model reasons", "enable_thinking")


def can_reason(model_dialect: ModelDialect) -> bool:
    """Whether it is known how the model reasons, or that it does."""
    return model_dialect.reasons or model_dialect.switch is not None


def can_bound(model_dialect: ModelDialect) -> bool:
    """Whether the tokens of the model's reasoning can be counted: what ends it begins with one."""
    if model_dialect.dialect is None or model_dialect.dialect.reasoning_content is None:
        return False
    rules = LarkRules(model_dialect.tokens)
    return rules.token(rules.head(model_dialect.dialect.reasoning_content.close[0])) is not None


def _thinks(conversation: Conversation) -> bool | None:
    return False if conversation.reasoning_effort == "none" else conversation.thinking


def _thinking_bound(model_dialect: ModelDialect, conversation: Conversation) -> tuple[int | None, str]:
    """The bound of the reasoning, and what asks for it. Where a template can't turn it off, the grammar does."""
    if _thinks(conversation) is False and model_dialect.switch is None and model_dialect.reasons:
        return 0, "reasoning_effort" if conversation.reasoning_effort == "none" else "enable_thinking"
    return conversation.thinking_tokens, "thinking_token_budget"


def _arguments(model_dialect: ModelDialect, conversation: Conversation) -> dict[str, Any]:
    """What the template gets beside the messages."""
    arguments, effort = dict(conversation.template_arguments), conversation.reasoning_effort
    if conversation.tools:
        arguments["tools"] = [_described(tool) for tool in conversation.tools]
    if effort is not None and effort != "none":
        if model_dialect.takes_effort:
            arguments.setdefault("reasoning_effort", effort)
        elif can_reason(model_dialect):  # one that does not has no effort to choose
            message = "reasoning_effort must be none, or left out: this model's chat template knows no degrees of it"
            raise InvalidRequest(message, "reasoning_effort")
    thinks = _thinks(conversation)
    if thinks is not None and model_dialect.switch is not None:
        arguments.setdefault(model_dialect.switch, thinks)
    return arguments


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    parameters = tool.parameters or _NO_PARAMETERS
    # Some templates take it for granted that there is a description.
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _callable_tools(conversation: Conversation) -> dict[str, dict[str, Any]]:
    """The schemas of the tools that may be called, by name."""
    named = conversation.tool_choice.name
    return {
        tool.name: {**tool.parameters, "type": "object"} if tool.parameters else _NO_PARAMETERS
        for tool in conversation.tools
        if named is None or tool.name == named
    }


async def _prompt(service: SequenceService, conversation: Conversation) -> tuple[list[int], ReasoningStart]:
    """The token ids of a chat, and whether it opens the reasoning. A template that takes its time takes a thread's."""
    size = conversation.size
    if size <= INLINE_SIZE:
        try:
            return _encode(service, conversation, quick=True)
        except TooSlow:
            size = LARGE_SIZE + 1
    return await off_loop(size, lambda: _encode(service, conversation, quick=False))


def _encode(service: SequenceService, conversation: Conversation, quick: bool) -> tuple[list[int], ReasoningStart]:
    model_dialect = service.model_dialect
    messages = (
        conversation.messages
        if model_dialect.dialect is None
        else _adapted(conversation.messages, model_dialect.dialect)
    )
    arguments = conversation.template_arguments
    generation, continues = conversation.add_generation_prompt, conversation.continue_final_message
    calls = model_dialect.calls
    prompt = service.tokenizer.render_chat(messages, generation, arguments, quick, continues, calls)
    prompt_ids = service.encode_chat(prompt)
    reasoning = model_dialect.reasoning_start(prompt.text) if model_dialect.spells else "closed"
    return prompt_ids, "closed" if continues and reasoning == "maybe" else reasoning


def _adapted(messages: list[dict[str, Any]], dialect: Dialect) -> list[dict[str, Any]]:
    """Messages with reasoning under the names that templates have for it, and ids of calls as they want them."""
    adapted = []
    for message in messages:
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if message.get("role") == "assistant" and isinstance(reasoning, str):
            message = {**message, "reasoning_content": reasoning, "tool_plan": reasoning}
            # Beside a call gpt-oss's template has a place for one text, and refuses both.
            if dialect.content is None or not (message.get("content") and message.get("tool_calls")):
                message["thinking"] = reasoning
        if dialect.short_ids:
            message = _with_short_ids(message)
        adapted.append(message)
    return adapted


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("tool_call_id"), str):
        message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if isinstance(calls := message.get("tool_calls"), list):
        made = [
            {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in calls
            if isinstance(call, dict)
        ]
        message = {**message, "tool_calls": made}
    return message


def _short_id(call_id: str) -> str:
    """Nine letters or digits for an id, the same each time."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]

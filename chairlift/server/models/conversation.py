"""A conversation in no protocol's words: every route that chats makes one of its body, and opens it for a model."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import INLINE_SIZE, LARGE_SIZE, off_loop
from chairlift.server.models.sequence_service import SequenceService
from chairlift.text.chat_template import TooSlow
from chairlift.text.reply import ReplyReader


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
    and for each sample a reader of its own (None: all its text is the answer's)."""

    prompt_ids: list[int]
    grammar: str | None
    make_reader: Callable[[], ReplyReader] | None


async def open_conversation(service: SequenceService, conversation: Conversation) -> OpenConversation:
    """Render and tokenize. Raises InvalidRequest for what this model's template can't say."""
    if conversation.tools:
        raise InvalidRequest("tools is not supported", "tools")
    return OpenConversation(await _prompt(service, conversation), conversation.grammar, None)


async def _prompt(service: SequenceService, conversation: Conversation) -> list[int]:
    """The token ids of a chat. A template that takes its time takes a thread's."""
    size = conversation.size
    if size <= INLINE_SIZE:
        try:
            return _encode(service, conversation, quick=True)
        except TooSlow:
            size = LARGE_SIZE + 1
    return await off_loop(size, lambda: _encode(service, conversation, quick=False))


def _encode(service: SequenceService, conversation: Conversation, quick: bool) -> list[int]:
    arguments = conversation.template_arguments
    generation, continues = conversation.add_generation_prompt, conversation.continue_final_message
    messages = conversation.messages
    return service.encode_chat(service.tokenizer.render_chat(messages, generation, arguments, quick, continues))

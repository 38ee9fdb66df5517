"""What clients may send to /v1/messages. Unknown fields are refused by name, and so is what would change the answer."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from chairlift.errors import InvalidRequest
from chairlift.server.openai.body_types import Int

Block = dict[str, Any]


class TurnBody(msgspec.Struct, forbid_unknown_fields=True):
    """One of the messages: who says it, and its text or blocks."""

    role: str
    content: str | list[Block]


class ThinkingBody(msgspec.Struct, forbid_unknown_fields=True):
    """`thinking`: whether the model is to reason, how long at most, and whether to send what it thought."""

    type: str
    budget_tokens: Int | None = None
    display: str | None = None


class FormatBody(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config.format`: JSON of this schema."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config`: how hard to think, and the form of the answer."""

    effort: str | None = None
    format: FormatBody | None = None


class PickToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`: auto, any, none, or `tool` with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/count_tokens: all that makes the prompt."""

    messages: Annotated[list[TurnBody], Meta(examples=[[{"role": "user", "content": "What is batching?"}]])]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: PickToolBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    # The older name of output_config.format.
    output_format: FormatBody | None = None
    # Taken and ignored: prefixes are cached by themselves, and there is one speed.
    cache_control: Any = None
    speed: Any = None
    # Not implemented, but for the edit that leaves all thinking where it is.
    context_management: Any = None
    mcp_servers: Any = None


class MessageBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[Int, Meta(examples=[256])]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    # Taken and ignored.
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    # Not implemented.
    container: Any = None
    thread: Any = None


_NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "mcp_servers": (),
    "container": (),
    "thread": (),
}
# By this code Anthropic's clients know to send the whole conversation instead.
_CODES = {"thread": "thread_unsupported_request"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def check_message_body(body: CountBody) -> None:
    """Refuse, by name, what would change the answer and is not implemented."""
    for name, accepted in _NOT_IMPLEMENTED.items():
        if getattr(body, name, None) not in (None, [], {}, *accepted):
            raise InvalidRequest(f"{name} is not supported; leave it out", name, _CODES.get(name))
    if body.thinking is not None:
        _check_thinking(body.thinking)
    config = body.output_config
    if config is not None and config.effort not in (None, *_EFFORTS):
        raise InvalidRequest(f"output_config.effort must be one of {', '.join(_EFFORTS)}", "output_config.effort")


def _check_thinking(thinking: ThinkingBody) -> None:
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        message = f"thinking.type {thinking.type!r} is not supported; use 'enabled', 'adaptive' or 'disabled'"
        raise InvalidRequest(message, "thinking.type")
    if thinking.type == "enabled" and (thinking.budget_tokens is None or thinking.budget_tokens < 1):
        message = "thinking.budget_tokens is needed with type 'enabled', and must be at least 1"
        raise InvalidRequest(message, "thinking.budget_tokens")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        message = f"thinking.budget_tokens has no meaning with type {thinking.type!r}; leave it out"
        raise InvalidRequest(message, "thinking.budget_tokens")
    if thinking.display not in (None, "summarized", "omitted"):
        raise InvalidRequest("thinking.display must be 'summarized' or 'omitted'", "thinking.display")

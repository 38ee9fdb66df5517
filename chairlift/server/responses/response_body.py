"""What clients may send to /v1/responses. Refused by name are unknown fields, and what would change the answer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import InvalidRequest
from chairlift.server.http.paging import check_metadata
from chairlift.server.openai.body_types import Int, make_params

ResponseItem = dict[str, Any]


class TypedObject(msgspec.Struct, forbid_unknown_fields=True):
    """Whatever says of itself what it is."""

    type: str


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format`: the form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`text`: the form of the answer, and how wordy it is."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`: how hard to think. A summary is not made: the reasoning itself is sent."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`; there is nothing to obfuscate here, and usage is there in any case."""

    include_obfuscation: Any = None
    include_usage: bool | None = None


class InputBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses/input_tokens: all that makes the prompt. None means the default."""

    input: Annotated[str | list[ResponseItem], Meta(examples=["What is batching?"])]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Not implemented.
    conversation: Any = None
    personality: Any = None


class ResponseBody(InputBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses."""

    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    # Extras, named as in the other routes.
    stop: str | list[str] | None = None
    seed: int | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None
    # Taken and ignored.
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    client_metadata: Any = None
    access_programs: Any = None
    max_tool_calls: Int | None = None
    # Not implemented.
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    background_options: Any = None


# Fields that are not implemented, the values (beside null) that ask for nothing, and what to do instead.
_NOT_IMPLEMENTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "use previous_response_id, or send all items"),
    "personality": ((), "say it in the instructions"),
    "prompt": ((), "send its text as instructions and input"),
    "context_management": (([],), "send a shorter input"),
    "moderation": ((), "leave it out"),
    "image": ((), "leave it out"),
    "background_options": (({}, {"completion_window": "soonest"}), "leave it out"),
}
# What `include` may ask for: log-probabilities, what there is none of here, and reasoning, which is not encrypted.
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    {
        _LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SAMPLING = (
    *("temperature", "top_p", "stop", "seed", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def check_input_body(body: InputBody) -> None:
    """Refuse, by name, what would change the answer and is not implemented."""
    for name, (accepted, instead) in _NOT_IMPLEMENTED.items():
        value = getattr(body, name, None)
        if value is not None and value not in accepted:
            raise InvalidRequest(f"{name} is not supported; {instead}", name)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise InvalidRequest("text.verbosity is not supported; leave it out or set it to 'medium'", "text.verbosity")
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort not in (None, *_EFFORTS):
        raise InvalidRequest(f"reasoning.effort must be one of {', '.join(_EFFORTS)}", "reasoning.effort")


def check_response_body(body: ResponseBody) -> None:
    """Refuse that, and what contradicts itself."""
    check_input_body(body)
    for name in body.include or ():
        if name not in _INCLUDABLE:
            raise InvalidRequest(f"include can't ask for {name!r} here; leave it out", "include")
    if body.stream_options is not None:
        _check_stream_options(body.stream_options, bool(body.stream))
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: its answer is kept until somebody asks for it", "store")
    check_metadata(body.metadata)


def _check_stream_options(options: ResponseStreamOptions, streams: bool) -> None:
    if not streams:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if options.include_usage is False:
        field = "stream_options.include_usage"
        raise InvalidRequest(f"{field} can't be false: the last event always has the usage; leave it out", field)


def response_params(body: ResponseBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters; raises InvalidRequest naming the one that is out of range."""
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    most = body.top_logprobs or 0
    if most or _LOGPROBS in (body.include or ()):
        given["logprobs"] = most
    names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
    return make_params(given | {"max_tokens": body.max_output_tokens}, defaults, names)

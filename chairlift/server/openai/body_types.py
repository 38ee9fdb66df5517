"""What clients may send to the OpenAI routes. Unknown fields are refused by name.

Three kinds of fields: those that Chairlift honours; those that are metadata or hints, taken and ignored; and those that
would change the answer and are not implemented, taken only at a value that changes nothing (`NO_OPS`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from chairlift.bodies import is_neutral
from chairlift.core.sequences.sampling_params import SamplingParams, StructuredOutputsParams
from chairlift.errors import InvalidRequest
from chairlift.server.models.sequence_service import SequenceOptions

# Wider numbers would fail later, on their way to the worker.
Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`: whether to send usage at the end, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both completions and chat completions; None means the default, as in the OpenAI API."""

    model: str | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int, float] | None = None
    stop: str | list[str] | None = None
    max_tokens: Int | None = None
    # The newer name, which wins.
    max_completion_tokens: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extras, named as in vLLM.
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    # Of each prompt token, and the likeliest others; not streamed.
    prompt_logprobs: Int | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    # The form of the answer, as OpenAI, as vLLM and as its older versions have it.
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # As in llama.cpp: false keeps this request out of the prefix cache, reading and writing.
    cache_prompt: bool | None = None
    # Taken and ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    # Not implemented.
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None


class CompletionBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | list[str | Int | list[Int]], Meta(examples=["Batching is"])]
    echo: bool | None = None
    logprobs: Int | None = None
    # llama.cpp's name: true finds special tokens in the prompt's text; chat templates bring their own.
    parse_special: bool | None = None
    # As in vLLM: whether to put around the prompt's text what the tokenizer says, as by default.
    add_special_tokens: bool | None = None
    # So many samples are made for each prompt, and the `n` likeliest of them returned.
    best_of: Int | None = None
    # What follows: the answer is what is between, by models that have tokens for it.
    suffix: str | None = None


class FunctionBody(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the model may call: a function."""

    function: FunctionBody
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class AllowedToolsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Those of the tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[ToolBody]


class ToolChoiceBody(msgspec.Struct, forbid_unknown_fields=True):
    """A tool by its name, or some of the tools."""

    type: Literal["function", "allowed_tools"] = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedToolsBody | None = None


class ChatBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(examples=[[{"role": "user", "content": "What is batching?"}]])]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    # The last message is left open and gone on with; with `echo` an answer begins with what it has so far.
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Extras: the same as the template's argument, and as in vLLM how many tokens the reasoning may have.
    enable_thinking: bool | None = None
    thinking_token_budget: Int | None = None
    # Not implemented.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None


# Those that say what form the answer must have.
FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
)

# Fields that are not implemented, and the values (beside null, false and empty ones) that ask for nothing.
NO_OPS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
}


def check_supported(body: CommonBody) -> None:
    """Refuse, by name, what would change the answer and is not implemented."""
    for name, accepted in NO_OPS.items():
        value = getattr(body, name, None)
        if not is_neutral(value) and value not in accepted:
            raise InvalidRequest(f"{name} is not supported{_instead(accepted)}", name)
    if isinstance(body, CompletionBody) and body.best_of is not None:
        n = 1 if body.n is None else body.n
        if body.best_of < n:
            raise InvalidRequest(f"best_of must be at least n ({n}), got {body.best_of}", "best_of")
        if body.best_of > n and body.stream:
            problem = "can't be streamed: which samples are the best is known in the end"
            raise InvalidRequest(f"best_of above n {problem}", "best_of")
    if isinstance(body, CompletionBody) and body.suffix and body.echo:
        raise InvalidRequest("suffix and echo exclude each other; leave one out", "suffix")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs can't be streamed", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")


def _instead(accepted: tuple[Any, ...]) -> str:
    if not accepted:
        return ""
    return "; leave it out or set it to " + " or ".join(msgspec.json.encode(value).decode() for value in accepted)


def options_of(body: CommonBody, continues: bool, discard: bool = False, grammar: str | None = None) -> SequenceOptions:
    """What a body wants beside tokens and terms."""
    salt, use_cache = body.cache_salt or "", body.cache_prompt is not False
    return SequenceOptions(continues, bool(body.stream), discard, salt, use_cache, grammar)


def has_form(body: CommonBody) -> bool:
    """Whether a body may ask for a form of the answer, so that server/openai/answer_form.py need be asked."""
    return any(getattr(body, name) is not None for name in FORM_FIELDS)


_SAME_NAME = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in CommonBody.__struct_fields__ and name not in ("max_tokens", "structured_outputs")
)


def limit_of(body: CommonBody) -> tuple[str, int | None]:
    """What a body calls the most tokens of its answer, and how many that are."""
    newer = body.max_completion_tokens
    return ("max_tokens", body.max_tokens) if newer is None else ("max_completion_tokens", newer)


def make_params(given: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str] = {}) -> SamplingParams:
    """Sampling parameters, those not given by the model's defaults.

    Raises InvalidRequest for one that is out of range, by what the client calls it.
    """
    try:
        return SamplingParams(**{**defaults, **given})
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        shown = names.get(name, name)
        raise InvalidRequest(f"{shown} {problem}", shown if name in given else None) from None


def sampling_params(
    body: CommonBody, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None, **more: Any
) -> SamplingParams:
    """Collect the sampling fields, and `more` of them; raises InvalidRequest naming the one that is out of range."""
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, **more}
    return make_params(given, defaults, {"max_tokens": limit_of(body)[0]})

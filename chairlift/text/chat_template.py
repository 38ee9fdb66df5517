"""Chat templates: a list of messages to one prompt, exactly as transformers renders it."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chairlift.errors import InvalidRequest

if TYPE_CHECKING:
    import jinja2

# What a client must not set through template arguments: these are the template itself and its tools.
_RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize", "raise_exception"})


class ChatTemplate:
    """A model's chat templates by name, and the special tokens that they refer to (`bos_token`, ...)."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_folder(
        cls, folder: Path, tokenizer_config: dict[str, Any], special_tokens: dict[str, str]
    ) -> "ChatTemplate":
        """The templates of a model folder: `chat_template.jinja`, else `chat_template` of tokenizer_config.json."""
        file = folder / "chat_template.jinja"
        source: Any = file.read_text("utf-8") if file.is_file() else tokenizer_config.get("chat_template")
        sources: dict[str, str] = {}
        if isinstance(source, str):
            sources = {"default": source}
        elif isinstance(source, list):
            sources = {str(entry.get("name")): str(entry.get("template")) for entry in source}
        return cls(sources, special_tokens)

    @property
    def available(self) -> bool:
        """Whether there is any template."""
        return bool(self._sources)

    def render(self, messages: Sequence[Any], add_generation_prompt: bool, kwargs: dict[str, Any]) -> str:
        """The prompt. Raises InvalidRequest when the messages don't suit the template, in the template's own words."""
        if refused := sorted(_RESERVED.intersection(kwargs)):
            raise InvalidRequest(f"the chat template argument {refused[0]!r} can't be set", "chat_template_kwargs")
        variables = {"tools": None, "documents": None, **self._special_tokens, **_plain(kwargs)}
        chat = normalize_messages(messages)
        template = self._template(kwargs.get("tools"))
        try:
            return template.render(messages=chat, add_generation_prompt=add_generation_prompt, **variables)
        except Exception as error:  # a template can fail in any way that an expression can
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from error

    def _template(self, tools: Any) -> "jinja2.Template":
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequest(
                "this model has no chat template. Use /v1/completions, or add a chat_template.jinja to its folder.",
                "messages",
            )
        if name not in self._compiled:
            import jinja2

            try:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise InvalidRequest(
                    f"this model's chat template is broken (line {error.lineno}: {error.message}). "
                    "Use /v1/completions, or mend the chat template.",
                    "messages",
                ) from error
        return self._compiled[name]

    @cached_property
    def _environment(self) -> "jinja2.Environment":
        return _make_environment()


def normalize_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as templates expect them: plain dicts, content as one string, tool arguments as objects.

    Templates read a text's parts and a tool call's JSON differently or not at all; the joined text and the parsed
    arguments work with all of them.
    """
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(_plain(list(messages))):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{index}] must be an object, got {type(message).__name__}", "messages")
        message = dict(message)
        if isinstance(message.get("content"), list):
            message["content"] = _join_parts(message["content"], f"messages[{index}].content")
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        chat.append(message)
    return chat


def _plain(data: Any) -> Any:
    """Only plain data reaches the sandbox: an object's methods could do anything."""
    try:
        return msgspec.to_builtins(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"chat messages and template arguments must be plain data: {error}", "messages") from error


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise InvalidRequest(f"{where}[{index}]: parts of type {kind!r} are not supported, only 'text'", "messages")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{index}]: a text part needs a string 'text'", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _with_parsed_arguments(call: Any) -> Any:
    """OpenAI sends a tool call's arguments as JSON text, which templates would quote a second time."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _make_environment() -> "jinja2.Environment":
    """Jinja as transformers sets it up, since that is what templates are written and tested for."""
    # Imported here: most start-ups render no chat at once, and jinja2 costs tens of milliseconds.
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here the block is just its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Put the block's content in the block's place."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

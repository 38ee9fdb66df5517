"""Chat templates: a list of messages to one prompt, exactly as transformers renders it, within limits."""

import json
import re
import secrets
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import msgspec

from chairlift.bodies import MAX_DEPTH, is_neutral
from chairlift.errors import InvalidRequest, UnsupportedModel, clip
from chairlift.folders.model_json import read_object
from chairlift.text.dialect import CallForm
from chairlift.text.written_calls import with_written_calls

if TYPE_CHECKING:
    from chairlift.text.template_sandbox import TemplateSandbox

# Characters of a template: the longest that models come with have some 20,000.
MAX_TEMPLATE_CHARS = 2**17
# Where templates lie that have a name, as "tool_use", and how many there may be.
_NAMED, _MOST_NAMED = "additional_chat_templates", 32
# What a rendering may use (see `Budget`): a second or so at most, and memory by the size of what goes in. A quick one
# is done within milliseconds, so that it can be tried where others wait.
_WORK, _QUICK_WORK = 4_000_000, 20_000
_TEXT, _QUICK_TEXT = 2**24, 2**17
_TEXT_FOR_EACH_CHARACTER, _MOST_TEXT = 1024, 2**28
_LONGEST_DATE_FORMAT = 256
_JOINED_ARGUMENTS = re.compile(r"""\+\s*[\w.\['"\]]*\barguments\b['"\]]*\s*(\+|\}\})""")
# The role that newer clients give instructions in; templates that don't know it know them as the system's.
_DEVELOPER = "developer"

# Roles whose messages may have no content: what they say may be a call, or that there is nothing.
_MAY_BE_EMPTY = frozenset({"assistant", "tool", "function"})
# What messages of OpenAI may have and no template reads, so that it would leave an empty turn; and what to do instead.
_NOT_READ = {"function_call": "send tool_calls", "audio": "send what was said as content"}
# What a client must not set through template arguments: these are the template itself and its tools.
_RESERVED = frozenset({"self", "messages", "add_generation_prompt", "chat_template", "tokenize", "raise_exception"})
# Phi-4-mini's template takes tools as text of its system message, and no others.
_TOOLS_IN_MESSAGE = re.compile(r"""\bmessage(\.tools\b|\[['"]tools['"]\])""")
_TOOLS = re.compile(r"""(?<![\w.'"])tools(?![\w'"])""")
# What its model card begins such a message with.
_WITH_TOOLS = "You are a helpful assistant with some tools."
_NO_CONTENT = re.compile(r"""and\s+message(\.content|\[['"]content['"]\])\s+is\s+(not\s+)?none\s*-?%\}""")


class TooSlow(Exception):
    """A rendering that was to be quick is not done yet; it may be tried without haste."""


class ChatTemplate:
    """A model's chat templates by name, and the special tokens that they refer to (`bos_token`, ...)."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        # Some put a call's arguments into the prompt as they are, and so need them as text.
        self.joins_arguments = any(map(_JOINED_ARGUMENTS.search, sources.values()))
        # Most take it for granted that there is content, be it empty; to a few its absence is what makes a call.
        self.knows_no_content = any(map(_NO_CONTENT.search, sources.values()))
        self.has_tools_in_message = any(
            _TOOLS_IN_MESSAGE.search(source) and not _TOOLS.search(source) for source in sources.values()
        )
        # Or why it can't be compiled.
        self._compiled: dict[str, CodeType | str] = {}
        # A sandbox is for one thread at a time.
        self._own = threading.local()

    @classmethod
    def from_folder(
        cls, folder: Path, tokenizer_config: dict[str, Any], special_tokens: dict[str, str]
    ) -> "ChatTemplate":
        """The templates of a model folder: `chat_template.jinja`, else `chat_template` of tokenizer_config.json, else
        of chat_template.json, and those that have a name, each in a file of `additional_chat_templates`.

        Raises UnsupportedModel for a file that is no template by its size, and for too many.
        """
        file = folder / "chat_template.jinja"
        source: Any = _read(file) if file.is_file() else tokenizer_config.get("chat_template")
        if source is None:
            source = _read_of_processor(folder / "chat_template.json")
        sources: dict[str, str] = {}
        if isinstance(source, str):
            sources = {"default": source}
        elif isinstance(source, list):
            sources = {str(entry.get("name")): str(entry.get("template")) for entry in source}
        named = [each for each in sorted((folder / _NAMED).glob("*.jinja")) if each.is_file()]
        if len(named) > _MOST_NAMED:
            raise UnsupportedModel(f"{folder / _NAMED} has {len(named)} templates, more than {_MOST_NAMED}")
        return cls(sources | {each.stem: _read(each) for each in named}, special_tokens)

    @property
    def source(self) -> str:
        """All templates, those with tools first."""
        return "\n".join(self._sources[name] for name in sorted(self._sources, reverse=True))

    @property
    def available(self) -> bool:
        """Whether there is any template."""
        return bool(self._sources)

    def render(
        self,
        chat: list[dict[str, Any]],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        size: int,
        quick: bool,
        continue_final: bool = False,
        calls: CallForm | None = None,
    ) -> str:
        """The prompt of normalized messages, which with the arguments have about `size` characters.

        With `continue_final` it ends where the last message's content does, and before whatever would close that. Calls
        are written into messages in the form `calls`, if there is one.
        Raises InvalidRequest when the messages don't suit the template, in the template's own words, or when it goes
        beyond its limits; TooSlow if it was to be `quick` and isn't.
        """
        from chairlift.text.template_sandbox import Budget, OverLimit

        variables = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        end = secrets.token_hex(16) if continue_final else ""
        chat = chat if calls is None else with_written_calls(chat, calls)
        tools = kwargs.get("tools")
        variables |= {"messages": self._suited(chat, tools, end), "add_generation_prompt": add_generation_prompt}
        code = self._code(tools, quick)
        text = min(_TEXT + _TEXT_FOR_EACH_CHARACTER * size, _MOST_TEXT)
        budget = Budget(_QUICK_WORK, _QUICK_TEXT) if quick else Budget(_WORK, text)
        try:
            return _up_to(end, self._sandbox.render(code, budget, variables))
        except OverLimit as error:
            if quick:
                raise TooSlow from None
            raise InvalidRequest(f"the chat template {error}, and was stopped", "messages") from None
        except RecursionError:
            raise InvalidRequest("the chat template was stopped: its calls are nested too deeply", "messages") from None
        except InvalidRequest:
            raise
        except Exception as error:  # a template can fail in any way that an expression can
            raise InvalidRequest(f"the chat template refused the messages: {clip(str(error))}", "messages") from error

    def _suited(self, chat: list[dict[str, Any]], tools: Any, end: str) -> list[dict[str, Any]]:
        """Messages in roles that the templates know, the last one marked where its content ends."""
        if not any(_DEVELOPER in source for source in self._sources.values()):
            chat = [message | {"role": "system"} if message.get("role") == _DEVELOPER else message for message in chat]
        if self.has_tools_in_message:
            chat = _with_tools(chat, tools)
        if end:
            content = chat[-1].get("content")
            if not isinstance(content, str):
                raise InvalidRequest("continue_final_message needs a last message with text", "continue_final_message")
            chat = [*chat[:-1], chat[-1] | {"content": content + end}]
        return chat

    def _code(self, tools: Any, quick: bool) -> CodeType:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequest(
                "this model has no chat template. Use /v1/completions, or add a chat_template.jinja to its folder.",
                "messages",
            )
        if name not in self._compiled:
            if quick:
                raise TooSlow
            self._compiled[name] = self._compile(self._sources[name])
        compiled = self._compiled[name]
        if isinstance(compiled, str):
            raise InvalidRequest(
                f"this model's chat template is broken ({compiled}). Use /v1/completions, or mend the chat template.",
                "messages",
            )
        return compiled

    def _compile(self, source: str) -> CodeType | str:
        import jinja2

        if len(source) > MAX_TEMPLATE_CHARS:
            return f"it has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}"
        try:
            return self._sandbox.code_of(source)
        except jinja2.TemplateSyntaxError as error:
            return f"line {error.lineno}: {error.message}"
        except Exception as error:  # parser and compiler give up in many ways on what is nested too deeply
            return f"it can't be compiled: {type(error).__name__}"

    @property
    def _sandbox(self) -> "TemplateSandbox":
        found: Any = getattr(self._own, "sandbox", None)
        if found is None:
            # Imported here: most start-ups render no chat at once, and jinja2 costs tens of milliseconds.
            from chairlift.text.template_sandbox import TemplateSandbox

            functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
            found = self._own.sandbox = TemplateSandbox(_to_json, functions)
        sandbox: TemplateSandbox = found
        return sandbox


def _with_tools(chat: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """Messages with the tools in that of the system, and what calls gave in the role that has a token."""
    chat = [message | {"role": "tool_response"} if message.get("role") == "tool" else message for message in chat]
    if not isinstance(tools, list) or not tools:
        return chat
    if not chat or chat[0].get("role") != "system":
        chat = [{"role": "system", "content": _WITH_TOOLS}, *chat]
    described = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    return [chat[0] | {"tools": _to_json(described)}, *chat[1:]]


def _up_to(end: str, text: str) -> str:
    """The text before the mark, if there is to be one."""
    if not end:
        return text
    place = text.rfind(end)
    if place < 0:
        problem = "this model's chat template leaves out the last message, so it can't be continued"
        raise InvalidRequest(problem, "continue_final_message")
    return text[:place]


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse template arguments that are the template itself and its tools."""
    if refused := sorted(_RESERVED.intersection(kwargs)):
        raise InvalidRequest(f"the chat template argument {refused[0]!r} can't be set", "chat_template_kwargs")


def normalize_messages(
    messages: Sequence[Any], joins_arguments: bool = False, knows_no_content: bool = False
) -> list[dict[str, Any]]:
    """Messages as templates expect them: plain dicts, content as one string, tool arguments as objects.

    Templates read a text's parts and a tool call's JSON differently or not at all; the joined text and the parsed
    arguments work with all of them, but for those that want arguments as text. Beside calls there is content, be it
    empty, unless the template knows what it is without.
    """
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(plain(list(messages))):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{index}] must be an object, got {type(message).__name__}", "messages")
        message = _said_as_content(message, f"messages[{index}]")
        message["content"] = _content(message, f"messages[{index}].content")
        if not message.get("tool_calls"):
            # To some templates it makes a call that the key is there at all.
            message.pop("tool_calls", None)
        elif isinstance(message["tool_calls"], list):
            message["tool_calls"] = [_with_arguments(call, joins_arguments) for call in message["tool_calls"]]
            message["content"] = message["content"] or (None if knows_no_content else "")
        chat.append(message)
    return chat


def _said_as_content(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message whose text is its content, as templates read no other field. Raises InvalidRequest for what is none."""
    for field, instead in _NOT_READ.items():
        if not is_neutral(message.get(field)):
            raise InvalidRequest(f"{where}.{field} is not supported; {instead}", f"{where}.{field}")
    made = dict(message)
    refusal = made.pop("refusal", None)
    if is_neutral(refusal):
        return made
    if made.get("role") != "assistant" or not isinstance(refusal, str):
        raise InvalidRequest(f"{where}.refusal must be text, and of the assistant", f"{where}.refusal")
    if not is_neutral(made.get("content")):
        raise InvalidRequest(f"{where} has content and a refusal; send one of them", f"{where}.refusal")
    return made | {"content": refusal}


def _content(message: dict[str, Any], where: str) -> str:
    """A message's content as one text."""
    content, role = message.get("content"), message.get("role")
    if content is None:
        if role not in _MAY_BE_EMPTY:
            problem = "must be text; only an assistant's or a tool's may be null or left out"
            raise InvalidRequest(f"{where} {problem}", where)
        return ""
    if isinstance(content, list):
        return _join_parts(content, where, role == "assistant")
    if not isinstance(content, str):
        raise InvalidRequest(f"{where} must be text or a list of parts", where)
    return content


def _read(file: Path) -> str:
    _check_size(file)
    return file.read_text("utf-8")


def _read_of_processor(file: Path) -> Any:
    """The template in the file of its own that older versions of transformers gave a processor's; None without it."""
    if not file.is_file():
        return None
    _check_size(file)
    return read_object(file).get("chat_template")


def _check_size(file: Path) -> None:
    size = file.stat().st_size
    if size > 4 * MAX_TEMPLATE_CHARS:
        raise UnsupportedModel(f"{file} has {size} bytes, too many for a chat template")


def plain(data: Any) -> Any:
    """Only plain data reaches the sandbox: an object's methods could do anything. Raises InvalidRequest."""
    try:
        found = msgspec.to_builtins(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"chat messages and template arguments must be plain data: {error}", "messages") from error
    except RecursionError:
        raise too_deep() from None
    return found


def too_deep() -> InvalidRequest:
    """What to say of messages that are nested too deeply."""
    return InvalidRequest(f"chat messages and template arguments must be nested {MAX_DEPTH} levels deep at most")


def _join_parts(parts: list[Any], where: str, refuses: bool) -> str:
    """The text of a message's parts. Only some roles refuse anything, in parts that say so."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" and not (refuses and kind == "refusal"):
            known = "'text' and 'refusal'" if refuses else "'text'"
            problem = f"{where}[{index}]: parts of type {kind!r} are not supported, only {known}"
            raise InvalidRequest(problem, "messages")
        if not isinstance(part.get(kind), str):
            raise InvalidRequest(f"{where}[{index}]: a {kind} part needs a string {kind!r}", "messages")
        texts.append(part[kind])
    return "".join(texts)


def _with_arguments(call: Any, as_text: bool) -> Any:
    """A call with its name first, as models write it. OpenAI sends arguments as JSON text, which templates would quote
    a second time."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    if "name" in function:
        function = {"name": function["name"], **function}
    arguments = {} if function["arguments"] in (None, "") else function["arguments"]
    try:
        if as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = json.loads(arguments)
    except ValueError:
        return call
    except RecursionError:
        raise too_deep() from None
    return {**call, "function": {**function, "arguments": arguments}}


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _LONGEST_DATE_FORMAT:
        raise ValueError(f"a date format of more than {_LONGEST_DATE_FORMAT} characters")
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

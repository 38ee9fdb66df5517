"""How one model writes its replies: its dialect, by its folder, with its own tokens."""

import re
from collections.abc import Iterator

import msgspec

from chairlift.text.call_grammar import ReasoningStart
from chairlift.text.chat_template import MAX_TEMPLATE_CHARS
from chairlift.text.dialect import CallForm, Dialect
from chairlift.text.dialects import find_dialect
from chairlift.text.reply_reader import DialectMarkers
from chairlift.text.response_template import read_template
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.written_calls import form_to_write

# What templates call the argument that turns reasoning on or off.
_SWITCHES = ("enable_thinking", "thinking")
# What has no end goes to the end of the text: nothing after it is looked at again.
_COMMENT = re.compile(r"\{#.*?(#\}|\Z)", re.DOTALL)
_CODE = re.compile(r"\{[%{].*?([%}]\}|\Z)", re.DOTALL)
_STRINGS = {marks: re.compile(rf"([{marks}])(?:(?!\1)[^\\]|\\.)*(\1)?", re.DOTALL) for marks in ("'\"", "'", '"')}


class ModelDialect(msgspec.Struct, frozen=True, kw_only=True):
    """A model's dialect, None if it has none that is known, and what its chat template takes.

    `switch` is the template's argument that turns reasoning on or off. `tokens` are those of the markers that are
    tokens; the ones that texts leave out are among `shown_with_tools` and `shown_without`. `markers` are the dialect's
    without tools, and it `spells` if a reply has parts even where no tools are given. `calls` is the form in which
    calls are written into messages, where the template has no place for them.
    """

    dialect: Dialect | None = None
    takes_tools: bool = False
    takes_effort: bool = False
    switch: str | None = None
    tokens: dict[str, int] = {}
    shown_with_tools: frozenset[int] = frozenset()
    shown_without: frozenset[int] = frozenset()
    markers: DialectMarkers | None = None
    calls: CallForm | None = None
    spells: bool = False

    def __post_init__(self) -> None:
        """Find out once what each request asks."""
        dialect = self.dialect
        found = dialect is not None and (dialect.reasoning_content or dialect.content or dialect.wrapper) is not None
        msgspec.structs.force_setattr(self, "spells", found)

    @property
    def reasons(self) -> bool:
        """Whether replies may begin with reasoning."""
        return self.dialect is not None and self.dialect.reasoning_content is not None

    def reasoning_start(self, prompt: str) -> ReasoningStart:
        """Whether a prompt has opened the reasoning, or closed it, or neither."""
        if self.dialect is None or self.dialect.reasoning_content is None:
            return "closed"
        region, end = self.dialect.reasoning_content, prompt.rstrip()
        if any(end.endswith(marker.rstrip()) for marker in region.open):
            return "open"
        # Where the answer has markers too, what ends the reasoning ends any turn before.
        closed = self.dialect.content is None and any(end.endswith(marker.rstrip()) for marker in region.close)
        return "closed" if closed else "maybe"

    def shown(self, tools: bool) -> frozenset[int]:
        """The special tokens that a reader has to see, those of calls only with `tools`."""
        return self.shown_with_tools if tools else self.shown_without


def model_dialect_of(tokenizer: Tokenizer, name: str = "auto") -> ModelDialect:
    """How a model writes: in the dialect that the setting names, or by its response template or chat template."""
    source = tokenizer.chat_template.source
    # None is rendered that has so many characters by itself.
    if len(source) > MAX_TEMPLATE_CHARS:
        source = ""
    dialect = read_template(tokenizer.response_template) if name == "auto" and tokenizer.response_template else None
    dialect = dialect or find_dialect(source, name)
    code = _code_of(source)
    special = tokenizer.vocabulary.special
    return ModelDialect(
        dialect=dialect,
        takes_tools=_has(code, "tools") or (source != "" and tokenizer.chat_template.has_tools_in_message),
        takes_effort=_is_given(code, "reasoning_effort"),
        switch=next((word for word in _SWITCHES if _is_given(code, word)), None),
        tokens=_tokens_in(tokenizer, dialect, True),
        shown_with_tools=special.intersection(_tokens_in(tokenizer, dialect, True).values()),
        shown_without=special.intersection(_tokens_in(tokenizer, dialect, False).values()),
        markers=None if dialect is None else DialectMarkers(dialect, {}),
        calls=form_to_write(dialect, source),
    )


def _has(code: str, word: str) -> bool:
    """Whether a template's code has a variable: no field of anything."""
    return re.search(rf"(?<![\w.]){word}(?!\w)", code) is not None


def _is_given(code: str, word: str) -> bool:
    """Whether such a variable may come from outside: it is not the template's own, or the template asks if it is."""
    asked = rf"(?<![\w.]){word}\s+(is\s+(not\s+)?defined|\|\s*default)"
    own = re.search(rf"set\s+{word}\s*=", code) is not None
    return _has(code, word) and (not own or re.search(asked, code) is not None)


def _code_of(source: str) -> str:
    """The expressions and statements of templates, without the texts in them."""
    source = _COMMENT.sub(lambda found: "" if found[1] else found[0], source)
    # Each by itself: a text that ends none, as it holds such brackets, must not hide what follows.
    return " ".join(_without_strings(found[0]) for found in _CODE.finditer(source) if found[1])


def _without_strings(code: str, marks: str = "'\"") -> str:
    """Code with the strings that begin with any of some marks made empty.

    Where one has no end, no later one that begins with its mark has, so that only the other kind is looked for.
    """

    def empty(found: re.Match[str]) -> str:
        if found[2]:
            return "''"
        others = marks.replace(found[1], "")
        return found[1] + _without_strings(found[0][1:], others) if others else found[0]

    return _STRINGS[marks].sub(empty, code)


def _tokens_in(tokenizer: Tokenizer, dialect: Dialect | None, tools: bool) -> dict[str, int]:
    """The tokenizer's tokens with names that are in a dialect's markers."""
    if dialect is None:
        return {}
    text = "\n".join(_texts(dialect, tools))
    added = tokenizer.backend.get_added_tokens_decoder()
    named = {token.content: token_id for token_id, token in added.items() if len(token.content.strip()) > 1}
    return {name: token_id for name, token_id in named.items() if name in text}


def _texts(dialect: Dialect, tools: bool) -> Iterator[str]:
    for region in (dialect.reasoning_content, dialect.content, dialect.wrapper):
        yield from () if region is None else (*region.open, *region.close)
    for form in dialect.tool_calls if tools else ():
        yield from form.markers

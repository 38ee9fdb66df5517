"""A call's arguments as models write them: where they end, as they come, and what they are as JSON."""

import ast
import io
import json
import re
import tokenize
import warnings
from itertools import pairwise
from typing import Any, Protocol

from chairlift.text.dialect import CallForm, TagForm
from chairlift.text.schemas import SchemaTypes, json_type

_JSON_STOPS = re.compile(r'[{}\[\]"\\]')
_PYTHON_STOPS = re.compile(r"""[()\[\]{}'"\\]""")
_BARE_STOPS = re.compile(r"[{}\[\]]")
_BARE_KEY = re.compile(r"\s*([\w.-]+)\s*:\s*")
_BARE_WORD = re.compile(r"[^\s,{}\[\]]+")
_SPACES = re.compile(r"\s*")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS = {"true": True, "false": False, "null": None}
_PLAIN = "plain_"
# Characters of a value in Python's notation: its syntax tree takes some hundred times the memory.
_MOST_LITERAL = 2**16
# What begins an object or a list.
_BRACKETS = ("{", "[")


class Scanner(Protocol):
    """Looks for the end of one call's arguments."""

    def take(self, text: str, at: int) -> tuple[int, bool]:
        """Read on in a text that may have grown, from where the last call left off: where it stands now, and whether
        the arguments end there."""
        ...


def make_scanner(form: CallForm, types: SchemaTypes) -> Scanner:
    """A scanner for one call of the tool whose arguments have these types."""
    if form.notation == "json":
        return _JsonScanner()
    if form.notation == "python":
        return _PythonScanner()
    if form.notation == "bare":
        return _BareScanner(form.quote)
    assert form.tags is not None
    return _TagScanner(form.tags, types)


def arguments_json(form: CallForm, text: str, types: SchemaTypes) -> str | None:
    """Arguments in a call's own notation as JSON text, or None if that is not what they are."""
    try:
        if form.notation == "python":
            found = _python_json(text)
        elif form.notation == "bare":
            found = _BareParser(text, form.quote).json()
        else:
            assert form.tags is not None
            found = _tagged_json(form.tags, text, types)
        # Half a character, as escapes may say it, is no text.
        found.encode()
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError):
        return None
    return found


class _JsonScanner:
    """To the end of an object: its brackets, outside of texts, are counted."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._escaped = False

    def take(self, text: str, at: int) -> tuple[int, bool]:
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while (stop := _JSON_STOPS.search(text, at)) is not None:
            at = stop.end()
            letter = stop[0]
            if self._in_text:
                if letter == '"':
                    self._in_text = False
                elif letter == "\\":
                    if at == len(text):
                        self._escaped = True
                        return at, False
                    at += 1
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter != "\\":
                self._depth -= 1
                if self._depth == 0:
                    return at, True
        return len(text), False


class _PythonScanner:
    """To the bracket that closes a call, which is not of the arguments; or to the end of a `value` in brackets, in
    Python's notation or JSON."""

    def __init__(self, value: bool = False) -> None:
        self._beyond = 0 if value else 1
        self._depth = self._beyond
        self._quote = ""
        self._escaped = False

    def take(self, text: str, at: int) -> tuple[int, bool]:
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while (stop := _PYTHON_STOPS.search(text, at)) is not None:
            at = stop.end()
            letter = stop[0]
            if letter == "\\":
                if at == len(text):
                    self._escaped = True
                    return at, False
                at += 1
            elif self._quote:
                self._quote = "" if letter == self._quote else self._quote
            elif letter in "'\"":
                self._quote = letter
            elif letter in "([{":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return at - self._beyond, True
        return len(text), False


class _BareScanner:
    """To the bracket that closes an object, which is not of the arguments."""

    def __init__(self, quote: str) -> None:
        self._stops = re.compile(f"{re.escape(quote)}|{_BARE_STOPS.pattern}")
        self._quote = quote
        self._depth = 1
        self._in_text = False

    def take(self, text: str, at: int) -> tuple[int, bool]:
        while True:
            if self._in_text:
                found = text.find(self._quote, at)
                if found < 0:
                    return self._held(text, at), False
                self._in_text, at = False, found + len(self._quote)
            stop = self._stops.search(text, at)
            if stop is None:
                return self._held(text, at), False
            at = stop.end()
            if stop[0] == self._quote:
                self._in_text = True
            elif stop[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return at - 1, True

    def _held(self, text: str, at: int) -> int:
        """Up to where no quote may have begun."""
        return max(at, len(text) - len(self._quote) + 1)


class _TagScanner:
    """To what is no further argument."""

    def __init__(self, tags: TagForm, types: SchemaTypes) -> None:
        self._head = _tag_head(tags)
        self._open, self._close = tags.open.strip(), tags.close.strip()
        self._types = types
        self._start = -1
        self._in_value = False
        self._value: _PythonScanner | None = None

    def take(self, text: str, at: int) -> tuple[int, bool]:
        if self._start < 0:
            self._start = at
        while True:
            if not self._in_value:
                found = _SPACES.match(text, self._start)
                start = found.end() if found else self._start
                if not text.startswith(self._open, start):
                    return self._start, not self._open.startswith(text[start : start + len(self._open)])
                head = self._head.match(text, start)
                # A value's first letter tells whether it has brackets, in which anything may be quoted.
                if head is None or head.end() == len(text):
                    return self._start, False
                at, self._in_value = head.end(), True
                self._value = _PythonScanner(True) if _is_bracketed(text, head, self._types) else None
            if self._value is not None:
                at, done = self._value.take(text, at)
                if not done:
                    return at, False
                self._value = None
            end = text.find(self._close, at)
            if end < 0:
                return max(at, len(text) - len(self._close) + 1), False
            self._start = at = end + len(self._close)
            self._in_value = False


def _is_bracketed(text: str, head: re.Match[str], types: SchemaTypes) -> bool:
    """Whether an argument is an object or a list, and no text."""
    allowed = types.of_property(head[1].strip())
    return bool(allowed) and "string" not in allowed and text.startswith(_BRACKETS, head.end())


def _python_json(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = ast.parse(_with_plain_names(f"f({text}\n)"), mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("not a call with named arguments")
    value = {
        (each.arg or "").removeprefix(_PLAIN): ast.literal_eval(_JsonWords().visit(each.value))
        for each in call.keywords
    }
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _with_plain_names(call: str) -> str:
    """A call in Python, its arguments' names with letters before them: Python's own words may be among them."""
    lines, names, depth = list(io.StringIO(call)), [], 0
    tokens = list(tokenize.generate_tokens(iter(lines).__next__))
    for token, following in pairwise(tokens):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.NAME and depth == 1 and following.string == "=":
            names.append(token.start)
    for row, column in reversed(names):
        lines[row - 1] = f"{lines[row - 1][:column]}{_PLAIN}{lines[row - 1][column:]}"
    return "".join(lines)


def _object(members: dict[str, str]) -> str:
    """An object of values that are JSON."""
    return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in members.items()) + "}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _checked(text: str) -> str:
    """A text that is JSON. Raises ValueError if it is none."""
    json.loads(text, parse_constant=_no_number)
    return text


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


class _JsonWords(ast.NodeTransformer):
    """Lets a Python value have true, false and null."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


class _BareParser:
    """Reads an object without its brackets, whose keys are bare, and writes it as JSON."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def json(self) -> str:
        found = self._members("")
        if self._at != len(self._text):
            raise ValueError("more than an object")
        return found

    def _members(self, end: str) -> str:
        found: dict[str, str] = {}
        while not self._ends(end):
            key = self._key()
            found[key] = self._any()
            self._separated(end)
        return _object(found)

    def _key(self) -> str:
        self._space()
        if self._text.startswith(self._quote, self._at):
            key = self._quoted()
            self._space()
            if not self._text.startswith(":", self._at):
                raise ValueError("a key without a value")
            self._at += 1
            return key
        match = _BARE_KEY.match(self._text, self._at)
        if match is None:
            raise ValueError("no key")
        self._at = match.end()
        return match[1]

    def _any(self) -> str:
        self._space()
        if self._text.startswith(self._quote, self._at):
            return _quoted(self._quoted())
        letter = self._text[self._at : self._at + 1]
        if letter == "{":
            self._at += 1
            return self._members("}")
        if letter == "[":
            self._at += 1
            return self._items()
        match = _BARE_WORD.match(self._text, self._at)
        if match is None:
            raise ValueError("no value")
        self._at = match.end()
        return "null" if match[0] == "None" else _checked(match[0])

    def _items(self) -> str:
        found = []
        while not self._ends("]"):
            found.append(self._any())
            self._separated("]")
        return f"[{', '.join(found)}]"

    def _ends(self, end: str) -> bool:
        """Whether it ends here; the bracket, if there is one, is then taken."""
        self._space()
        if not end:
            return self._at == len(self._text)
        if not self._text.startswith(end, self._at):
            return False
        self._at += 1
        return True

    def _separated(self, end: str) -> None:
        self._space()
        if self._text.startswith(",", self._at):
            self._at += 1
        elif not (self._text.startswith(end, self._at) if end else self._at == len(self._text)):
            raise ValueError("no comma")

    def _quoted(self) -> str:
        start = self._at + len(self._quote)
        end = self._text.index(self._quote, start)
        self._at = end + len(self._quote)
        return self._text[start:end]

    def _space(self) -> None:
        match = _SPACES.match(self._text, self._at)
        self._at = match.end() if match else self._at


def _tag_head(tags: TagForm) -> re.Pattern[str]:
    named = r"\s*".join(map(re.escape, tags.named.split()))
    after = r"\n?" if tags.named.endswith("\n") else ""
    return re.compile(rf"{re.escape(tags.open.strip())}([^<>\n]*){named}{after}")


def _tagged_json(tags: TagForm, text: str, types: SchemaTypes) -> str:
    found: dict[str, str] = {}
    at, head, close = 0, _tag_head(tags), tags.close.strip()
    while (start := head.search(text, at)) is not None:
        end = start.end()
        if _is_bracketed(text, start, types):
            end, _ = _PythonScanner(True).take(text, end)
        end = text.index(close, end)
        key, at, raw = start[1].strip(), end + len(close), text[start.end() : end]
        if tags.close.startswith("\n"):
            raw = raw.removesuffix("\n")
        found[key] = _tagged_argument(raw, types.of_property(key))
    return _object(found)


def _tagged_argument(raw: str, types: frozenset[str]) -> str:
    """A value whose schema allows these types, none if any; what is none of them is text."""
    if types == {"string"}:
        return _quoted(raw)
    words = raw.strip()
    words = _PYTHON_WORDS.get(words, words)
    try:
        value = json.loads(words, parse_constant=_no_number)
    except ValueError:
        literal = None if "string" in types else _literal_json(words)
        return _quoted(raw) if literal is None else literal
    return _quoted(raw) if "string" in types and json_type(value) not in types else words


def _literal_json(text: str) -> str | None:
    """An object or a list in Python's notation as JSON, None if that is not what it is: Seed-OSS sees them so."""
    if not text.startswith(_BRACKETS) or len(text) > _MOST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _JsonWords().visit(ast.parse(text, mode="eval"))
        return json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None

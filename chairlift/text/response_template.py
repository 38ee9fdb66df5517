"""transformers' `response_template`, which says in tokenizer_config.json how a model's replies are taken apart.

Only what says as well how replies are written makes a dialect: markers of literal text, white space and a name, not any
regular expression.
"""

import re
from typing import Any

from chairlift.text.dialect import CallForm, Dialect, Region, TagForm

# What models call the reasoning.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_NAME, _KEY, _VALUE = "\0name\0", "\0key\0", "\0value\0"
# The elements of a pattern that a marker can have.
_ELEMENTS = re.compile(
    r"""(?P<group>\(\?P<(?P<named>\w+)>(?:[^()\\]|\\.)*\))
    | (?P<space>(?:\\s|\\n|[ ])[*+?])
    | (?P<gap>\.\*\??|\[\^[^\]]*\]\*)
    | (?P<either>\(\?:(?P<choices>(?:[^()\\]|\\.)*)\))
    | (?P<escaped>\\(?P<letter>.))
    | (?P<plain>[^\\.^$*+?{}\[\]()|])""",
    re.VERBOSE | re.DOTALL,
)
# A field has few markers, and short ones. A pattern could stand for any number of them.
_MOST_MARKERS, _LONGEST_MARKER = 64, 512
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "s": " "}


def read_template(spec: Any) -> Dialect | None:
    """The dialect that a `response_template` says; None if it says more than a dialect can.

    A template that is broken is none.
    """
    try:
        fields = spec["fields"]
        reasoning = next((fields[name] for name in _REASONING if name in fields), None)
        calls = fields.get("tool_calls")
        content = fields.get("content", {})
        return Dialect(
            name="response_template",
            reasoning_content=None if reasoning is None else _region(reasoning),
            tool_calls=() if calls is None else (_calls(calls),),
            content=_region(content) if "open" in content or "open_pattern" in content else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _region(field: dict[str, Any]) -> Region:
    return Region(tuple(_markers(field, "open")), tuple(_markers(field, "close")))


def _markers(field: dict[str, Any], key: str) -> list[str]:
    """The markers that open or close a field. Raises ValueError for what are none."""
    literal = field.get(key)
    if literal is None:
        return _literals(field[f"{key}_pattern"])
    found = [literal] if isinstance(literal, str) else list(literal)
    if len(found) > _MOST_MARKERS or any(len(each) > _LONGEST_MARKER for each in found):
        raise ValueError(f"more than {_MOST_MARKERS} markers, or one of more than {_LONGEST_MARKER} characters")
    return found


def _literals(pattern: str) -> list[str]:
    """A pattern as markers, in which names stand for groups."""
    if len(pattern) > _LONGEST_MARKER:
        raise ValueError(f"a pattern of more than {_LONGEST_MARKER} characters")
    found, at = [""], 0
    while at < len(pattern):
        element = _ELEMENTS.match(pattern, at)
        if element is None:
            raise ValueError(f"{pattern!r} is more than a marker")
        at = element.end()
        if element["group"]:
            more = [f"\0{element['named']}\0"]
        elif element["space"]:
            more = ["\n"]
        elif element["gap"]:
            more = ["…"]
        elif element["either"]:
            more = [each for choice in element["choices"].split("|") for each in _literals(choice)]
        elif element["escaped"]:
            if element["letter"].isalnum() and element["letter"] not in _LETTERS:
                raise ValueError(f"{pattern!r} is more than a marker")
            more = [_LETTERS.get(element["letter"], element["letter"])]
        else:
            more = [element["plain"]]
        if len(found) * len(more) > _MOST_MARKERS:
            raise ValueError(f"{pattern!r} stands for more than {_MOST_MARKERS} markers")
        found = [before + after for before in found for after in more]
    return found


def _calls(field: dict[str, Any]) -> CallForm:
    """How calls are written."""
    [opened] = _markers(field, "open")
    closes = _markers(field, "close")
    before, named, after = opened.lstrip().partition(_NAME)
    content = field.get("content", "text")
    name, arguments = _keys(field["transform"])
    if field.get("transform_each"):
        return _array(before, closes, name, arguments)
    if content == "json" and not named:
        return _object(before, closes, name, arguments)
    if not named or name != "name" or arguments != "content":
        raise ValueError("the name is in no place that is known")
    options = field.get("content_args", {})
    close, separator = tuple(closes), "\n" if before.startswith("<") else ""
    if content == "xml-inline":
        tags = _tags(options)
        close = tuple(f"\n{each.lstrip()}" for each in closes)
        return CallForm(open=before, named=after, close=close, separator=separator, notation="tags", tags=tags)
    if content != "json":
        raise ValueError(f"arguments of the kind {content!r} are not known")
    if options.get("unquoted_keys"):
        [[quote, end]] = options.get("string_delims", [['"', '"']])
        if quote != end:
            raise ValueError("texts that end by another mark than they begin with are not known")
        close = tuple("}" + each for each in closes)
        return CallForm(open=before, named=after + "{", close=close, separator="", notation="bare", quote=quote)
    return CallForm(open=before, named=after, close=close, separator="")


def _object(before: str, closes: list[str], name: str, arguments: str) -> CallForm:
    """A call as one JSON object."""
    close = tuple("}\n" + each for each in closes)
    return CallForm(open=f'{before}\n{{"{name}": "', named=f'", "{arguments}": ', close=close, separator="\n")


def _array(before: str, closes: list[str], name: str, arguments: str) -> CallForm:
    """Calls as a JSON array of objects."""
    [end] = closes
    return CallForm(
        begin=f"{before}[",
        open=f'{{"{name}": "',
        named=f'", "{arguments}": ',
        close=("}",),
        separator=", ",
        end=f"]{end}",
    )


def _keys(transform: dict[str, Any]) -> tuple[str, str]:
    """Where the name of a call and its arguments come from: a group of the marker, or a key of the content."""
    function = transform["function"]
    if function == "{content}":
        return "name", "arguments"
    found = []
    for key in ("name", "arguments"):
        match = re.fullmatch(r"\{(?:content\.)?(\w+)\}", function[key])
        if match is None:
            raise ValueError(f"{function[key]!r} is no place that is known")
        found.append(match[1])
    return found[0], found[1]


def _tags(options: dict[str, Any]) -> TagForm:
    [pattern] = _literals(options["tag_pattern"])
    head, key, rest = pattern.partition(_KEY)
    named, value, close = rest.partition(_VALUE)
    if not key or not value:
        raise ValueError("tags without a name or a value")
    return TagForm(f"\n{head.lstrip()}", named, close, words=True)

"""Settings that are one of a few words: those of a `Literal`, or the rows of a table."""

import re
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from chairlift.errors import ConfigError

# As msgspec says it, and in words.
_EXPECTED = re.compile(r"Expected `(?P<types>.+?)`(?:, got `.+?`)?(?: - at `\$(?P<place>.+)`)?")
_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def problem_of(error: msgspec.ValidationError) -> str:
    """Say of a value of the wrong type what it must be, so that the value itself may follow."""
    found = _EXPECTED.fullmatch(str(error))
    if found is None:
        return str(error).replace("`", "").lower()
    kinds = [_WORDS.get(kind, kind) for kind in found["types"].split(" | ") if kind != "null"]
    return f"{found['place'] or ''} must be {' or '.join(kinds)}".strip()


def one_of(table: Mapping[str, Any]) -> msgspec.Meta:
    """Annotate a setting, `Annotated[str, one_of(TABLE)]`, that names a row of a table, as the table is when asked."""
    return msgspec.Meta(extra={"choices": table})


def choices(kind: Any) -> list[str]:
    """The words that a setting of this type may be; none if it is not one of a few words."""
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, msgspec.Meta) and note.extra is not None and "choices" in note.extra:
            return list(note.extra["choices"])
    return []


def check_choices(config: msgspec.Struct) -> None:
    """Raise ConfigError for a setting that is none of its words."""
    for field in msgspec.structs.fields(config):
        words, value = choices(field.type), getattr(config, field.name)
        if words and value not in words:
            raise ConfigError(f"{field.name} must be one of {', '.join(words)}, got {value!r}")

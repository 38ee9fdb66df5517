"""Patterns of JSON schemas, written so that what must not match them does not.

llguidance 1.9 takes a class of characters that has all control characters for one that has quotes and backslashes too,
once they are escaped in JSON: under `^[^"]+$` it let `"a\\"b"` pass. So NUL is left out of every class: what matches is
what did but for texts with NUL, which nobody writes.
"""

import re
from typing import Any

# What may stand in a class that has all control characters without being negated.
_WIDE = re.compile(r"\\[xuUpPWSD]|[\x00-\x1f\[]")
# A character, or a class without brackets; and one of POSIX, within brackets.
_PIECE = re.compile(r"\\[pPxuU]\{[^}]{0,64}\}|\\x\w{2}|\\u\w{4}|\\U\w{8}|\\[pP]?.|.", re.DOTALL)
_POSIX = re.compile(r"\[:\^?\w{1,16}:\]")
_NUL = re.compile(r"\\(?:x00|u0000|U00000000|[xuU]\{0+\})|\x00")
_WITHOUT_NUL = r"&&[^\x00]"
# Keywords whose value has schemas by name, and those whose value is no schema.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


# Characters of all patterns of a schema, which are read one by one while others wait. Those that people write have a
# thousand at most.
MAX_PATTERN_CHARS = 2**13


def mended(schema: Any) -> Any:
    """A schema with all of its patterns as `without_nul` has them.

    Raises ValueError for one that names NUL outside a class, for two keys that become one, and for too many of them.
    """
    return Mender().mended(schema)


class Mender:
    """Writes schemas anew, with patterns that have so many characters together."""

    def __init__(self) -> None:
        self._left = MAX_PATTERN_CHARS

    def mended(self, schema: Any) -> Any:
        """A schema, or a list of such, with all of its patterns as `without_nul` has them."""
        if isinstance(schema, list):
            return [self.mended(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        return {word: self._value(word, value) for word, value in schema.items()}

    def _value(self, word: str, value: Any) -> Any:
        if word == "pattern" and isinstance(value, str):
            return self._written(value)
        if word in _VALUES:
            return value
        if word in _BY_NAME and isinstance(value, dict):
            spell = self._written if word == "patternProperties" else str
            named = {spell(name): self.mended(each) for name, each in value.items()}
            if len(named) < len(value):
                raise ValueError("has two patternProperties that mean the same")
            return named
        return self.mended(value)

    def _written(self, pattern: str) -> str:
        self._left -= len(pattern)
        if self._left < 0:
            raise ValueError(f"has patterns of more than {MAX_PATTERN_CHARS} characters together")
        return without_nul(pattern)


def without_nul(pattern: str) -> str:
    """A pattern whose classes lack NUL, in the syntax of the Rust library regex-syntax. Raises ValueError."""
    written: list[str] = []
    at = 0
    while at < len(pattern):
        if pattern[at] == "[":
            at = _copy_class(pattern, at, written)
            continue
        piece = _piece(pattern, at)
        if _NUL.fullmatch(piece):
            raise ValueError(f"has the pattern {pattern[:100]!r} with the character NUL, which no answer can have")
        written.append(f"[{piece}{_WITHOUT_NUL}]" if piece[:2] in ("\\p", "\\P") else piece)
        at += len(piece)
    return "".join(written)


def _piece(pattern: str, at: int) -> str:
    found = _PIECE.match(pattern, at)
    return pattern[at] if found is None else found[0]


def _copy_class(pattern: str, at: int, written: list[str]) -> int:
    """Write the class that begins there, and those in it; return where it has ended."""
    begin, depth = at, 0
    while at < len(pattern):
        posix = _POSIX.match(pattern, at) if depth else None
        piece = posix[0] if posix else _piece(pattern, at)
        written.append(piece)
        at += len(piece)
        if piece == "[":
            depth += 1
            if pattern.startswith("^", at):
                written.append(r"^\x00")
                at += 1
            if pattern.startswith("]", at):  # the first one is a character
                written.append(r"\]")
                at += 1
        elif piece == "]":
            depth -= 1
            if not depth:
                break
    if not depth and pattern[begin + 1] != "^" and _WIDE.search(pattern, begin + 1, at):
        written.insert(-1, _WITHOUT_NUL)
    return at

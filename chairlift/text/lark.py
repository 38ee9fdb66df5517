"""Pieces of grammars in llguidance's Lark: markers, free text, schemas."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.runners.sequences import GRAMMAR_PART
from chairlift.text.dialect import GAP, loose
from chairlift.text.relaxed_schemas import LENIENT, Relaxer
from chairlift.text.schema_patterns import mended
from chairlift.text.structured import MAX_GRAMMAR_BYTES

# A space or a line break between a value's parts, and no more of them: models may write them without end.
_JSON_OPTIONS = {"whitespace_pattern": "[ \n]?"}


class Unbounded(ValueError):
    """Reasoning whose tokens can't be counted."""


class LarkRules:
    """The rules of one grammar. `tokens` are the tokens that have names: in a grammar they are not text."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        names = sorted(tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + "|…)") if names else re.compile("(…)")
        self._lines: list[str] = []
        self._size = 0
        self._terminals: dict[str, str] = {}
        self._relaxer = Relaxer()

    def add(self, name: str, body: str) -> str:
        """A new rule, by a name that is made of `name`."""
        made = f"{name}_{len(self._lines)}"
        self.define(made, body)
        return made

    def part(self, owner: str) -> None:
        """Say whose the rules are that are defined from here on."""
        self._lines.append(self.counted(f"{GRAMMAR_PART}{owner}"))

    def json(self, schema: Mapping[str, Any], relaxed: bool = False, **options: Any) -> str:
        """A value of a schema, if it is `relaxed` without what can't be enforced.

        Raises ValueError once there are more of them than a grammar may have.
        """
        if relaxed:
            options |= LENIENT
        kept = self._relaxer.relaxed(schema) if relaxed else mended(schema)
        written = {**kept, "x-guidance": {**_JSON_OPTIONS, **options}}
        return self.counted("%json " + json.dumps(written, ensure_ascii=False))

    def lark(self, start: str) -> str:
        """The grammar that begins with a rule."""
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def token(self, text: str) -> int | None:
        """The id of a text that is one token."""
        return self._tokens.get(text)

    def head(self, marker: str) -> str:
        """What a marker begins with: a token, or the text before one."""
        return next(part for part in self._split.split(marker) if part)

    def pieces(self, marker: str) -> list[str]:
        """A marker as texts and tokens, in a row."""
        found = []
        for part in self._split.split(marker):
            if part == "…":
                found.append(f"/{GAP}/")
            elif part in self._tokens:
                found.append(f"<[{self._tokens[part]}]>")
            elif part:
                found.append(quoted(part))
        return found

    def write(self, *markers: str) -> str:
        """Markers one after the other."""
        return " ".join(self.pieces("".join(markers)))

    def any_of(self, markers: Sequence[str]) -> str:
        """One of some markers, of which some may be nothing."""
        written = [self.write(each) for each in markers]
        some = " | ".join(each for each in written if each)
        return f"({some})" + ("" if all(written) else "?") if some else ""

    def define(self, name: str, body: str) -> None:
        """A rule by its own name, which others may refer to before."""
        self._lines.append(self.counted(f"{name}: {body}"))

    def text(self, without: Sequence[str] = (), unlike: Sequence[str] = (), counted: str = "*") -> str:
        """Any text, of as many letters as `counted` says, that has none of some texts in it, and does not begin as
        some patterns say.

        Tokens are no text in any case. What spells one out is not looked for: masks of free text cost hundreds of
        times as much where anything is barred from it.
        """
        spelled = [pattern_of(each) for each in without if each not in self._tokens]
        barred = [f"(?s:.*)({'|'.join(spelled)})(?s:.*)"] if spelled else []
        barred += [f"({each})(?s:.*)" for each in unlike]
        terminal = " & ".join([f"/(?s:.{counted or '*'})/", *(f"~/{each}/" for each in barred)])
        if terminal not in self._terminals:
            self._terminals[terminal] = f"TEXT_{len(self._lines)}"
            self._lines.append(f"{self._terminals[terminal]}: {terminal}")
        return self._terminals[terminal]

    def up_to(self, marker: str, tokens: int | None = None, counted: str = "*") -> str:
        """Any text up to a marker, and that; of so many tokens at most, and of as many letters as `counted` says.

        Raises Unbounded if tokens are to be counted, and the marker does not begin with one.
        """
        head = self.head(marker)
        if head in self._tokens:
            options = "" if tokens is None else f"max_tokens={tokens}"
            return f"{self._optioned(self.text([head], counted=counted), options)} {self.write(marker)}"
        if tokens is not None:
            raise Unbounded(f"the reasoning can't be bounded: its end, {head!r}, is no token of this model")
        return f"{self.lazy(head, counted)} {self.write(marker[len(head) :])}".rstrip()

    def lazy(self, end: str, counted: str = "*", unlike: Sequence[str] = ()) -> str:
        """Any text up to the first of a text, and that; none that begins as some patterns say."""
        # A line break before the end is not of the text; it may be missing where letters are not counted.
        may = "?" if counted == "*" else ""
        written = f"\\n{may}{pattern_of(end[1:])}" if end.startswith("\n") else pattern_of(end)
        terminal = f"/(?s:.{counted or '*'}){written}/"
        if unlike:
            # The attribute is for one pattern or name.
            name = f"BEFORE_{len(self._lines)}"
            self.define(name, " & ".join([terminal, *(f"~/({each})(?s:.*)/" for each in unlike)]))
            terminal = name
        name = f"lazy_{len(self._lines)}"
        self.define(f"{name}[lazy]", terminal)
        return name

    def counted(self, text: str) -> str:
        """What becomes part of the grammar; refused at once where it is too much, before more is made."""
        self._size += len(text)
        # What is counted before it is a part of a rule counts twice.
        if self._size > 2 * MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"as a grammar, all tools have more than {MAX_GRAMMAR_BYTES} bytes; send fewer, or simpler ones"
            )
        return text

    def _optioned(self, terminal: str, options: str) -> str:
        if not options:
            return terminal
        name = f"counted_{len(self._lines)}"
        self._lines.append(f"{name}[{options}]: {terminal}")
        return name


def quoted(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def pattern_of(text: str) -> str:
    """A text in a grammar's pattern, with any white space where it has some."""
    words = [re.escape(word).replace("/", "\\/") for word in re.split(r"\s+", loose(text))]
    return r"\s*".join(words)

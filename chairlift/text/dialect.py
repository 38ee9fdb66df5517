"""How a family of models writes reasoning and calls: one declaration, of which grammar and reader are both made.

The fields are those of transformers' `response_template`. Markers are texts in which white space stands for any white
space, and is written as it stands, and `…` for any text on one line up to a quote or a bracket. Where they have JSON,
white space is read wherever JSON may have some. Where there are several markers, each is read, and may be written.
"""

import re
from typing import Literal, NamedTuple

import msgspec

# How arguments are written: as JSON; as Python's keyword arguments; as an object with bare keys and strings between
# `quote`s; as a pair of tags for each argument.
Notation = Literal["json", "python", "bare", "tags"]


class Region(msgspec.Struct, frozen=True):
    """A part of a reply between two markers."""

    open: tuple[str, ...]
    close: tuple[str, ...]


class TagForm(msgspec.Struct, frozen=True):
    """An argument as tags: `open`, its name, `named`, its value, `close`. Texts are written as they are, others as
    JSON, or with `words` as Python writes true, false and null."""

    open: str
    named: str
    close: str
    words: bool = False


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written: `begin`, then for each `open`, its name, `named`, its arguments, `close`, and in between
    `separator`, then `end`. Without a separator there is only one.

    `anywhere` says that calls may follow text; others are the whole answer. `quote` is that of the bare notation. What
    is `only_read` is what models write by mistake: no grammar has it, and none keeps it out of free text.
    """

    begin: str = ""
    open: str
    named: str
    close: tuple[str, ...]
    separator: str | None = None
    end: str = ""
    notation: Notation = "json"
    tags: TagForm | None = None
    quote: str = '"'
    anywhere: bool = True
    only_read: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that are not of a name or a value."""
        tags = () if self.tags is None else (self.tags.open, self.tags.named, self.tags.close)
        around = (self.begin, self.open, self.named, *self.close, self.separator or "", self.end)
        return (*around, self.quote, *tags)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """A way of writing replies. What is in no part is the answer's; `content` are markers around it where it has any,
    and `wrapper` those that it may have, or lack.

    `short_ids` says that the template wants ids of calls that have nine letters or digits.
    """

    name: str
    reasoning_content: Region | None = None
    tool_calls: tuple[CallForm, ...] = ()
    content: Region | None = None
    wrapper: Region | None = None
    short_ids: bool = False


NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
GAP = r'[^\n"<>\[\]]{0,64}'
_GAP = re.compile(GAP)
# Where JSON may have white space and markers have none: behind a bracket, and before what follows a text.
_LOOSE = re.compile(r'(?<=[{\[])(?=["{])|(?<=")(?=[:,])')
# More would be read again and again as it comes.
_SPACE = re.compile(r"\s{0,32}")
_PIECES = re.compile(r"\s+|…|[^\s…]+")
# What a name and the text after it are in a marker's pieces; no text has it.
_NAMED = "\0"


class Found(NamedTuple):
    """A marker that is there: where it ends, and the name that it holds."""

    end: int
    name: str


def loose(marker: str) -> str:
    """A marker with white space wherever its JSON may have some."""
    return _LOOSE.sub(" ", marker)


# Whether a marker that is not there may come to be there when the text goes on.
MAYBE = Found(-1, "")


class Marker:
    """Finds one marker, or a call's head, at a place in a text that may go on."""

    def __init__(self, before: str, after: str | None = None) -> None:
        """`after` a name, if there is to be one."""
        text = before if after is None else f"{before}{_NAMED}{after}"
        self._pieces = [piece for part in re.split(f"({_NAMED})", loose(text)) for piece in _PIECES.findall(part)]
        for end in (0, -1):
            while self._pieces and self._pieces[end].isspace():
                self._pieces.pop(end)
        self.first = self._pieces[0][0] if self._pieces else ""

    def at(self, text: str, start: int) -> Found | None:
        """What is found at `start`: None if it is not the marker, MAYBE if that is not certain yet."""
        place, name = start, ""
        for piece in self._pieces:
            if piece == _NAMED:
                found = NAME.match(text, place)
                end = found.end() if found else place
                if end == len(text):
                    return MAYBE
                if found is None:
                    return None
                name, place = found[0], end
            elif piece == "…" or piece.isspace():
                found = (_GAP if piece == "…" else _SPACE).match(text, place)
                place = found.end() if found else place
                if place == len(text):
                    return MAYBE
            elif text.startswith(piece, place):
                place += len(piece)
            else:
                # No more of the text than that: it may be long, and full of first letters.
                return MAYBE if piece.startswith(text[place : place + len(piece)]) else None
        return Found(place, name)

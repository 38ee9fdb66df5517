"""What one rendering of a chat template may use, and what its values cost to look at, to compare and to make."""

from collections.abc import Iterable, Iterator, Sized
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import Undefined
from jinja2.runtime import Macro
from jinja2.utils import Namespace


class Budget(NamedTuple):
    """What one rendering may use: units of work, some 100 to 400 ns each, and characters of all texts that it makes."""

    work: int
    text: int


class OverLimit(Exception):
    """A template does too much, or what can't be limited. The text completes "the chat template ..."."""


# A list counts as so many characters for each of its entries.
ENTRY = 16
# A unit of work is so many characters that are compared or searched.
CHARS_A_UNIT = 256
MAX_BITS = 4096
# Units of work for one thing that is looked at or handed on.
_LOOK = 4
# Texts up to this length are compared for nothing.
_SHORT = 1024
# A unit of work is so many characters of a value that is compared with each entry of a container. They are fewer than
# those of one text, as most values are many small things.
_CHARS_EACH = 64
_MAX_KEY_BITS = 64
_SMALL = frozenset({bool, float, type(None)})
# What is a key as it is, beside numbers.
_SIMPLE = (str, float, type(None), Undefined)
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
# These are searched entry by entry; dicts and their keys by hash.
_SEARCHED: tuple[type[Sized], ...] = (list, tuple, range, type({}.values()), type({}.items()))


class Meter:
    """What is left of a rendering's budget."""

    __slots__ = ("text", "work")

    def __init__(self) -> None:
        self.work = self.text = 0

    def spend(self, work: int, text: int = 0) -> None:
        """Take from the budget. Raises OverLimit."""
        self.work -= work
        self.text -= text
        if self.work < 0:
            raise OverLimit("does too much work for one prompt")
        if self.text < 0:
            raise OverLimit("makes too much text for one prompt")

    def need(self, text: int) -> None:
        """Raise OverLimit if a text of so many characters could not be paid for."""
        if text > self.text:
            raise OverLimit("makes too much text for one prompt")

    def weigh(self, value: Any) -> int:
        """About how many characters a value's text has. Looking through all that is in it is paid for."""
        if isinstance(value, str):
            self.seen(value)
            return len(value)
        total, rest = 0, [value]
        while rest:
            each = rest.pop()
            self.spend(_LOOK)
            if isinstance(each, str):
                self.seen(each)
                total += len(each) + 4
            elif isinstance(each, int):
                total += 8 + each.bit_length() // 3
            elif (held := inside_of(each)) is None:
                total += 32 + (len(each.name or "") if isinstance(each, Macro) else 0)
            else:
                rest.extend(held)
                total += 4
        return total

    def operand(self, value: Any) -> Any:
        """A value that is about to be compared, hashed, or handed to Python."""
        if type(value) is str:
            self.seen(value)
        elif type(value) not in _SMALL:
            self.weigh(value)
        return value

    def seen(self, value: Any) -> Any:
        """A value that is about to be compared, where it costs no more than the other side if it is no text."""
        if isinstance(value, str) and len(value) > _SHORT:
            self.spend(len(value) // CHARS_A_UNIT)
        return value

    def key(self, value: Any) -> Any:
        """A value that is about to be a key. Tuples, and large numbers, can be chosen to have one hash, so that each is
        compared with all others; texts can't."""
        if not isinstance(value, _SIMPLE) and not (isinstance(value, int) and value.bit_length() <= _MAX_KEY_BITS):
            raise OverLimit(f"has keys other than texts and numbers of at most {_MAX_KEY_BITS} bits")
        return self.seen(value)

    def searched(self, container: Any, value: Any) -> Any:
        """A container in which a value is about to be looked for."""
        each = 1 + self.weigh(value) // _CHARS_EACH
        if isinstance(container, str):
            self.seen(container)
        elif isinstance(container, _SEARCHED):
            self.spend(len(container) * each)
        elif not isinstance(container, dict) and isinstance(container, Iterator):
            return self._counted(container, each)
        return container

    def found(self, value: Any, container: Any) -> bool:
        """Whether a container has a value."""
        return value in self.searched(container, value)

    def made(self, value: Any) -> Any:
        """A value that was just made."""
        if isinstance(value, str):
            self.spend(1, len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(1, ENTRY * len(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise OverLimit(f"makes a number of more than {MAX_BITS} bits")
        elif isinstance(value, Iterator):
            return self._counted(value)
        return value

    def written(self, value: Any) -> Any:
        """A value that is about to be text."""
        if type(value) is not str:
            self.spend(1, self.weigh(value))
            return value
        self.work -= 1
        self.text -= len(value)
        if self.work < 0 or self.text < 0:
            self.spend(0)
        return value

    def passed(self, value: Any, work: int) -> Any:
        """The outcome of a loop's condition."""
        self.spend(work)
        return value

    def _counted(self, values: Iterator[Any], work: int = _LOOK) -> Iterator[Any]:
        for value in values:
            self.spend(work)
            yield value


def inside_of(value: Any) -> Iterable[Any] | None:
    """What a container holds; None for what is none."""
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    if isinstance(value, list | tuple | range) or type(value) in VIEWS:
        found: Iterable[Any] = value
        return found
    if isinstance(value, Namespace):
        return tuple(object.__getattribute__(value, "_Namespace__attrs").values())
    return None

"""The order in which a window of lines is sent. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from chairlift.config.run import Order

T = TypeVar("T")

# Where the text begins that models read, in the bodies that have one.
_TEXTS = (b'"messages"', b'"prompt"', b'"input"')


def arrange(window: Sequence[T], order: Order, body: Callable[[T], bytes]) -> list[T]:
    """Put lines in order; `body` gives a line's request body. Each line comes exactly once, equals in file order.

    file: as they came. prefix: lines whose texts begin alike are neighbours, so that the prefix cache finds what the
    one before has computed. length: the longest first, so that a batch that pads pads little.
    """
    if order == "prefix":
        return sorted(window, key=lambda line: _text(body(line)))
    if order == "length":
        return sorted(window, key=lambda line: -len(body(line)))
    return list(window)


def _text(body: bytes) -> bytes:
    """The body from where its text begins, whatever fields stand before it."""
    for mark in _TEXTS:
        if (place := body.find(mark)) >= 0:
            return body[place:]
    return body

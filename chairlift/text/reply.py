"""What a model's text says: an answer, the reasoning before it, calls of tools. A reader takes it apart as it comes."""

from typing import Protocol

import msgspec


class ContentPart(msgspec.Struct, tag="content"):
    """Text of the answer, to be appended to what came before; `start` is its place in all that the model wrote."""

    text: str
    start: int = 0


class ReasoningPart(msgspec.Struct, tag="reasoning"):
    """Text of the reasoning, to be appended to what came before."""

    text: str


class CallPart(msgspec.Struct, tag="call"):
    """A call of a tool begins, the `index`-th of this reply from 0; its arguments follow."""

    index: int
    name: str


class ArgumentsPart(msgspec.Struct, tag="arguments"):
    """More of a call's arguments: JSON text, to be appended to what came before."""

    index: int
    text: str


ReplyPart = ContentPart | ReasoningPart | CallPart | ArgumentsPart


class ReplyReader(Protocol):
    """Takes one reply apart, however its text is cut. What can't be parsed is content: nothing is lost."""

    @property
    def in_call(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        ...

    def push(self, text: str) -> list[ReplyPart]:
        """Take the next piece of text, and return what is sure by now."""
        ...

    def finish(self) -> list[ReplyPart]:
        """The text has ended: return what was held back."""
        ...

"""A query and a document as one prompt, by the chat template of a model that judges such pairs."""

from typing import Any

from chairlift.errors import InvalidRequest, UnsupportedModel
from chairlift.folders.sentence_files import PairMessages
from chairlift.text.chat_template import check_arguments
from chairlift.text.special_tokens import new_name
from chairlift.text.tokenizer import Tokenizer, spans

Pair = tuple[str, str]

_ROLES = ("query", "document")
_NO_SUCH = "a model that judges pairs needs a chat_template.jinja that puts both messages into its prompt, once each"


class PairTemplate:
    """What is around the two texts of every pair. Safe to share between threads: nothing changes after it is made.

    The template is rendered only here: a request's texts take the places of names that nobody can guess.
    `fixed_tokens` are those of what is around the texts.
    """

    def __init__(self, tokenizer: Tokenizer, messages: PairMessages, instruction: str | None) -> None:
        """`instruction` is the system's message. Raises UnsupportedModel for a template that is not for pairs."""
        self._tokenizer = tokenizer
        one, other = names = (new_name(), new_name())
        plain = _rendered(tokenizer, messages, instruction, names)
        if any(plain.count(name) != 1 for name in names):
            raise UnsupportedModel(f"the chat template has no place for the roles query and document: {_NO_SUCH}")
        # Some templates trim what they are given.
        spaced = _rendered(tokenizer, messages, instruction, (f" {one} ", f" {other} "))
        self._trims = spaced == plain
        if not self._trims and spaced != plain.replace(one, f" {one} ").replace(other, f" {other} "):
            raise UnsupportedModel("the chat template changes query or document; only trimming is supported")
        self._order = (0, 1) if plain.index(one) < plain.index(other) else (1, 0)
        before, _, rest = plain.partition(names[self._order[0]])
        between, _, after = rest.partition(names[self._order[1]])
        self._around = before, between, after
        self.fixed_tokens = len(tokenizer.encode(before + between + after, add_special_tokens=False))

    def prompt(self, pair: Pair, marked: bool) -> str:
        """The pair's prompt; `marked`, for the tokenizer in which what looks like a special token is text."""
        return "".join(self._pieces(pair, marked))

    def parts(self, pair: Pair, marked: bool) -> list[int | None]:
        """Of each token of a pair's prompt which text it is of, in whole or in part; None of what is around them."""
        pieces = self._pieces(pair, marked)
        backend = self._tokenizer.lookalikes.backend if marked else self._tokenizer.backend
        ends = [sum(map(len, pieces[: index + 1])) for index in range(len(pieces))]
        places = [(self._order[0], ends[0], ends[1]), (self._order[1], ends[2], ends[3])]
        encoding = backend.encode("".join(pieces), add_special_tokens=False)
        return [
            next((text for text, begin, end in places if stop > begin and start < end), None)
            for start, stop in spans(encoding)
        ]

    def _pieces(self, pair: Pair, marked: bool) -> list[str]:
        around = self._around
        if marked:
            mark = self._tokenizer.lookalikes.mark
            around = mark(around[0]), mark(around[1]), mark(around[2])
        first, second = (pair[place].strip() if self._trims else pair[place] for place in self._order)
        return [around[0], first, around[1], second, around[2]]


def _rendered(tokenizer: Tokenizer, messages: PairMessages, instruction: str | None, pair: Pair) -> str:
    said = [] if instruction is None else [("system", instruction)]
    said += zip(_ROLES, pair, strict=True)
    chat: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if messages.parts else text} for role, text in said
    ]
    arguments = dict(messages.arguments)
    generation = bool(arguments.pop("add_generation_prompt", False))
    try:
        check_arguments(arguments)
        return tokenizer.chat_template.render(chat, generation, arguments, size=0, quick=False)
    except InvalidRequest as error:
        raise UnsupportedModel(f"{error}; {_NO_SUCH}") from None

"""Texts as messages of a chat: what a model's chat template puts around a text, or around a query and a document."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from chairlift.errors import ConfigError, InvalidRequest, UnsupportedModel
from chairlift.folders.sentence_files import ChatFormat, SentenceFiles
from chairlift.text.chat_template import check_arguments
from chairlift.text.special_tokens import new_name
from chairlift.text.tokenizer import Tokenizer, encode_all, spans

TextOrPair = str | tuple[str, str]

# With each of the folder's prompts the chat template is rendered and tokenized.
_MOST_PROMPTS, _MOST_CHARS = 100, 2**17
_SYSTEM = "system"
_TEXT = ("user",)
_PAIR = ("query", "document")
_INSTRUCTED = (_SYSTEM, *_PAIR)
_NEEDED: dict[tuple[str, ...], str] = {
    _TEXT: "texts that are messages need a chat_template.jinja that puts a user's message into its prompt, once",
    _PAIR: "a model that judges pairs needs a chat_template.jinja that puts both messages into its prompt, once each",
    _INSTRUCTED: "an instruction needs a chat_template.jinja that puts what the system says into its prompt, once",
}


class MessageTemplate:
    """What is around the texts of every chat of the same roles. Safe to share between threads: nothing changes after it
    is made.

    `fixed_tokens` are those of what is around the texts, `chars` its characters. Where it `has_special` that is text,
    it needs the tokenizer in which what looks like a special token is.
    """

    def __init__(
        self, tokenizer: Tokenizer, around: Sequence[Sequence[str]], order: Sequence[int], trims: Sequence[bool]
    ) -> None:
        """Texts stand in this `order`, `around` them what is before, between and behind them: each the template's own
        and what is text, in turn. Of some texts the template `trims` the ends."""
        self._tokenizer = tokenizer
        self._around = around
        self._order = order
        self._trims = trims
        self._plain = list(map("".join, around))
        self.chars = sum(map(len, self._plain))
        self.has_special = any(tokenizer.has_special(text) for pieces in around for text in pieces[1::2])
        backend = tokenizer.lookalikes.backend if self.has_special else tokenizer.backend
        (fixed,) = encode_all(backend, ["".join(self._marked() if self.has_special else self._plain)], False)
        self.fixed_tokens = len(fixed)

    @classmethod
    def of_roles(
        cls, tokenizer: Tokenizer, chat: ChatFormat, roles: Sequence[str], system: str | None = None
    ) -> "MessageTemplate":
        """Of chats of these roles, behind what the `system` says. Raises UnsupportedModel if the template is not for
        them.

        The template is rendered only here: texts take the places of names that nobody can guess.
        """
        needed = _NEEDED[tuple(roles)]
        if not tokenizer.chat_template.available:
            raise UnsupportedModel(f"the folder has no chat template: {needed}")
        names = [new_name() for _ in roles]
        plain = _rendered(tokenizer, chat, roles, names, system)
        if len(plain) > _MOST_CHARS:
            problem = f"the chat template puts {len(plain)} characters around a text; up to {_MOST_CHARS} are supported"
            raise UnsupportedModel(problem)
        if any(plain.count(name) != 1 for name in names):
            *first, last = roles
            known = f"roles {', '.join(first)} and {last}" if first else f"role {last}"
            raise UnsupportedModel(f"the chat template has no place for the {known}: {needed}")
        trims = []
        for name in names:
            # Some templates trim what they are given. Others may change its letters, or what is no letter.
            text = f" aB <&> {name} {name} "
            given = [text if each == name else each for each in names]
            spaced = _rendered(tokenizer, chat, roles, given, system)
            trims.append(spaced == plain.replace(name, text.strip()))
            if not trims[-1] and spaced != plain.replace(name, text):
                what = " or ".join(roles)
                raise UnsupportedModel(f"the chat template changes {what}; only trimming is supported")
        order = sorted(range(len(roles)), key=lambda place: plain.index(names[place]))
        around = []
        for place in order:
            before, _, plain = plain.partition(names[place])
            around.append([before])
        return cls(tokenizer, [*around, [plain]], order, trims)

    def with_first(self, text: str) -> "MessageTemplate":
        """The same with this text in the first place of its roles. Raises InvalidRequest if it is no Unicode."""
        at = self._order.index(0)
        text = text.strip() if self._trims[0] else text
        joined = [*self._around[at], text, *self._around[at + 1]]
        around = [*self._around[:at], joined, *self._around[at + 2 :]]
        order = [place - 1 for place in self._order if place > 0]
        return MessageTemplate(self._tokenizer, around, order, self._trims[1:])

    def trimmed(self, *texts: str) -> list[str]:
        """A text, or the two of a pair, as the template puts them into a prompt."""
        return [text.strip() if trims else text for text, trims in zip(texts, self._trims, strict=True)]

    def prompt(self, texts: TextOrPair, marked: bool) -> str:
        """The prompt of trimmed texts; `marked`, for the tokenizer in which what looks like a special token is text."""
        return "".join(self._pieces(texts, marked))

    def parts(self, texts: TextOrPair, marked: bool) -> list[int | None]:
        """Of each token of a prompt which of the texts it is of; None of what is around them, in whole or in part.

        A token that has the end of a text and the beginning of what follows is never cut off: that would be missing.
        """
        backend = self._tokenizer.lookalikes.backend if marked else self._tokenizer.backend
        encoding = backend.encode(self.prompt(texts, marked), add_special_tokens=False)
        places = self.places(texts, marked)
        return [
            next((text for text, (begin, end) in enumerate(places) if begin <= start < stop <= end), None)
            for start, stop in spans(encoding)
        ]

    def places(self, texts: TextOrPair, marked: bool) -> list[tuple[int, int]]:
        """Where in a prompt each text begins and ends, in characters."""
        ends = list(accumulate(map(len, self._pieces(texts, marked))))
        found = {place: (ends[2 * index], ends[2 * index + 1]) for index, place in enumerate(self._order)}
        return [found[place] for place in range(len(found))]

    def _pieces(self, texts: TextOrPair, marked: bool) -> list[str]:
        given = (texts,) if isinstance(texts, str) else texts
        before, *behind = self._marked() if marked else self._plain
        pieces = [before]
        for place, after in zip(self._order, behind, strict=True):
            pieces += [given[place], after]
        return pieces

    def _marked(self) -> list[str]:
        mark = self._tokenizer.lookalikes.mark
        return ["".join(text if at % 2 else mark(text) for at, text in enumerate(each)) for each in self._around]


class MessageTemplates:
    """The chats of a model's texts and pairs. Safe to share between threads: nothing changes after it is made."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, files: SentenceFiles, max_tokens: int) -> None:
        """Raises UnsupportedModel for a template that is neither for texts nor, where the model judges them, for pairs,
        and ConfigError for one that leaves no room for texts."""
        self._tokenizer, self._chat, self._max_tokens = tokenizer, chat, max_tokens
        prompts = files.prompts or {}
        if len(prompts) > _MOST_PROMPTS:
            problem = f"{len(prompts)} prompts are too many for texts that are messages"
            raise UnsupportedModel(f"{problem}; up to {_MOST_PROMPTS} are supported")
        default = None if files.default_prompt is None else prompts[files.default_prompt]
        self._texts: dict[str | None, MessageTemplate | UnsupportedModel | ConfigError] = {None: self._made(_TEXT)}
        self._texts |= {name: self._made(_TEXT, said) for name, said in prompts.items()}
        self._pair = self._made(_PAIR, default) if files.judges else None
        self._instructed = self._made(_INSTRUCTED) if files.judges else None
        text = self._texts[files.default_prompt]
        # Who judges pairs may judge single texts alone.
        if isinstance(text, Exception) and not isinstance(self._pair, MessageTemplate):
            raise self._pair or text

    def of_text(self, prompt_name: str | None) -> MessageTemplate:
        """That of a text with a prompt of the folder's. Raises InvalidRequest if the chat template is not for such."""
        found = self._texts[prompt_name]
        if not isinstance(found, MessageTemplate):
            advice = "; send pairs of texts" if isinstance(self._pair, MessageTemplate) else ""
            raise InvalidRequest(f"{found}{advice}")
        return found

    def of_pair(self) -> MessageTemplate | None:
        """That of a query and a document; None if the model judges none. Raises InvalidRequest as `of_text`."""
        if isinstance(self._pair, Exception):
            raise InvalidRequest(f"{self._pair}; send single texts")
        return self._pair

    def instructed(self, instruction: str) -> MessageTemplate:
        """That of a pair, with an instruction in the place of the folder's. Raises InvalidRequest."""
        if not isinstance(self._instructed, MessageTemplate):
            reason = self._instructed or "this model does not judge pairs"
            raise InvalidRequest(f"{reason}; leave instruction out", "instruction")
        found = self._instructed.with_first(instruction)
        if found.fixed_tokens >= self._max_tokens:
            problem = f"instruction, with the chat template, has {found.fixed_tokens} tokens"
            raise InvalidRequest(f"{problem}, but the model takes {self._max_tokens}; shorten it", "instruction")
        return found

    @property
    def takes_texts(self) -> bool:
        """Whether the chat template is for texts without a prompt too."""
        return isinstance(self._texts[None], MessageTemplate)

    @property
    def most_chars(self) -> int:
        """The most characters that the folder has put around a text, or a pair."""
        made = [*self._texts.values(), self._pair]
        return max(each.chars for each in made if isinstance(each, MessageTemplate))

    def _made(
        self, roles: Sequence[str], system: str | None = None
    ) -> MessageTemplate | UnsupportedModel | ConfigError:
        """The template of chats of these roles, or why there is none."""
        try:
            # As sentence-transformers has it, an empty prompt is none.
            made = MessageTemplate.of_roles(self._tokenizer, self._chat, roles, system or None)
        except UnsupportedModel as error:
            return error
        if made.fixed_tokens >= self._max_tokens:
            problem = f"the chat template puts {made.fixed_tokens} tokens around each input"
            return ConfigError(f"{problem}, which leaves no room for texts in {self._max_tokens}; raise max_model_len")
        return made


def _rendered(
    tokenizer: Tokenizer, chat: ChatFormat, roles: Sequence[str], texts: Sequence[str], system: str | None
) -> str:
    said = [] if system is None else [(_SYSTEM, system)]
    said += zip(roles, texts, strict=True)
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if chat.parts else text} for role, text in said
    ]
    arguments = dict(chat.arguments)
    generation = bool(arguments.pop("add_generation_prompt", False))
    try:
        check_arguments(arguments)
        return tokenizer.chat_template.render(messages, generation, arguments, size=0, quick=False)
    except InvalidRequest as error:
        raise UnsupportedModel(f"{error}; {_NEEDED[tuple(roles)]}") from None

"""Texts that hold what looks like a special token: how they stay text.

Beside a tokenizer there is a second one, equal but that its special tokens have other names, which nobody can guess.
What a text says then is text, and what is meant to be a special token gets such a name before the text is encoded.
"""

import json
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

# Private use characters: no normalizer, trimming or change of case touches them.
_LETTERS = "".join(map(chr, range(0xE000, 0xF800)))
_NAME_LETTERS = 12
# A pattern's groups are nested so deeply at most; Python's own limit is not far beyond.
_MAX_DEPTH = 16
# These models may find a special token's name in a text by themselves, if it is in their vocabulary.
_FINDS_NAMES = (models.Unigram, models.WordLevel)


class Lookalikes:
    """The second tokenizer, and the names that it has for special tokens. Nothing changes after it is made."""

    def __init__(self, backend: tokenizers.Tokenizer, special: Sequence[str]) -> None:
        """`special` are the special tokens as texts, longer ones first."""
        self._own = {text: new_name() for text in special}
        # Stand-ins begin alike, so that all of them are found in one pass, however many there are.
        start, digits = new_name(), len(str(len(special)))
        self._hidden = {text: f"{start}{place:0{digits}}" for place, text in enumerate(special)}
        # Also as JSON in ASCII has them.
        self._shown = {stand_in: text for text, stand_in in self._hidden.items()}
        self._shown |= {_in_json(stand_in): _in_json(text) for text, stand_in in self._hidden.items()}
        self._stand_in = re.compile(rf"(?:{start}|{re.escape(_in_json(start))})[0-9]{{{digits}}}")
        self._pattern = re.compile(any_of(special) or "(?!)")
        self.backend = tokenizers.Tokenizer(_without(backend.model, self._own))
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (found := getattr(backend, part)) is not None:
                setattr(self.backend, part, found)
        added = backend.get_added_tokens_decoder()
        self._add(added)
        self._ids: dict[int, int] = {}
        for token_id, token in added.items():
            made = self.backend.token_to_id(self._own.get(token.content, token.content))
            if made is not None and made != token_id:
                self._ids[made] = token_id

    def ids(self, encoding: tokenizers.Encoding) -> list[int]:
        """An encoding's token ids, as the first tokenizer has them."""
        ids: list[int] = encoding.ids
        return [self._ids.get(each, each) for each in ids] if self._ids else ids

    def hide(self, data: Any) -> Any:
        """A copy of plain data in which no text has a special token: stand-ins are in their places."""
        if isinstance(data, str):
            return self._replaced(data, self._hidden)
        if isinstance(data, list | tuple):
            return [self.hide(each) for each in data]
        if isinstance(data, dict):
            return {self.hide(key): self.hide(value) for key, value in data.items()}
        return data

    def show(self, text: str) -> str:
        """A text with the special tokens back in the places of their stand-ins."""
        return self._stand_in.sub(lambda found: self._shown.get(found[0], found[0]), text)

    def mark(self, text: str) -> str:
        """A text whose special tokens, other than those that are hidden, have the names by which they are found."""
        return self._replaced(text, self._own)

    def _replaced(self, text: str, names: Mapping[str, str]) -> str:
        return self._pattern.sub(lambda found: names[found[0]], text) if text else text

    def _add(self, added: Mapping[int, AddedToken]) -> None:
        """Add all tokens, each under its own id, but for those of the model: their new names come after all ids."""
        known = {token_id for token_id, token in added.items() if self._model_has(token)}
        next_id = self.backend.get_vocab_size()
        tokens = []
        for token_id in sorted(added.keys() - known):
            tokens += [AddedToken(new_name()) for _ in range(next_id, token_id)]
            tokens.append(self._renamed(added[token_id]))
            next_id = max(next_id, token_id) + 1
        self.backend.add_tokens([*tokens, *(self._renamed(added[token_id]) for token_id in sorted(known))])

    def _model_has(self, token: AddedToken) -> bool:
        found = self.backend.model.token_to_id
        return found(token.content) is not None or found(self._own.get(token.content, token.content)) is not None

    def _renamed(self, token: AddedToken) -> AddedToken:
        name, normalizer = self._own.get(token.content), self.backend.normalizer
        if name is None:
            return token
        # Whether it is looked for before or after normalizing changes what is around it.
        survives = normalizer is None or name in normalizer.normalize_str(name)
        return AddedToken(
            name,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and survives,
            special=True,
        )


def new_name() -> str:
    """A name that is in no text, since nobody can guess it."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_NAME_LETTERS))


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def any_of(texts: Sequence[str], depth: int = 0) -> str:
    """A pattern for the longest of some texts that begins at a place, and tries no two that begin alike."""
    longer = [text for text in texts if text]
    if depth == _MAX_DEPTH:
        choices = list(map(re.escape, sorted(longer, key=len, reverse=True)))
    else:
        alike = defaultdict(list)
        for text in longer:
            alike[text[0]].append(text)
        choices = []
        for group in alike.values():
            start = os.path.commonprefix(group)  # noqa: RUF071 - letter by letter is what is meant
            choices.append(re.escape(start) + any_of([text[len(start) :] for text in group], depth + 1))
    if not choices:
        return ""
    return f"(?:{'|'.join(choices)})" + ("" if len(longer) == len(texts) else "?")


def _without(model: Any, names: dict[str, str]) -> Any:
    """The model, or one like it whose vocabulary has those names instead."""
    if not isinstance(model, _FINDS_NAMES) or all(model.token_to_id(text) is None for text in names):
        return model
    state = json.loads(model.__getstate__())
    vocabulary = state["vocab"]
    if isinstance(vocabulary, dict):
        state["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
        state["unk_token"] = names.get(state["unk_token"], state["unk_token"])
    else:
        state["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    made = type(model)()
    made.__setstate__(json.dumps(state).encode())
    return made

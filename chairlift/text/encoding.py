"""Texts and pairs of texts as token ids with special tokens, for encoders. Without torch."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec
import tokenizers

from chairlift.errors import InputTooLong, InvalidRequest
from chairlift.runners.items import Encoding
from chairlift.text.tokenizer import Tokenizer, encode_all

Side = Literal["left", "right"]
# Tokens that are told one by one in an answer.
MAX_TOKENS_TOLD = 2**17
# Characters that are encoded at once, after which what else comes waits.
_SLICE_CHARS = 2**20


class Cut(NamedTuple):
    """How to cut what is too long: to `length` tokens if the model takes more than that, taking from `side`.

    The second of a pair may have at most `second` tokens by itself, special ones not counted.
    """

    length: int | None = None
    side: Side = "right"
    second: int | None = None


class TextToken(msgspec.Struct):
    """A token and where it is in its text, in characters; one that was put around the text is nowhere in it."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TextEncoder:
    """Encodes for one model. Safe to share between threads: nothing changes after loading.

    Special tokens and type ids are what the post-processor in tokenizer.json says; what looks like one in a text is
    text. A text (or pair) of more than
    `max_tokens`, special ones counted, is cut, or refused, as the caller asks.
    """

    def __init__(self, folder: str | os.PathLike[str], max_tokens: int, *, lowercase: bool = False) -> None:
        """Read the folder's tokenizer. `lowercase` changes texts before it sees them. Raises UnsupportedModel."""
        self.max_tokens = max_tokens
        self._lowercase = lowercase
        self._tokenizer = Tokenizer.from_folder(folder)
        self._backend, self._lengths = self._tokenizer.backend, self._tokenizer.lengths

    def encode_texts(self, texts: Sequence[str], *, truncate: bool | Cut = False) -> list[Encoding]:
        """Encode texts. Raises InputTooLong if one is and `truncate` is off, InvalidRequest if it is no Unicode."""
        given = [text.lower() for text in texts] if self._lowercase else list(texts)
        return self._encode(given, truncate)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, truncate: bool | Cut = False) -> list[Encoding]:
        """Encode pairs such as query and document, cutting the longer part first. Raises as `encode_texts`."""
        given = [(one.lower(), other.lower()) for one, other in pairs] if self._lowercase else list(pairs)
        return self._encode(given, truncate)

    def tokens(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[TextToken]]:
        """Take texts apart. Raises InvalidRequest if one is no Unicode, or all have more than MAX_TOKENS_TOLD."""
        given = [text.lower() for text in texts] if self._lowercase else list(texts)
        backend, ids_of = self._backend_for(given)
        try:
            # The fast call does not say where tokens are.
            encodings = backend.encode_batch(given, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("a text is not valid Unicode (it holds a lone surrogate?)", "inputs") from error
        number = sum(map(len, encodings))
        if number > MAX_TOKENS_TOLD:
            raise InvalidRequest(f"the texts have {number} tokens, more than {MAX_TOKENS_TOLD}", "inputs")
        return [self._told(*each, ids_of) for each in zip(texts, encodings, strict=True)]

    def _told(
        self, text: str, encoding: tokenizers.Encoding, ids_of: Callable[[tokenizers.Encoding], list[int]]
    ) -> list[TextToken]:
        found = zip(ids_of(encoding), encoding.special_tokens_mask, encoding.offsets, strict=True)
        return [
            TextToken(token_id, self._tokenizer.token_text(token_id), True, None, None)
            if added
            else TextToken(token_id, text[start:stop], False, start, stop)
            for token_id, added, (start, stop) in found
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises InvalidRequest for one that there is not."""
        if any(not 0 <= each < self._tokenizer.vocab_size for each in ids):
            raise InvalidRequest(f"token ids must be from 0 to {self._tokenizer.vocab_size - 1}", "ids")
        return self._tokenizer.decode(ids, skip_special_tokens)

    def _backend_for(
        self, given: Sequence[str | tuple[str, str]]
    ) -> tuple[tokenizers.Tokenizer, Callable[[tokenizers.Encoding], list[int]]]:
        """The tokenizer for texts, in which what looks like a special token is text, and what has its tokens' ids."""
        if any(map(self._tokenizer.has_special, chain.from_iterable(map(_parts, given)))):
            return self._tokenizer.lookalikes.backend, self._tokenizer.lookalikes.ids
        return self._backend, attrgetter("ids")

    def _encode(self, given: Sequence[str | tuple[str, str]], truncate: bool | Cut) -> list[Encoding]:
        cut = truncate if isinstance(truncate, Cut) else Cut()
        limit = self.max_tokens if cut.length is None else min(cut.length, self.max_tokens)
        # Above this many tokens it takes a closer look: a second part may be too long in an input that is not.
        harmless = limit if cut.second is None else min(limit, cut.second)
        if truncate is False:
            self._refuse_long(given)
        try:
            if truncate is not False and cut.side == "right":
                given = [self._head(text, limit, cut) for text in given]
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("a text is not valid Unicode (it holds a lone surrogate?)", "input") from error
        backend, ids_of = self._backend_for(given)
        found = []
        encodings = chain.from_iterable(encode_all(backend, some) for some in _slices(given))
        for index, encoding in enumerate(encodings):
            if len(encoding) > harmless and truncate is False:
                message = f"an input has {len(encoding)} tokens, but the model takes {self.max_tokens}"
                raise InputTooLong(message, "input", index)
            ids, types = ids_of(encoding), encoding.type_ids
            if len(encoding) > harmless:
                kept = _kept(encoding.sequence_ids, limit, cut)
                ids, types = list(compress(ids, kept)), list(compress(types, kept))
            found.append(Encoding(ids, types if any(types) else None))
        return found

    def _refuse_long(self, given: Sequence[str | tuple[str, str]]) -> None:
        """Raise InputTooLong for what is too long whatever its tokens are."""
        for index, text in enumerate(given):
            parts = _parts(text)
            # A character has at most four bytes, and a token at least one: short texts need no look.
            if 4 * sum(map(len, parts)) <= self.max_tokens:
                continue
            least = sum(map(self._lengths.least_tokens, parts))
            if least > self.max_tokens:
                message = f"an input has at least {least} tokens, but the model takes {self.max_tokens}"
                raise InputTooLong(message, "input", index)

    def _head(self, text: str | tuple[str, str], limit: int, cut: Cut) -> str | tuple[str, str]:
        """As much of a text or pair as matters where `limit` tokens are kept; what follows need not be tokenized."""
        lengths = self._lengths
        if isinstance(text, str):
            return lengths.head(text, limit)
        most = limit if cut.second is None else min(cut.second, limit)
        heads = lengths.head(text[0], limit), lengths.head(text[1], most)
        # Of two long parts the longer one may lose a token more, so it must be known which one that is.
        if heads == text or most < limit or min(map(lengths.count, heads)) < limit:
            return heads
        return text


def _slices(given: Sequence[str | tuple[str, str]]) -> Iterator[Sequence[str | tuple[str, str]]]:
    """So many at a time that what the library makes of them, some hundred bytes a character, is no more than that."""
    begin = size = 0
    for index, text in enumerate(given):
        size += sum(map(len, _parts(text)))
        if size > _SLICE_CHARS:
            yield given[begin : index + 1]
            begin, size = index + 1, 0
    if begin < len(given):
        yield given[begin:]


def _parts(text: str | tuple[str, str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _kept(parts: Sequence[int | None], limit: int, cut: Cut) -> list[bool]:
    """Which tokens of a text or pair that is too long are kept: `parts` has each one's part, None for special tokens.

    An encoding that the library cuts has all that is cut off too, and a pair of them each with each.
    """
    first, second = parts.count(0), parts.count(1)
    room = max(limit - (len(parts) - first - second), 0)
    if second == 0:
        most = [room, 0]
    else:
        second = second if cut.second is None else min(second, cut.second)
        # As transformers' longest_first: the shorter part stays whole as long as it is under half.
        short = min(first, second, room // 2)
        most = [short, room - short] if first <= second else [room - short, short]
        most[1] = min(most[1], second)
    skipped = [max(parts.count(part) - most[part], 0) if cut.side == "left" else 0 for part in (0, 1)]
    kept, seen = [], [0, 0]
    for part in parts:
        if part is None:
            kept.append(True)
        else:
            kept.append(0 <= seen[part] - skipped[part] < most[part])
            seen[part] += 1
    return kept

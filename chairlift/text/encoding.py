"""Texts and pairs of texts as an encoder wants them: token ids with special tokens in place, cut if asked for."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import tokenizers

from chairlift.runners.oneshot import Encoding
from chairlift.text.tokenizer import Tokenizer

Side = Literal["left", "right"]


class Cut(NamedTuple):
    """How to shorten what is too long: to `length` tokens, special tokens included, taking from `side`.

    Of a pair the longer text gives first. The second of a pair may have at most `second` tokens by itself.
    """

    length: int
    side: Side = "right"
    second: int | None = None


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], cut: Cut | None = None) -> list[Encoding]:
    """An encoding for each text."""
    whole = tokenizer.encode_batch(texts)
    if cut is None:
        return [Encoding(ids) for ids in whole]
    return [
        Encoding(ids if len(ids) <= cut.length else _shorten(tokenizer, (text,), cut).ids)
        for ids, text in zip(whole, texts, strict=True)
    ]


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], cut: Cut | None = None) -> list[Encoding]:
    """An encoding for each pair, the second text marked by its type ids."""
    whole = tokenizer.encode_pairs(pairs)
    if cut is not None:
        bound = cut.length if cut.second is None else min(cut.length, cut.second)
        whole = [
            encoded if len(encoded.ids) <= bound else _shorten(tokenizer, pair, cut)
            for encoded, pair in zip(whole, pairs, strict=True)
        ]
    return [Encoding(list(encoded.ids), list(encoded.type_ids) if any(encoded.type_ids) else None) for encoded in whole]


def _shorten(tokenizer: Tokenizer, texts: Sequence[str], cut: Cut) -> tokenizers.Encoding:
    """Cut before special tokens are added, so that those all stay. The library's own setting is shared state."""
    parts = tokenizer.encode_parts(texts)
    room = cut.length - tokenizer.num_special_tokens(len(texts))
    lengths = _lengths([len(part.ids) for part in parts], max(room, 0), cut.second)
    for part, length in zip(parts, lengths, strict=True):
        part.truncate(length, direction=cut.side)
    return tokenizer.join_parts(parts)


def _lengths(given: list[int], room: int, second_limit: int | None) -> list[int]:
    """What each part keeps. As transformers' longest_first: the shorter one stays whole as long as it is under half."""
    if len(given) == 1:
        return [min(given[0], room)]
    first, second = given
    if second_limit is not None:
        second = min(second, second_limit)
    if first <= second:
        first = min(first, room // 2) if first + second > room else first
        return [first, min(second, room - first)]
    second = min(second, room // 2) if first + second > room else second
    return [min(first, room - second), second]

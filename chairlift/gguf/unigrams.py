"""Tokenizers of XLM-R's kind (SentencePiece's unigrams), made from a GGUF file's metadata."""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown
from chairlift.gguf.tokenizer_files import list_of

_UNUSED = 5
_SPACE = {"replacement": "\u2581", "prepend_scheme": "always", "split": True}
# What no vocabulary comes near: characters of a token and of all together, and bytes of the table of characters.
_LONGEST, _MOST_CHARS, _MOST_BYTES = 256, 2**23, 2**20
_CHARSMAP, _PREFIX = "precompiled_charsmap", "add_space_prefix"
# Places of the table, whose double array has blocks of as many, that are looked at together, and how many times.
# What is replaced has few bytes, each a step; a table that is one long way would be looked at a place at a time.
_BLOCK, _AT_A_TIME, _MOST_TIMES = 256, 4096, 512


def unigrams(
    told: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], unknown: int, name: str
) -> dict[str, Any]:
    """What cuts texts into the tokens whose scores are the highest together. Raises UnsupportedModel naming the key.

    White space counts but as what is between two words, as XLM-R's own tokenizers have it: what files say of that
    (`remove_extra_whitespaces`) converters take from something else where they have no model of SentencePiece.
    """
    scores = list_of(told, "scores", float, name)
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise UnsupportedModel(f"tokenizer.ggml.scores of {name} are not as many as its tokens, or not all numbers")
    if told.get(_PREFIX, True) is not True:
        raise UnsupportedModel(f"tokenizer.ggml.{_PREFIX} = {shown(told[_PREFIX])} of {name} is not read; true is")
    if max(map(len, tokens)) > _LONGEST or sum(map(len, tokens)) > _MOST_CHARS:
        raise UnsupportedModel(
            f"tokenizer.ggml.tokens of {name} has one of more than {_LONGEST} characters, or {_MOST_CHARS} in all"
        )
    # Those behind the last that is used only fill the table of embeddings: their scores, far below all others, would
    # be what one that is unknown is measured by.
    last = max(number for number, kind in enumerate(kinds) if kind != _UNUSED or number == unknown)
    charsmap = _charsmap(told, name)
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap} if charsmap else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Metaspace"} | _SPACE],
        },
        "decoder": {"type": "Metaspace"} | _SPACE,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [list(each) for each in zip(tokens[: last + 1], scores, strict=False)],
            "byte_fallback": False,
        },
    }


def _charsmap(told: Mapping[str, Any], name: str) -> str | None:
    """What replaces characters by others, as tokenizer.json has it."""
    if told.get(_CHARSMAP) is None:
        return None
    numbers = list_of(told, _CHARSMAP, int, name)
    if len(numbers) > _MOST_BYTES or not all(-128 <= number < 256 for number in numbers):
        raise UnsupportedModel(f"tokenizer.ggml.{_CHARSMAP} of {name} is no list of up to {_MOST_BYTES} bytes")
    data = bytes(number % 256 for number in numbers)
    if not _is_whole(data):
        raise UnsupportedModel(f"tokenizer.ggml.{_CHARSMAP} of {name} is no whole table of characters")
    return base64.b64encode(data).decode()


def _is_whole(data: bytes) -> bool:
    """Whether all that is looked up lies within a table: the library believes that it does.

    The table is a double array, behind its size in bytes, and then what it leads to: texts, each up to a zero byte.
    """
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    if not size or size % (4 * _BLOCK) or 4 + size > len(data):
        return False
    units = np.frombuffer(data, "<u4", size // 4, 4)
    offsets = (units >> 10).astype(np.int64) << ((units & 512) >> 6).astype(np.int64)
    is_seen = np.zeros(len(units), bool)
    # Places whose children are looked for.
    ahead = offsets[:1]
    for _ in range(_MOST_TIMES):
        if not len(ahead):
            return True
        if (ahead >= len(units)).any():
            return False
        some, ahead = ahead[:_AT_A_TIME], ahead[_AT_A_TIME:]
        letters = np.arange(1, _BLOCK)
        children = some[:, None] ^ letters
        children = children[(units[children] & 0x800000FF) == letters]
        children = np.unique(children[~is_seen[children]])
        is_seen[children] = True
        below = children ^ offsets[children]
        if (below >= len(units)).any():
            return False
        ends = (units[below[(units[children] & 256) != 0]] & 0x7FFFFFFF).tolist()
        # The middle of a character is no beginning of a text.
        if any(end > len(texts) or (texts[end : end + 1] and texts[end] & 0xC0 == 0x80) for end in ends):
            return False
        ahead = np.concatenate((ahead, below))
    return False

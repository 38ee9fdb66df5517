"""BERT's tokenizers (WordPiece), made from a GGUF file's metadata."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown
from chairlift.gguf.tokenizer_files import CONTROL, NORMAL

_BEGINS, _CONTINUES = "\u2581", "##"
_LOWER, _STRIP = "normalizer.lowercase", "normalizer.strip_accents"


def plain_pieces(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """The tokens as a vocabulary of BERT's has them: files mark those that begin words, and not those that go on.

    In older files those in brackets are unmarked, too, which no word has, since such signs are cut off.
    """
    return [
        token
        if kind == CONTROL or (token[:1] == "[" and token[-1:] == "]" and len(token) > 1)
        else token[1:]
        if token.startswith(_BEGINS)
        else _CONTINUES + token
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def word_pieces(told: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], unknown: int) -> dict[str, Any]:
    """What cuts texts into words as BERT does, and words into their longest tokens. Raises UnsupportedModel."""
    lowers = _flag(told, _LOWER)
    words = [token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL and token[:1] != "["]
    if lowers is None:
        # Older files don't say, and llama.cpp does it to all. But a vocabulary with capitals has them for texts that
        # keep theirs.
        lowers = not any(word != word.lower() for word in words)
    strips = _flag(told, _STRIP)
    if strips is None and lowers:
        # The same of accents: where texts lose them no word has any.
        strips = not any(map(_has_accent, words))
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": bool(strips),
            "lowercase": lowers,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": _CONTINUES,
            "max_input_chars_per_word": 100,
            "vocab": {token: number for number, token in enumerate(tokens)},
        },
    }


def _flag(told: Mapping[str, Any], key: str) -> bool | None:
    value = told.get(key)
    if value is not None and type(value) is not bool:
        raise UnsupportedModel(f"tokenizer.ggml.{key} must be true or false in a GGUF file, got {shown(value)}")
    return value


def _has_accent(word: str) -> bool:
    return any(unicodedata.category(char) == "Mn" for char in unicodedata.normalize("NFD", word))

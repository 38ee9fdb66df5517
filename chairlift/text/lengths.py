"""What can be said of a text's tokens before it is tokenized: how many there are at least, and where it can be cut."""

import re
from typing import Any

import tokenizers
from tokenizers import models

from chairlift.text.detokenize import byte_of_letter, steps_of

# Between these letters every tokenizer that `_can_be_cut` accepts begins a new piece, whatever is on either side.
_BOUNDARY = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
# Heads of this many characters for each token wanted, and four times as many if those do not do.
_CHARS_PER_TOKEN = 8
_GROWTH = 4
# A character's canonical decomposition has at most three times its bytes, and at least a third of them.
_CANONICAL_SHRINKAGE = 9
_CANONICAL = {"NFC", "NFD"}
# Normalizers that look at a character, or a character with its accents, at a time, or at the text's two ends.
_LOCAL_NORMALIZERS = {
    *("BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"),
    *("Prepend", "Strip"),
}
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
# The patterns of Qwen and of Llama 3; that of GPT-2 is ByteLevel's own.
_PATTERNS = {_WORDS + _TAIL, _WORDS + "{1,3}" + _TAIL}


class TextLengths:
    """Bounds for one tokenizer. Nothing changes after it is made, so threads may share it.

    `max_token_bytes` is how many UTF-8 bytes of a text one token stands for at most; None if there is no such number,
    as where a token can stand for any unknown word, or where spaces are dropped.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        normalizers = steps_of(backend.normalizer, "normalizers")
        splits = steps_of(backend.pre_tokenizer, "pretokenizers")
        self.max_token_bytes = _max_token_bytes(backend, splits) if _keeps_all(normalizers, splits) else None
        self.can_be_cut = _can_be_cut(backend, normalizers, splits)
        self._canonical = any(step["type"] in _CANONICAL for step in normalizers)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least; 0 if nothing is known."""
        if self.max_token_bytes is None:
            return 0
        if text.isascii():
            return -(-len(text) // self.max_token_bytes)
        size = len(text.encode("utf-8", "surrogatepass"))
        return -(-size // (self.max_token_bytes * (_CANONICAL_SHRINKAGE if self._canonical else 1)))

    def count(self, text: str) -> int:
        """How many tokens a text has, special ones not counted. Raises UnicodeError or TypeError for broken texts."""
        return len(self._backend.encode_batch_fast([text], add_special_tokens=False)[0])

    def head(self, text: str, num_tokens: int) -> str:
        """The beginning of a text, whose tokens are the text's first ones, and at least `num_tokens`; or all of it.

        Much of a long text is never tokenized. Raises as `count`.
        """
        size = max(num_tokens, 1) * _CHARS_PER_TOKEN
        if not self.can_be_cut or 2 * size > len(text):
            return text
        text.encode()  # what is cut off must be Unicode as well
        while 2 * size <= len(text):
            boundary = _BOUNDARY.search(text, size)
            if boundary is None:
                break
            head = text[: boundary.start()]
            if self.count(head) >= num_tokens:
                return head
            size = max(size * _GROWTH, boundary.start())
        return text


def _keeps_all(normalizers: list[dict[str, Any]], splits: list[dict[str, Any]]) -> bool:
    """Whether every byte of a text is in one of the pieces that the model gets, or turned into another few."""
    for step in normalizers:
        spaces = step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁"
        if not (spaces or step["type"] == "Prepend" or step["type"] in _CANONICAL):
            return False
    known = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"}
    return all(step["type"] in known and step.get("behavior") != "Removed" for step in splits)


def _max_token_bytes(backend: tokenizers.Tokenizer, splits: list[dict[str, Any]]) -> int | None:
    """The bytes of the longest token, if bytes stand in for whatever is not in the vocabulary."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    longest = max((len(token.content.encode()) for token in added), default=1)
    if any(step["type"] == "ByteLevel" for step in splits):
        if not byte_of_letter().keys() <= vocabulary.keys():
            return None
        return max(longest, max(map(len, vocabulary)))
    if not model.byte_fallback or not {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary.keys():
        return None
    return max(longest, max(len(token.encode()) for token in vocabulary))


def _can_be_cut(backend: tokenizers.Tokenizer, normalizers: list[dict[str, Any]], splits: list[dict[str, Any]]) -> bool:
    """Whether what comes after a boundary can't change the tokens before it."""
    if isinstance(backend.model, models.BPE) and backend.model.dropout:
        return False
    if any(re.search(r"[\s▁]", token.content) for token in backend.get_added_tokens_decoder().values()):
        return False
    return all(map(_is_local, normalizers)) and _splits_at_boundaries(splits)


def _is_local(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer leaves boundaries as they are, and works on what is before and after one by itself."""
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _LOCAL_NORMALIZERS
    pattern = normalizer["pattern"]
    if pattern == {"Regex": " {2,}"}:
        return True
    return "String" in pattern and not re.search("[ A-Za-z]", pattern["String"])


def _splits_at_boundaries(splits: list[dict[str, Any]]) -> bool:
    found = False
    for step in splits:
        kind = step["type"]
        if kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit") or (kind == "Metaspace" and step["split"]):
            found = True
        elif kind == "Split" and step["pattern"].get("Regex") in _PATTERNS:
            if step["behavior"] != "Isolated" or step["invert"]:
                return False
            found = True
        elif kind == "ByteLevel":
            if not (step["use_regex"] or found):
                return False
            found = True
        elif kind not in ("Digits", "Punctuation"):
            return False
    return found

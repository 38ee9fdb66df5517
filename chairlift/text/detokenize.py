"""Tokens to bytes, and to text one at a time, never half a character."""

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import tokenizers

# Enough neighbours for any decoder that looks around; a longer tail would only cost time.
_PRIMING_TOKENS = 6
# A UTF-8 character has at most four bytes: five tokens that still give U+FFFD will not become a character.
_MAX_HELD_TOKENS = 5
_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Token ids to bytes, for byte-level BPE and for SentencePiece with byte fallback.

    `plain` says that decoding is joining those bytes (then dropping `strip_left` leading spaces). All other tokenizers
    (WordPiece, Metaspace, ...) decode by their neighbours; for them `bytes_of` is the token decoded alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.size = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        steps = steps_of(backend.decoder, "decoders")
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self.strip_left = _sentencepiece_strip(steps)
        self.plain = self._byte_level or self.strip_left is not None
        self._known: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, special tokens as they are written; nothing for an id outside the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id)
        return found

    def text_of(self, token_id: int) -> str | None:
        """The token's bytes as text; None if they begin or end within a character, or are no UTF-8 at all."""
        try:
            return self._whole[token_id]
        except KeyError:
            return self._whole.setdefault(token_id, _decoded(self.bytes_of(token_id)))

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decode by the tokenizer itself."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            letters = byte_of_letter()
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
            return token.encode()
        if self.plain:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
        return self.decode([token_id], False).encode()


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


class Detokenizer(Protocol):
    """Pieces of text whose concatenation is the decoded text."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain, often none or a little more than the token's."""

    def finish(self) -> str:
        """No more tokens: return what was held back, broken characters as U+FFFD."""


def make_detokenizer(
    vocabulary: Vocabulary,
    skip_special_tokens: bool = True,
    prompt_ids: Sequence[int] = (),
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """A detokenizer for one sequence, the fastest that is exact for the tokenizer.

    With `prompt_ids`, the text is what follows the prompt's text, so the space that some tokenizers drop from the
    start of a text stays in. Without, the text is that of the generated tokens alone. Special tokens among `shown`
    are not skipped.
    """
    skipped = vocabulary.special - shown if skip_special_tokens else frozenset()
    if vocabulary.plain:
        return ByteDetokenizer(vocabulary, skipped, at_start=not prompt_ids)
    return WindowDetokenizer(vocabulary, skipped, prompt_ids)


class ByteDetokenizer:
    """For tokenizers whose text is their tokens' bytes in a row; a look-up per token, and UTF-8 where one is no text.

    Broken UTF-8 differs from the `tokenizers` library in one way: after a run of `<0xNN>` tokens that is not UTF-8 as a
    whole the library replaces every byte of the run, and here only the broken ones, since the rest was sent long ago.
    """

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], at_start: bool) -> None:
        self._bytes_of, self._text_of = vocabulary.bytes_of, vocabulary.text_of
        self._skip = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._within = False
        self._strip = (vocabulary.strip_left or 0) if at_start else 0

    def push(self, token_id: int) -> str:
        """Take the next token; return the characters that it completes."""
        if token_id in self._skip:
            return ""
        text = None if self._within else self._text_of(token_id)
        if text is None:
            text = self._decoder.decode(self._bytes_of(token_id))
            self._within = bool(self._decoder.getstate()[0])
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        """Return a broken last character, if there is one."""
        return self._decoder.decode(b"", True)

    def _stripped(self, text: str) -> str:
        """Drop leading spaces of the whole text, which may come in several pieces."""
        kept = text
        while self._strip and kept.startswith(" "):
            kept = kept[1:]
            self._strip -= 1
        if kept:
            self._strip = 0
        return kept


class WindowDetokenizer:
    """For every other tokenizer: decode the last few tokens with and without the new one, and take the difference.

    The window starts where text was last released and is cut as soon as text is released again, so a token costs the
    same however long the sequence is.
    """

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._skip = skipped
        self._window = list(prompt_ids[-_PRIMING_TOKENS:])
        self._done = len(self._window)
        self._done_text = self._text(self._window)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._text(self._window)
        if text.endswith(_BROKEN) and len(self._window) - self._done < _MAX_HELD_TOKENS:
            return ""
        return self._release(text)

    def finish(self) -> str:
        """Return what was held back."""
        return self._release(self._text(self._window))

    def _release(self, text: str) -> str:
        new = text[len(self._done_text) :]
        # Tokens without any text may come without end, and must not pile up.
        if new or len(self._window) - self._done >= _MAX_HELD_TOKENS:
            # Keep the tokens just released as the neighbours of those to come.
            self._window = self._window[self._done :]
            self._done = len(self._window)
            self._done_text = self._text(self._window)
        return new

    def _text(self, ids: list[int]) -> str:
        return self._vocabulary.decode([each for each in ids if each not in self._skip], False)


def steps_of(component: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's decoder, normalizer or pre-tokenizer; `name` is what a sequence calls its parts."""
    return [] if component is None else _flat(json.loads(component.__getstate__()), name)


def _flat(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [step for part in state[name] for step in _flat(part, name)] if state["type"] == "Sequence" else [state]


def _sentencepiece_strip(steps: list[dict[str, Any]]) -> int | None:
    """How many leading spaces a SentencePiece-style decoder drops; None if the decoder is not of that style."""
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
        return None
    if len(steps) == 3:
        return 0
    strip = steps[3]
    if len(steps) == 4 and strip["type"] == "Strip" and strip["content"] == " " and strip["stop"] == 0:
        return int(strip["start"])
    return None


@cache
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

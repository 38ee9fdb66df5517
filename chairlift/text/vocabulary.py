"""What bytes each token stands for, for the tokenizers whose text is simply the bytes of its tokens in a row."""

import json
import re
from functools import cache
from typing import Any

import tokenizers

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
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self.strip_left = _sentencepiece_strip(steps)
        self.plain = self._byte_level or self.strip_left is not None
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, special tokens as they are written; nothing for an id outside the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id)
        return found

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decode by the tokenizer itself."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            letters = _byte_of_letter()
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
            return token.encode()
        if self.plain:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
        return self.decode([token_id], False).encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


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
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

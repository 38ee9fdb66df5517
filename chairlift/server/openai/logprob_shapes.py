"""Log-probabilities in the two shapes that the OpenAI API has for them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from chairlift.core.sequences.request import TokenLogprob
from chairlift.text.tokenizer import Tokenizer


class LegacyLogprobs(msgspec.Struct):
    """The shape of completions: four lists of equal length. A prompt's first token has no logprob."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, tokenizer: Tokenizer, entry: TokenLogprob, offset: int) -> None:
        """Append a token, with the likeliest alternatives and itself."""
        name = token_name(tokenizer, entry.token_id)
        top = {token_name(tokenizer, token_id): logprob for token_id, logprob in entry.top}
        self._append(name, entry.logprob, {**top, name: entry.logprob}, offset)

    def add_first(self, name: str) -> None:
        """Append the prompt's first token, which nothing precedes."""
        self._append(name, None, None, 0)

    def _append(self, name: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self.tokens.append(name)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as completions name it; part of a character is written as `bytes:\\xe2\\x82`, so no two look alike."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The shape of chat completions."""
    content = [
        _named(tokenizer, entry.token_id, entry.logprob)
        | {"top_logprobs": [_named(tokenizer, token_id, logprob) for token_id, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(raw)}

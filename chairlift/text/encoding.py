"""Texts and pairs of texts as token ids with special tokens, for encoders. Without torch."""

import os
from collections.abc import Sequence

import tokenizers

from chairlift.errors import InvalidRequest
from chairlift.runners.oneshot import Encoding
from chairlift.text.tokenizer import Tokenizer


class TextEncoder:
    """Encodes for one model. Safe to share between threads: nothing changes after loading.

    Special tokens and type ids are what the post-processor in tokenizer.json says. A text (or pair) of more than
    `max_tokens`, special ones counted, is cut, or refused, as the caller asks.
    """

    def __init__(self, folder: str | os.PathLike[str], max_tokens: int, *, lowercase: bool = False) -> None:
        """Read the folder's tokenizer. `lowercase` changes texts before it sees them. Raises UnsupportedModel."""
        self.max_tokens = max_tokens
        self._lowercase = lowercase
        self._backend = Tokenizer.from_folder(folder).backend

    def encode_texts(self, texts: Sequence[str], *, truncate: bool = False) -> list[Encoding]:
        """Encode texts. Raises InvalidRequest if one is too long and `truncate` is off, or is no valid Unicode."""
        given = [text.lower() for text in texts] if self._lowercase else list(texts)
        return self._encode(given, truncate)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, truncate: bool = False) -> list[Encoding]:
        """Encode pairs such as query and document, cutting the longer part first. Raises as `encode_texts`."""
        given = [(one.lower(), other.lower()) for one, other in pairs] if self._lowercase else list(pairs)
        return self._encode(given, truncate)

    def _encode(self, given: Sequence[str | tuple[str, str]], truncate: bool) -> list[Encoding]:
        try:
            # The fast batch call skips character offsets, which nobody here reads.
            encoded = self._backend.encode_batch_fast(list(given))
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("a text is not valid Unicode (it holds a lone surrogate?)", "input") from error
        found = []
        for text, encoding in zip(given, encoded, strict=True):
            if len(encoding) > self.max_tokens:
                if not truncate:
                    raise InvalidRequest(
                        f"an input has {len(encoding)} tokens, but the model takes {self.max_tokens}", "input"
                    )
                encoding = self._cut(text)
            types = encoding.type_ids
            found.append(Encoding(encoding.ids, types if any(types) else None))
        return found

    def _cut(self, text: str | tuple[str, str]) -> tokenizers.Encoding:
        """Encode a text or pair that is too long: cut before the special tokens are put around it."""
        texts = [text] if isinstance(text, str) else list(text)
        parts = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        room = max(self.max_tokens - self._backend.num_special_tokens_to_add(len(parts) == 2), 0)
        if len(parts) == 1:
            parts[0].truncate(room)
            return self._backend.post_process(parts[0])
        # As transformers' longest_first: the shorter part stays whole as long as it is under half.
        short = min(len(parts[0]), len(parts[1]), room // 2)
        first = len(parts[0]) <= len(parts[1])
        parts[0].truncate(short if first else room - short)
        parts[1].truncate(room - short if first else short)
        return self._backend.post_process(parts[0], parts[1])

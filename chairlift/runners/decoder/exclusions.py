"""Tokens that a request excludes: all but some of them, and those that would complete a word."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sequences.request import Request
from chairlift.ops.base import Ints
from chairlift.ops.contract import Ops

_BITS = 32


class Exclusions:
    """What one sequence's next token must not be, after the tokens that it has generated."""

    def __init__(self, request: Request, output_ids: Sequence[int], vocab_size: int) -> None:
        allowed = request.params.allowed_token_ids
        self._allowed = _bits(allowed, vocab_size) if allowed else None
        self._words = [list(word) for word in request.bad_word_ids if word]
        # As many of the last tokens as the longest word needs.
        self._most = max((len(word) for word in self._words), default=1) - 1
        self._tail: list[int] = []
        for token in output_ids[-self._most :] if self._most else ():
            self.add(token)

    def add(self, token: int) -> None:
        """Take in a generated token."""
        if self._most:
            self._tail = [*self._tail, token][-self._most :]

    def apply(self, logits: Tensor, ops: Ops) -> None:
        """Make what is excluded -inf in the sequence's logits [1, V]."""
        if self._allowed is not None:
            ops.exclude(logits, [self._allowed])
        # With these a word would be complete.
        last = [word[-1] for word in self._words if len(word) == 1 or self._tail[1 - len(word) :] == word[:-1]]
        if last:
            logits[0, torch.tensor(last, device=logits.device)] = -torch.inf


def _bits(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """As `Allowed` has them."""
    ids: Ints = np.asarray(token_ids, np.int64)
    words = np.zeros(-(-vocab_size // _BITS), np.uint32)
    np.bitwise_or.at(words, ids // _BITS, np.uint32(1) << (ids % _BITS).astype(np.uint32))
    return torch.from_numpy(words.view(np.int32))

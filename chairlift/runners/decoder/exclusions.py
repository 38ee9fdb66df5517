"""Tokens that a request excludes: all but some of them, and those that would complete a word."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sequences.request import Request
from chairlift.ops.base import Ints
from chairlift.ops.contract import Ops

_BITS = 32


class _BadWords:
    """The words of one sequence, each as token ids, and as many of its last tokens as the longest needs."""

    def __init__(self, words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> None:
        self._words = [list(word) for word in words if word]
        self._most = max((len(word) for word in self._words), default=1) - 1
        self._tail: list[int] = []
        for token in output_ids[-self._most :] if self._most else ():
            self.push(token)

    def push(self, token: int) -> None:
        """Take in a generated token."""
        if self._most:
            self._tail = [*self._tail, token][-self._most :]

    def next(self) -> list[int]:
        """The tokens with which a word would be complete."""
        return [word[-1] for word in self._words if len(word) == 1 or self._tail[1 - len(word) :] == word[:-1]]


class Exclusions:
    """What is excluded of each row's next token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # As `Ops.exclude` has them.
        self._allowed: dict[int, Tensor] = {}
        self._bad: dict[int, _BadWords] = {}

    @property
    def rows(self) -> set[int]:
        """The rows of which something is excluded."""
        return self._allowed.keys() | self._bad.keys()

    def __bool__(self) -> bool:
        return bool(self._allowed or self._bad)

    def add(self, row: int, request: Request, output_ids: Sequence[int]) -> None:
        """Take what a request excludes into a row, after the tokens that it has generated."""
        allowed = request.params.allowed_token_ids
        if allowed:
            self._allowed[row] = _bits(allowed, self._vocab_size)
        if request.bad_word_ids:
            self._bad[row] = _BadWords(request.bad_word_ids, output_ids)

    def remove(self, row: int) -> None:
        """Forget what a row excludes."""
        self._allowed.pop(row, None)
        self._bad.pop(row, None)

    def push(self, row: int, token_ids: Iterable[int]) -> None:
        """Take in tokens that a row has generated."""
        if row in self._bad:
            for token in token_ids:
                self._bad[row].push(token)

    def apply(self, logits: Tensor, index: int, row: int, ops: Ops) -> None:
        """Make what a row excludes -inf in its logits, logits[index] of [R, V]."""
        if row in self._allowed:
            ops.exclude(logits[index : index + 1], self._allowed[row].to(logits.device))
        if row in self._bad and (found := self._bad[row].next()):
            logits[index, torch.tensor(found, device=logits.device)] = -torch.inf


def _bits(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """[1, ceil(vocab_size / 32)] int32: a bit for each token."""
    ids: Ints = np.asarray(token_ids, np.int64)
    words = np.zeros(-(-vocab_size // _BITS), np.uint32)
    np.bitwise_or.at(words, ids // _BITS, np.uint32(1) << (ids % _BITS).astype(np.uint32))
    return torch.from_numpy(words.view(np.int32)[None])

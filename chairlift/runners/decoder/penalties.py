"""How often each token occurred, kept sparse and up to date, and the penalties that follow from it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sequences.sampling_params import SamplingParams

_MOST = float(np.finfo(np.float32).max)


class TokenCounts:
    """The distinct tokens of one sequence, and how often each of them was generated.

    Sparse, because a sequence has hundreds of distinct tokens and a vocabulary a hundred thousand.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams) -> None:
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        distinct = np.unique(np.asarray(prompt_ids, np.int64))
        self._size = len(distinct)
        self._index = {token: index for index, token in enumerate(distinct.tolist())}
        self._ids = np.concatenate((distinct, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._ids), np.float32)
        for token in output_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one generated token."""
        index = self._index.setdefault(token, self._size)
        if index == self._size:
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[index] = token
            self._size += 1
        self._counts[index] += 1

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The distinct tokens of prompt and output."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """How often each of `ids` was generated; 0 for those that only the prompt has."""
        return self._counts[: self._size]


def apply_penalties(logits: Tensor, rows: Sequence[int], sequences: Sequence[TokenCounts]) -> None:
    """Change logits [R, V] float32 in place for the given rows.

    The repetition penalty (Keskar et al., 2019) divides positive logits and multiplies negative ones, for tokens of
    prompt and output; presence and frequency (OpenAI's definition) subtract, for tokens of the output alone.
    """
    sizes = [len(sequence.ids) for sequence in sequences]

    def spread(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), sizes)).to(logits.device)

    row = torch.from_numpy(np.repeat(np.asarray(rows, np.int64), sizes)).to(logits.device)
    ids = torch.from_numpy(np.concatenate([sequence.ids for sequence in sequences])).to(logits.device)
    counts = torch.from_numpy(np.concatenate([sequence.counts for sequence in sequences])).to(logits.device)
    repetition = spread([sequence.repetition for sequence in sequences])
    values = logits[row, ids]
    # A tiny penalty makes finite logits as large as they can be, and leaves those be that are no numbers.
    raised = (values / repetition).clamp(max=_MOST)
    values = torch.where((values > 0) & values.isfinite(), raised, values * repetition)
    values -= spread([sequence.frequency for sequence in sequences]) * counts
    values -= spread([sequence.presence for sequence in sequences]) * (counts > 0)
    logits[row, ids] = values

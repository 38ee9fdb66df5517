"""Log-probabilities of the unmodified distribution, as the API returns them."""

from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sequences.step import TokenLogprob


class Logprobs:
    """Describes R tokens under their logits. `tensors` are on the device of the logits until they are brought over."""

    def __init__(self, logits: Tensor, token_ids: Tensor, top: list[int]) -> None:
        """token_ids [R] under logits [R, V]; top [R] says how many alternatives each row lists."""
        self._top = top
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        value = logprobs.gather(1, token_ids[:, None])
        rank = (logprobs > value).sum(-1) + 1
        best = logprobs.topk(min(max(top), logits.shape[1]))
        self.tensors: tuple[Tensor, ...] = (token_ids, value[:, 0], rank, best.indices, best.values)

    def read(self, arrays: Iterator[NDArray[Any]]) -> list[TokenLogprob]:
        """Take what `tensors` are on the host, the next of `arrays`, and return each row's description."""
        columns = [next(arrays).tolist() for _ in self.tensors]
        return [
            TokenLogprob(token, logprob, rank, list(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, rank, ids, values, count in zip(*columns, self._top, strict=True)
        ]

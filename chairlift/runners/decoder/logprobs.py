"""Log-probabilities of the unmodified distribution, as the API returns them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sequences.request import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: NDArray[np.int64], top: list[int]) -> list[TokenLogprob]:
    """Describe token_ids [R] under logits [R, V]; top [R] says how many alternatives each row lists."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.from_numpy(token_ids).to(logits.device)[:, None]
    value = logprobs.gather(1, chosen)
    rank = (logprobs > value).sum(-1) + 1
    best = logprobs.topk(min(max(top), logits.shape[1]))
    rows = zip(
        token_ids.tolist(),
        value[:, 0].tolist(),
        rank.tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        top,
        strict=True,
    )
    return [
        TokenLogprob(token, logprob, place, list(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, place, ids, values, count in rows
    ]

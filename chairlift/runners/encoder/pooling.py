"""Hidden states of texts to one vector each, as sentence-transformers does it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.ops.encoder import EncoderForward, Output, Texts

# What the forward pass gives by itself.
_DIRECT: dict[str, Output] = {"mean": "mean", "cls": "first", "lasttoken": "last"}


def pool(forward: EncoderForward, texts: Texts, poolings: Sequence[str]) -> Tensor:
    """Run the forward pass and return [S, H * len(poolings)] float32, the poolings side by side."""
    if len(poolings) == 1 and poolings[0] in _DIRECT:
        return forward(texts, _DIRECT[poolings[0]])
    hidden = forward(texts, "tokens")
    starts = torch.from_numpy(texts.starts).to(hidden.device).long()
    lengths = starts.diff()
    owner = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)
    return torch.cat([_pooled(hidden, starts, lengths, owner, pooling) for pooling in poolings], dim=1)


def _pooled(hidden: Tensor, starts: Tensor, lengths: Tensor, owner: Tensor, pooling: str) -> Tensor:
    if pooling in ("cls", "lasttoken"):
        return hidden[starts[:-1] if pooling == "cls" else starts[1:] - 1]
    vectors = hidden.new_zeros(len(lengths), hidden.shape[1])
    if pooling == "max":
        index = owner.unsqueeze(1).expand_as(hidden)
        return vectors.scatter_reduce_(0, index, hidden, "amax", include_self=False)
    counts = lengths.unsqueeze(1).float()
    if pooling == "weightedmean":
        # A token's weight is its place, from 1 on.
        places = torch.arange(1, len(hidden) + 1, device=hidden.device) - starts[:-1][owner]
        hidden, counts = hidden * places.unsqueeze(1), counts * (counts + 1) / 2
    sums = vectors.index_add_(0, owner, hidden)
    return sums / (counts.sqrt() if pooling == "mean_sqrt_len_tokens" else counts)

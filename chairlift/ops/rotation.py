"""RotaryTable of queries and keys by their positions."""

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """How a layer's queries and keys are turned at each position.

    `cos_sin` [positions, D] float32: cosines of D / 2 frequencies, then sines. `query_factors` [positions] float32: by
    what queries are multiplied, too, where there are any.
    """

    cos_sin: Tensor
    query_factors: Tensor | None = None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves-style rotation of x [T, H, D] by cos and sin [T, 1, D / 2], rounded once to x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

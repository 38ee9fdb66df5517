"""Rotation of queries and keys by their positions."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves-style rotation of x [T, H, D] by cos and sin [T, 1, D / 2], rounded once to x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

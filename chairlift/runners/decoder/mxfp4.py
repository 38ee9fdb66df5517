"""Weights in MXFP4: 4-bit floats in blocks of 32 with a power of two each (OCP Microscaling Formats 1.0)."""

import torch
from torch import Tensor

# Numbers that lie under one scale, two of them in a byte, the first in its lower half.
BLOCK = 32
# Of a sign, two bits of exponent and one of fraction.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of blocks [..., N, 16] uint8 under scales [..., N] uint8: [..., 32 * N]."""
    values = torch.tensor(_VALUES, dtype=torch.float32, device=blocks.device)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(pairs, scales.int().unsqueeze(-1) - _EXPONENT_BIAS).flatten(-2).to(dtype)

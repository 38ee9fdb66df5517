"""What layers of LFM2 have in the place of attention: a convolution over the last few tokens, between two gates."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Convolve = Callable[[Tensor], Tensor]


@dataclass(slots=True, frozen=True)
class ShortConvolution:
    """Each of H channels by itself: weight [H, K], the newest input's last; bias [H] or None.

    The product before it gives [T, 3 * H]: a gate of what it sees, one of what it gives, and what it sees. Its state is
    what it has seen last, [rows, H, K].
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def states(self, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Names, shapes and types of what is kept of a sequence, of a model of this type."""
        return [("conv/0", tuple(self.weight.shape), dtype)]

    def run(self, gated: Tensor, convolve: Convolve) -> Tensor:
        """gated [T, 3 * H] -> [T, H]; `convolve` is the convolution [T, H] -> [T, H] over the step's sequences."""
        before, behind, x = gated.chunk(3, dim=1)
        return convolve(before * x).mul_(behind)

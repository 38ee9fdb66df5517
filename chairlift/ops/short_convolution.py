"""What layers of LFM2 have in the place of attention: a convolution over the last few tokens, between two gates."""

from dataclasses import dataclass

from torch import Tensor


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

"""What layers of Granite 4 have in the place of attention: Mamba 2, with a convolution before it and gates behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.ops.short_convolution import Convolve

# x, b and c, and the steps -> outputs, as `Recurrence.mamba2` has them.
Scan = Callable[[tuple[Tensor, Tensor, Tensor], Tensor], Tensor]


@dataclass(slots=True, frozen=True)
class MambaMixer:
    """Mamba 2 (Dao and Gu, 2024) of N heads of P numbers, whose memory has S numbers for each, in G groups.

    taps [C, K] and bias [C] or None: a convolution over x, b and c, with SiLU behind it, C = N * P + 2 * G * S.
    decay [N] float32: by what a step is multiplied to be the logarithm of the decay; step_bias [N] float32: what is
    added to steps, which lie between `least_step` and `most_step`; skip [N] float32: how much of x is added. norm
    [N * P] float32: of what comes out, once it is gated, each group by itself. The product before it gives
    [T, N * P + C + N]: gates, what the convolution sees, and for each head the step. Its states are what the
    convolution has seen last, [rows, C, K], and the memory [rows, N, P, S] float32.
    """

    taps: Tensor
    bias: Tensor | None
    decay: Tensor
    step_bias: Tensor
    skip: Tensor
    norm: Tensor
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    least_step: float
    most_step: float

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        parts = self.taps, self.bias, self.decay, self.step_bias, self.skip, self.norm
        return sum(each.nbytes for each in parts if each is not None)

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> list[int]:
        """Of what the product before it gives: gates, the convolution's channels, steps."""
        return [self.inner, len(self.taps), self.heads]

    def states(self, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Names, shapes and types of what is kept of a sequence, of a model of this type."""
        memory = self.heads, self.head_dim, self.state_dim
        return [("conv/0", tuple(self.taps.shape), dtype), ("recurrent/0", memory, torch.float32)]

    def run(self, parts: Sequence[Tensor], convolve: Convolve, scan: Scan, eps: float) -> Tensor:
        """[T, ...] of each of the `widths` -> [T, N * P]; `convolve` and `scan` go over the step's sequences."""
        gate, mixed, step = parts
        count, width = len(mixed), self.groups * self.state_dim
        x, b, c = torch.split(convolve(mixed), [self.inner, width, width], dim=1)
        xbc = x.view(count, self.heads, -1), b.view(count, self.groups, -1), c.view(count, self.groups, -1)
        steps = functional.softplus(step + self.step_bias.to(step.dtype)).clamp(self.least_step, self.most_step)
        gated = scan(xbc, steps).view(count, -1) * functional.silu(gate.float())
        grouped = gated.view(count, self.groups, -1)
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
        return (normed.view(count, -1) * self.norm).to(mixed.dtype)

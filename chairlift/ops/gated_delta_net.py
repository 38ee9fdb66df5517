"""What layers of Qwen 3.5 have in the place of attention: a memory that is corrected token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.ops.short_convolution import Convolve

# Queries, keys and values, the logarithm of the decay, and beta -> outputs, as `Recurrence.gated_delta` has them.
Delta = Callable[[tuple[Tensor, Tensor, Tensor], Tensor, Tensor], Tensor]


@dataclass(slots=True, frozen=True)
class GatedDeltaNet:
    """The gated delta rule (Yang et al., 2024), of Hk heads of keys of Dk numbers, and Hv of values of Dv.

    taps [C, K]: a convolution over queries, keys and values, with SiLU behind it, C = 2 * Hk * Dk + Hv * Dv. decay [Hv]
    float32: by what a step is multiplied to be the logarithm of the decay; step_bias [Hv] float32: what is added to it
    before. norm [Dv]: of each head's output. The product before it gives [T, C + Hv * Dv + 2 * Hv]: what the
    convolution sees, gates, and for each head beta and the step. Its states are what the convolution has seen last,
    [rows, C, K], and the memory [rows, Hv, Dk, Dv] float32.
    """

    taps: Tensor
    decay: Tensor
    step_bias: Tensor
    norm: Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(each.nbytes for each in (self.taps, self.decay, self.step_bias, self.norm))

    @property
    def widths(self) -> list[int]:
        """Of what the product before it gives: the convolution's channels, gates, betas, steps."""
        return [len(self.taps), self.value_heads * self.value_dim, self.value_heads, self.value_heads]

    def states(self, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Names, shapes and types of what is kept of a sequence, of a model of this type."""
        memory = self.value_heads, self.key_dim, self.value_dim
        return [("conv/0", tuple(self.taps.shape), dtype), ("recurrent/0", memory, torch.float32)]

    def run(
        self, parts: Sequence[Tensor], convolve: Convolve, delta: Delta, normalize: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """[T, ...] of each of the `widths` -> [T, Hv * Dv]; `convolve` and `delta` go over the step's sequences.

        `normalize` is an RMS norm of rows by weights.
        """
        mixed, gate, beta, step = parts
        count, keys = len(mixed), self.key_heads * self.key_dim
        query, key, value = torch.split(convolve(mixed), [keys, keys, self.value_heads * self.value_dim], dim=1)
        qkv = (
            query.view(count, -1, self.key_dim),
            key.view(count, -1, self.key_dim),
            value.view(count, -1, self.value_dim),
        )
        decay = functional.softplus(step.float().add_(self.step_bias)).mul_(self.decay)
        given = delta(qkv, decay, beta.sigmoid())
        normed = normalize(given.view(-1, self.value_dim), self.norm).view(count, -1)
        return functional.silu(gate.float()).mul_(normed).to(mixed.dtype)

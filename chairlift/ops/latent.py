"""Latent attention as attention with one wide head of keys: what is in the cache is what keys and values are made of.

A head's score q . (U c) is (U^T q) . c, where c is a token's latent and U makes the head's keys of it; and the sum of
values W c is W times the sum of latents (DeepSeek-AI, 2024, arXiv:2405.04434). So queries are taken to the latent, and
what attention gives is taken from there. Behind the latent the head has the part of keys that is rotated. It lies in
both halves of the head alike, as halves are what is rotated together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.ops.base import Linear

# The files have no other: config.json's is that of the layers' own norms.
EPS = 1e-6


@dataclass(slots=True, frozen=True)
class LatentShape:
    """Heads Hq, a latent of R numbers, and P plain, N rotated and V values' dimensions of a head. D is R + N."""

    num_heads: int
    rank: int
    plain: int
    rotated: int
    value: int

    def spread(self, rotated: Tensor, latent: Tensor) -> Tensor:
        """[..., N] and [..., R] -> [..., D]: half of each, then the others."""
        turned, kept = rotated.chunk(2, -1), latent.chunk(2, -1)
        return torch.cat((turned[0], kept[0], turned[1], kept[1]), dim=-1)

    def latent_of(self, head: Tensor) -> Tensor:
        """[..., D] -> [..., R]: without what is rotated."""
        return torch.cat([half[..., self.rotated // 2 :] for half in head.chunk(2, -1)], dim=-1)


@dataclass(slots=True, frozen=True)
class LatentProjection:
    """x [T, H] -> queries, one head of keys and one of values side by side [T, (Hq + 2) * D]. Implements `Linear`.

    `first` gives what queries are made of, the latent and what is rotated of the keys; `query` makes queries
    [Hq * (P + N)] of the former once it is normalized, unless it is these already. `key_up` of each head takes P
    dimensions to R.
    """

    shape: LatentShape
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    first: Linear
    query_norm: Tensor | None
    query: Linear | None
    norm: Tensor
    key_up: Sequence[Linear]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        parts = (self.first, self.query, self.query_norm, self.norm, *self.key_up)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """One product after the other."""
        shape = self.shape
        made = self.first(x)
        widths = [made.shape[1] - shape.rank - shape.rotated, shape.rank, shape.rotated]
        queries, latent, rotated = torch.split(made, widths, dim=1)
        if self.query is not None and self.query_norm is not None:
            queries = self.query(self.rms_norm(queries.contiguous(), self.query_norm, EPS))
        heads = queries.view(len(x), shape.num_heads, shape.plain + shape.rotated)
        taken = [up(heads[:, index, : shape.plain].contiguous()) for index, up in enumerate(self.key_up)]
        wide = shape.spread(heads[..., shape.plain :], torch.stack(taken, dim=1))
        latent = self.rms_norm(latent.contiguous(), self.norm, EPS)
        keys, values = shape.spread(rotated, latent), shape.spread(torch.zeros_like(rotated), latent)
        return torch.cat((wide.flatten(1), keys, values), dim=1)


@dataclass(slots=True, frozen=True)
class LatentOutput:
    """What attention gives [T, Hq * D] -> [T, H]. Implements `Linear`. `value_up` of each head takes R numbers to V."""

    shape: LatentShape
    value_up: Sequence[Linear]
    out: Linear

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.out.nbytes + sum(up.nbytes for up in self.value_up)

    def __call__(self, x: Tensor) -> Tensor:
        """One product after the other."""
        latent = self.shape.latent_of(x.view(len(x), self.shape.num_heads, -1))
        values = [up(latent[:, index].contiguous()) for index, up in enumerate(self.value_up)]
        return self.out(torch.cat(values, dim=1))

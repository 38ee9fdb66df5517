"""Reads the weights of latent attention, those of keys and values taken apart by heads."""

from collections.abc import Callable

import torch
from torch import Tensor

from chairlift.folders.latent_config import LatentConfig
from chairlift.ops.base import Linear
from chairlift.ops.contract import Ops
from chairlift.ops.latent import LatentOutput, LatentProjection, LatentShape
from chairlift.runners.weights import Weights


class LatentReader:
    """Reads one layer's, whose tensors' names begin with `prefix`. Raises UnsupportedModel as `Weights.take`.

    `norm` reads a norm's weights [width] of a name, and `out` is the projection of all heads' values.
    """

    def __init__(
        self, latent: LatentConfig, num_heads: int, ops: Ops, weights: Weights, norm: Callable[[str, int], Tensor]
    ) -> None:
        self._latent, self._ops, self._weights, self._norm = latent, ops, weights, norm
        self._shape = LatentShape(num_heads, latent.rank, latent.plain, latent.rotated, latent.value)

    def read(self, prefix: str, hidden: int, has_bias: bool, out: Linear) -> tuple[LatentProjection, LatentOutput]:
        """Both sides of attention; the first projections may have biases."""
        latent, ops = self._latent, self._ops
        key_up, value_up = self._up(f"{prefix}kv_b_proj.weight")
        query_norm = None if latent.query_rank is None else self._norm(f"{prefix}q_a_layernorm", latent.query_rank)
        projection = LatentProjection(
            shape=self._shape,
            rms_norm=ops.rms_norm,
            first=self._first(prefix, hidden, has_bias),
            query_norm=query_norm,
            query=None if latent.query_rank is None else self._query(prefix, latent.query_rank),
            norm=self._norm(f"{prefix}kv_a_layernorm", latent.rank),
            key_up=key_up,
        )
        return projection, LatentOutput(self._shape, value_up, out)

    def _first(self, prefix: str, hidden: int, has_bias: bool) -> Linear:
        latent, take = self._latent, self._weights.take
        compressed = latent.query_rank is not None
        name = f"{prefix}q_a_proj" if compressed else f"{prefix}q_proj"
        width = latent.query_rank or self._num_queries()
        names, outs = [name, f"{prefix}kv_a_proj_with_mqa"], [width, latent.width]
        weight = take([f"{each}.weight" for each in names], [(out, hidden) for out in outs])
        bias = None
        if has_bias:
            # Queries that are made of the hidden state itself have none.
            some = slice(0 if compressed else 1, 2)
            bias = torch.zeros(sum(outs), dtype=weight.dtype, device=weight.device)
            biased = take([f"{each}.bias" for each in names[some]], [(out,) for out in outs[some]])
            bias[-len(biased) :] = biased
        for part in (weight, bias):
            if part is not None:
                self._put_halves(part[-latent.rotated :])
                if not compressed:
                    self._put_query_halves(part[:width])
        return self._ops.linear(weight, bias)

    def _query(self, prefix: str, width: int) -> Linear:
        weight = self._weights.take([f"{prefix}q_b_proj.weight"], [(self._num_queries(), width)])
        self._put_query_halves(weight)
        return self._ops.linear(weight, None)

    def _up(self, name: str) -> tuple[list[Linear], list[Linear]]:
        latent, heads = self._latent, self._shape.num_heads
        both = self._weights.take([name], [(heads * (latent.plain + latent.value), latent.rank)])
        keys, values = torch.split(both.view(heads, -1, latent.rank), [latent.plain, latent.value], dim=1)
        key_up = [self._ops.linear(each.T.contiguous(), None) for each in keys]
        return key_up, [self._ops.linear(each.contiguous(), None) for each in values]

    def _num_queries(self) -> int:
        return self._shape.num_heads * (self._latent.plain + self._latent.rotated)

    def _put_query_halves(self, rows: Tensor) -> None:
        heads = rows.view(self._shape.num_heads, -1, *rows.shape[1:])
        for head in heads:
            self._put_halves(head[-self._latent.rotated :])

    def _put_halves(self, rows: Tensor) -> None:
        """Sort rows [N, ...] that are rotated together as neighbours by halves, in place."""
        if self._latent.neighbours:
            rows.copy_(torch.cat((rows[0::2], rows[1::2])))

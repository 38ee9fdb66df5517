"""A decoder's weights as the kernels want them: read by name, with what a family has otherwise folded into them.

What is folded, and why the numbers stay the same, is in docs/decisions/025-families-by-folding.md.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.ops.base import DecoderLayer, DecoderWeights, DenseMlp, Linear, Mlp
from chairlift.ops.contract import Ops
from chairlift.runners.decoder.config import DecoderConfig
from chairlift.runners.decoder.read_experts import read_experts
from chairlift.runners.decoder.read_latent import LatentReader
from chairlift.runners.decoder.read_mixers import MixerReader
from chairlift.runners.decoder.rope import RopeConfig
from chairlift.runners.weights import Matrix, Weights


class _Norm(NamedTuple):
    """A norm's weights [H], and what LayerNorms add [H]."""

    weight: Tensor
    bias: Tensor | None = None


class DecoderReader:
    """Reads one model. Raises UnsupportedModel naming a missing, unexpected or misshapen tensor."""

    def __init__(self, config: DecoderConfig, ops: Ops, weights: Weights) -> None:
        self._config, self._ops, self._weights = config, ops, weights
        self._names = names = config.family.names
        # A folder that was saved without any head has no prefix either, or one part less.
        self._parts = config.multimodal
        bases = (names.base, names.base.partition(".")[2]) if self._parts is None else self._parts.bases
        # A folder may keep the head alone of a pair that is tied: then the last norm tells.
        known = [f"{names.embedding}.weight", f"{names.norm}.weight"]
        self._prefix = next((each for name in known for each in bases if f"{each}{name}" in weights), "")
        self._centred = config.family.norm_kind != "rms"

    def read(self, head: bool) -> DecoderWeights:
        """Read all layers, and the head if it is wanted."""
        config, weights, prefix = self._config, self._weights, self._prefix
        size = (config.vocab_size, config.hidden_size)
        names = self._names
        weights.leave_derived(names.derived)
        if self._parts is not None:
            weights.leave(self._parts.left)
        words_name = self._words_name()
        words = weights.take([words_name], [size])
        embedding = self._normed(words)
        embedding = _centre(embedding, 1) if self._centred else embedding
        at = prefix + names.layers
        layers = [self._layer(f"{at}{index}.", index) for index in range(config.num_layers)]
        weights.leave([f"{at}{config.num_layers + index}." for index in range(config.extra_layers)])
        # They may lie outside of a part for texts.
        weights.leave([before + each for before in ("", prefix) for each in names.ahead])
        positions = None if names.positions is None else self._positions(f"{prefix}{names.positions}.weight")
        norm = self._norm(prefix + names.norm, config.hidden_size)
        scale = config.embedding_scale
        if config.family.scaled_embedding:
            # Rounded, as transformers does it: in bfloat16 the square root of 1152 is 34.
            scale = float(torch.tensor(scale, dtype=weights.dtype))
        if not head:
            own = [prefix + part for part in (f"{names.embedding}.", names.layers, f"{names.norm}.")]
            # And what a GGUF file has in layers or behind them that no folder has.
            weights.refuse_unused([*own, "blk.", "dense_", "cls."])
            last = None
        else:
            head_name = self._own_head()
            head_name = None if head_name == words_name else head_name
            last = self._ops.head(words if head_name is None else weights.take([head_name], [size]))
            weights.refuse_unused()
            for each in norm:
                # What the head is given is nobody else's, so logits are scaled by way of it.
                if each is not None:
                    each *= config.logit_scale
        keeps_embedding = last is None or head_name is not None or self._centred
        return DecoderWeights(
            layers,
            norm.weight,
            norm.bias,
            embedding if keeps_embedding else None,
            positions,
            last,
            config.rms_norm_eps,
            scale,
            weights.dtype,
        )

    def head_rows(self, token_ids: Sequence[int]) -> Tensor:
        """The head's rows [n, H] float32 for so many tokens, for hidden states of a model that is read without it."""
        config = self._config
        name = self._own_head() or f"{self._prefix}{self._names.embedding}.weight"
        table = self._weights.take([name], [(config.vocab_size, config.hidden_size)])
        return table[list(token_ids)].float() * config.logit_scale

    def _words_name(self) -> str:
        """The name of the embedding's weights; of tied ones, where files have no such, the head's."""
        own, head = f"{self._prefix}{self._names.embedding}.weight", self._own_head()
        return own if own in self._weights or head is None or not self._config.tied else head

    def _normed(self, words: Tensor) -> Tensor:
        """What layers are given of the embedding's weights, which the head may have as they are."""
        if self._names.embedding_norm is None:
            return words
        norm = self._norm(self._prefix + self._names.embedding_norm, words.shape[1])
        parts = (norm.weight.to(words.dtype), norm.bias, self._config.rms_norm_eps)
        return functional.layer_norm(words, words.shape[1:], *parts)

    def _own_head(self) -> str | None:
        """The name of the head's weights; None where they are the embedding's."""
        # Like transformers, a head that is in the files wins over tying.
        heads = [f"{name}.weight" for name in (self._names.head if self._parts is None else self._parts.heads)]
        name = next((name for name in heads if name in self._weights), None)
        return heads[0] if name is None and not self._config.tied else name

    def _positions(self, name: str) -> Tensor:
        config, offset = self._config, self._names.position_offset
        table = self._weights.take([name], [(config.max_positions + offset, config.hidden_size)])[offset:]
        return _centre(table, 1) if self._centred else table

    def _layer(self, prefix: str, index: int) -> DecoderLayer:
        config, norms = self._config, self._config.norms
        hidden = config.hidden_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        order = None if config.latent is not None else _rotation_order(config, config.ropes[index])
        attention_pre = self._norm_of(prefix, norms.attention_pre, hidden)
        mlp_pre = self._norm_of(prefix, norms.mlp_pre, hidden)
        attention_post = self._norm_of(prefix, norms.attention_post, hidden)
        mlp_post = self._norm_of(prefix, norms.mlp_post, hidden)
        mixers, mixer, attends = config.mixers, None, config.mixers is None or not config.mixers.layers[index]
        if mixers is None or attends:
            qkv, out = self._attention(prefix, attention_pre, order)
        else:
            reader = MixerReader(hidden, self._weights, self._rows, self._ops.linear, self._added)
            mixer, qkv, out = reader.read(mixers, prefix)
        q_norm, k_norm = self._names.head_norms
        return DecoderLayer(
            heads=config.heads(index),
            attention_pre_norm=_weight(attention_pre),
            qkv=qkv,
            mixer=mixer,
            gated=config.family.gated_attention,
            sinks=self._sinks(f"{prefix}self_attn.sinks"),
            q_norm=self._head_norm(prefix + q_norm, query, order) if attends else None,
            k_norm=self._head_norm(prefix + k_norm, key, order) if attends else None,
            out=out,
            attention_post_norm=_weight(attention_post),
            mlp_pre_norm=_weight(mlp_pre),
            mlp=self._mlp(prefix, index, mlp_pre),
            mlp_post_norm=_weight(mlp_post),
            parallel=config.parallel,
        )

    def _attention(self, prefix: str, before: _Norm | None, order: Tensor | None) -> tuple[Linear, Linear]:
        """What comes before attention, and after it."""
        config, out = self._config, prefix + self._names.out
        if config.latent is None:
            width = config.num_heads * config.head_dim
            return self._qkv(prefix, before, order), self._added(out, width, config.o_bias)
        latent, heads, norm = config.latent, config.num_heads, lambda *named: self._norm(*named).weight
        reader = LatentReader(latent, heads, self._ops, self._weights, norm)
        added = self._added(out, heads * latent.value, config.o_bias)
        return reader.read(f"{prefix}self_attn.", config.hidden_size, config.qkv_bias, added)

    def _sinks(self, name: str) -> Tensor | None:
        if not self._config.family.sinks:
            return None
        return self._weights.take([name], [(self._config.num_heads,)], torch.float32)

    def _mlp(self, prefix: str, index: int, before: _Norm | None) -> Mlp:
        experts = self._config.experts
        if experts is None or not experts.layers[index]:
            return self._dense_mlp(prefix + self._names.mlp, self._config.intermediate_size, before)
        shared = None
        if experts.shared_width:
            shared = self._dense_mlp(f"{prefix}{experts.names.shared}.", experts.shared_width, before)
        return read_experts(self._config, experts, self._ops, self._weights, prefix, shared)

    def _dense_mlp(self, prefix: str, width: int, before: _Norm | None) -> DenseMlp:
        config, ops = self._config, self._ops
        names = [prefix + name for name in self._names.gate_up]
        rows = 2 * width if config.family.gated else width
        outs = [rows // len(names)] * len(names)
        gate_up = self._rows(names, outs, config.hidden_size, config.mlp_bias, before)
        down = self._added(prefix + self._names.down, width, config.mlp_bias)
        product = ops.gated_linear if config.family.gated else ops.activated_linear
        return DenseMlp(product(*gate_up, config.activation), down)

    def _qkv(self, prefix: str, before: _Norm | None, order: Tensor | None) -> Linear:
        """Queries, keys and values as one projection, the first two rotated by halves, and gates if there are any."""
        config = self._config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [prefix + name for name in self._names.qkv]
        gated = config.family.gated_attention
        outs = [query * (1 + gated), key, key] if len(names) == 3 else [query + 2 * key]
        rows = self._rows(names, outs, config.hidden_size, config.qkv_bias, before)
        if self._names.grouped:
            weight, bias = rows
            rows = Matrix(_ungrouped(weight, config), None if bias is None else _ungrouped(bias, config))
        if gated:
            weight, bias = rows
            rows = Matrix(_gates_behind(weight, config), None if bias is None else _gates_behind(bias, config))
        for part in rows if order is not None else ():
            if part is not None and order is not None:
                part[: query + key] = _in_order(part[: query + key], order)
        return self._ops.linear(*rows)

    def _rows(
        self, names: list[str], outs: list[int], width: int, has_bias: bool, before: _Norm | None = None
    ) -> Matrix:
        """Tensors of one projection, which also adds what the norm before it would add."""
        take = self._weights.take
        if self._names.transposed:
            weight = take([f"{name}.weight" for name in names], [(width, out) for out in outs]).T.contiguous()
        else:
            weight = take([f"{name}.weight" for name in names], [(out, width) for out in outs])
        bias = take([f"{name}.bias" for name in names], [(out,) for out in outs]) if has_bias else None
        if before is not None and before.bias is not None:
            added = weight.float() @ before.bias.float()
            bias = (added if bias is None else added + bias.float()).to(weight.dtype)
        return Matrix(weight, bias)

    def _added(self, name: str, width: int, has_bias: bool) -> Linear:
        """A projection whose result is added to the residual."""
        weight, bias = self._rows([name], [self._config.hidden_size], width, has_bias)
        if self._config.residual_scale != 1:
            weight *= self._config.residual_scale
            bias = None if bias is None else bias * self._config.residual_scale
        if self._centred:
            weight, bias = _centre(weight, 0), None if bias is None else _centre(bias, 0)
        return self._ops.linear(weight, bias)

    def _norm(self, name: str, width: int) -> _Norm:
        family, weights = self._config.family, self._weights
        if family.norm_kind == "bare":
            return _Norm(torch.ones(width, dtype=torch.float32, device=weights.device))
        weight = weights.take([f"{name}.weight"], [(width,)])
        weight = (weight.float() + family.norm_offset).to(torch.float32 if family.float_norms else weight.dtype)
        return _Norm(weight, weights.take([f"{name}.bias"], [(width,)]) if family.norm_kind == "layer" else None)

    def _norm_of(self, prefix: str, name: str | None, width: int) -> _Norm | None:
        return None if name is None else self._norm(prefix + name, width)

    def _head_norm(self, name: str, width: int, order: Tensor | None) -> Tensor | None:
        kind = self._config.qk_norm
        if kind is None:
            return None
        weight = self._norm(name, self._config.head_dim if kind == "head" else width).weight
        return weight if order is None else _in_order(weight, order)


def _ungrouped(rows: Tensor, config: DecoderConfig) -> Tensor:
    """Rows [(heads + 2 * key heads) * D, ...] that lie by heads of keys, put by queries, keys and values."""
    groups = rows.view(config.num_kv_heads, -1, config.head_dim, *rows.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])


def _gates_behind(rows: Tensor, config: DecoderConfig) -> Tensor:
    """Rows that begin with each head's queries and its gates by turns, with all gates put behind keys and values."""
    count = 2 * config.num_heads * config.head_dim
    queries, gates = rows[:count].view(config.num_heads, 2, config.head_dim, *rows.shape[1:]).unbind(1)
    return torch.cat([queries.flatten(0, 1), rows[count:], gates.flatten(0, 1)])


def _weight(norm: _Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _centre(values: Tensor, dim: int) -> Tensor:
    """Take the mean off, so that a LayerNorm, which would, is an RMS norm."""
    exact = values.float()
    return (exact - exact.mean(dim, keepdim=True)).to(values.dtype)


def _rotation_order(config: DecoderConfig, rope: RopeConfig) -> Tensor | None:
    """Which of a head's dimensions in the files is each of ours: None if all are where they are there.

    Kernels rotate dimension i of the first half together with dimension i of the second. Scores are sums over a head's
    dimensions, so these may be in any order, as long as queries and keys have the same.
    """
    dims, size = rope.dims(config.head_dim), config.head_dim
    if dims == size and not config.family.neighbours:
        return None
    pairs = torch.arange(dims).view(-1, 2).T if config.family.neighbours else torch.arange(dims).view(2, -1)
    still = torch.arange(dims, size).view(2, -1)
    return torch.cat((pairs, still), dim=1).flatten()


def _in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Rows [heads * D, ...] of a projection, or a norm's weights, each head's in the order of `_rotation_order`."""
    heads = rows.view(-1, len(order), *rows.shape[1:])
    return heads[:, order.to(rows.device)].reshape(rows.shape)

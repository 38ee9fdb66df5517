"""The one parametric decoder: embedding, layers, final norm, head."""

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.ops.base import DecoderLayer, DecoderWeights, Forward, Head, Inputs, KVCache, Linear
from chairlift.ops.contract import Ops
from chairlift.runners.decoder.config import DecoderConfig
from chairlift.runners.weights import Weights


class Decoder:
    """A loaded model and its KV cache. Hidden size is H, vocabulary V."""

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        weights: Weights,
        *,
        cache_dtype: torch.dtype | None = None,
        head: bool = True,
    ) -> None:
        """Read and pack the weights; `cache_dtype`, of the KV cache, is theirs unless given.

        Without `head` there are hidden states only, and whatever heads the files hold are left there. Raises
        UnsupportedModel naming a missing, unexpected or misshapen tensor.
        """
        self.config = config
        self.ops = ops
        self.dtype = weights.dtype
        self.cache_dtype = cache_dtype or weights.dtype
        self.device = weights.device
        self.weights = _read(config, ops, weights, head)
        self.weight_bytes = _nbytes(self.weights)
        self.caches: list[KVCache] = []
        self.rotations: list[Tensor] = []
        # Does as `forward`, all in one native call; None where there is no such thing.
        self.fused: Forward | None = None

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V, with their scales if they have any, that one token takes over all layers."""
        scale = torch.float32.itemsize if self.cache_dtype == torch.int8 else 0
        per_head = self.config.head_dim * self.cache_dtype.itemsize + scale
        return self.config.num_layers * 2 * self.config.num_kv_heads * per_head

    def allocate(self, num_blocks: int, block_size: int, max_model_len: int, *, one_layer: bool = False) -> None:
        """Allocate the KV cache and the tables of rotations; layers with the same rotation share one.

        With `one_layer` all layers take turns in the memory of one, which suits passes that hold whole sequences.
        """
        ropes, dim = self.config.ropes, self.config.head_dim
        tables = {rope: rope.table(dim, max_model_len).to(self.device) for rope in set(ropes)}
        self.rotations = [tables[rope] for rope in ropes]
        layers = self.weights.layers
        self.caches = [
            self.ops.allocate_kv_cache(num_blocks, block_size, layer.heads, self.cache_dtype, self.device)
            for layer in (layers[:1] if one_layer else layers)
        ]
        if one_layer:
            self.caches *= len(layers)
        self.fused = self.ops.fuse(self.weights, self.caches, self.rotations)

    def forward(self, inputs: Inputs) -> Tensor:
        """Write K and V of all tokens and return the normalized hidden states [R, H] of `inputs.logit_rows`."""
        return self._forward(inputs) if self.fused is None else self.fused(inputs)

    def _forward(self, inputs: Inputs) -> Tensor:
        """Run one operation after the other."""
        ops, weights, eps, rows = self.ops, self.weights, self.config.rms_norm_eps, inputs.logit_rows
        residual = self._embed(inputs.token_ids)
        first, last = weights.layers[0], len(weights.layers) - 1
        hidden = residual
        if first.attention_pre_norm is not None:
            hidden = ops.rms_norm(residual, first.attention_pre_norm, eps)
        following = [layer.attention_pre_norm for layer in weights.layers[1:]] + [weights.norm]
        parts = zip(weights.layers, self.caches, self.rotations, following, strict=True)
        for index, (layer, cache, cos_sin, next_norm) in enumerate(parts):
            query = ops.rope_and_write(
                layer.qkv(hidden), cos_sin, inputs.attention, cache, layer.heads, layer.q_norm, layer.k_norm, eps
            )
            if index == last and not len(rows):
                return residual[:0]
            mixed = ops.attention(query, cache, inputs.attention, layer.heads)
            if index == last and len(rows) < len(residual):
                # After the last layer's attention tokens no longer meet, so only the wanted rows go on.
                mixed, residual = mixed[rows], residual[rows]
            hidden = self._add(layer.out(mixed), residual, layer.attention_post_norm, layer.mlp_pre_norm)
            hidden = self._add(layer.down(layer.gate_up(hidden)), residual, layer.mlp_post_norm, next_norm)
        return hidden

    def _embed(self, token_ids: Tensor) -> Tensor:
        weights = self.weights
        if weights.embedding is not None:
            rows = functional.embedding(token_ids, weights.embedding)
        else:
            rows = self._head.embed(token_ids)
        return rows if weights.embedding_scale == 1 else rows.mul_(weights.embedding_scale)

    def _add(self, x: Tensor, residual: Tensor, post_norm: Tensor | None, next_norm: Tensor | None) -> Tensor:
        """Add what a part of a layer gives into `residual` in place; return what the next is given, which may be it."""
        ops, eps = self.ops, self.config.rms_norm_eps
        if post_norm is not None:
            x = ops.rms_norm(x, post_norm, eps)
        return residual.add_(x) if next_norm is None else ops.add_rms_norm(x, residual, next_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [R, V] logits, in float32 or the model's dtype, of hidden states [R, H]."""
        return self._head.logits(hidden)

    def best(self, hidden: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's highest logit [R] float32 (NaN if any is), and the first token [R] that has it."""
        return self._head.best(hidden, allowed)

    @property
    def _head(self) -> Head:
        head = self.weights.head
        assert head is not None, "this model was read without its head"
        return head


def _read(config: DecoderConfig, ops: Ops, weights: Weights, head: bool) -> DecoderWeights:
    # A folder that was saved without any head has no prefix either.
    prefix = "model." if "model.embed_tokens.weight" in weights else ""
    size = (config.vocab_size, config.hidden_size)
    embedding = weights.take([f"{prefix}embed_tokens.weight"], [size])
    layers = [_layer(config, ops, weights, f"{prefix}layers.{index}.", index) for index in range(config.num_layers)]
    norm = _norm(config, weights, f"{prefix}norm", config.hidden_size)
    # Rounded, as transformers does it: in bfloat16 the square root of 1152 is 34.
    scale = float(torch.tensor(config.embedding_scale, dtype=weights.dtype))
    if not head:
        weights.refuse_unused([f"{prefix}{part}." for part in ("embed_tokens", "layers", "norm")])
        return DecoderWeights(layers, norm, embedding, None, config.rms_norm_eps, scale, weights.dtype)
    # Like transformers, a head that is in the files wins over tying.
    own_head = "lm_head.weight" in weights or not config.tied
    last = ops.head(weights.take(["lm_head.weight"], [size]) if own_head else embedding)
    weights.refuse_unused()
    return DecoderWeights(
        layers, norm, embedding if own_head else None, last, config.rms_norm_eps, scale, weights.dtype
    )


def _nbytes(weights: DecoderWeights) -> int:
    total = weights.norm.nbytes + sum(part.nbytes for part in (weights.head, weights.embedding) if part is not None)
    for layer in weights.layers:
        total += sum(linear.nbytes for linear in (layer.qkv, layer.out, layer.gate_up, layer.down))
        total += sum(norm.nbytes for norm in layer.norms)
    return total


def _norm(config: DecoderConfig, weights: Weights, name: str, width: int) -> Tensor:
    weight = weights.take([f"{name}.weight"], [(width,)])
    family = config.family
    return (weight.float() + family.norm_offset).to(torch.float32 if family.float_norms else weight.dtype)


def _layer(config: DecoderConfig, ops: Ops, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    hidden, middle, family = config.hidden_size, config.intermediate_size, config.family
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(names: list[str], outs: list[int], width: int, has_bias: bool, gated: bool = False) -> Linear:
        weight = weights.take([f"{prefix}{name}.weight" for name in names], [(out, width) for out in outs])
        bias = weights.take([f"{prefix}{name}.bias" for name in names], [(out,) for out in outs]) if has_bias else None
        return ops.gated_linear(weight, bias, config.activation) if gated else ops.linear(weight, bias)

    def norm(name: str | None, width: int = hidden) -> Tensor | None:
        return None if name is None else _norm(config, weights, prefix + name, width)

    def head_norm(name: str, width: int) -> Tensor | None:
        return norm(name, config.head_dim if family.qk_norm == "head" else width) if family.qk_norm else None

    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return DecoderLayer(
        heads=config.heads(index),
        attention_pre_norm=norm(family.norms.attention_pre),
        qkv=linear(attention, [query, key, key], hidden, config.qkv_bias),
        q_norm=head_norm("self_attn.q_norm", query),
        k_norm=head_norm("self_attn.k_norm", key),
        out=linear(["self_attn.o_proj"], [hidden], query, config.o_bias),
        attention_post_norm=norm(family.norms.attention_post),
        mlp_pre_norm=norm(family.norms.mlp_pre),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [middle, middle], hidden, config.mlp_bias, True),
        down=linear(["mlp.down_proj"], [hidden], middle, config.mlp_bias),
        mlp_post_norm=norm(family.norms.mlp_post),
    )

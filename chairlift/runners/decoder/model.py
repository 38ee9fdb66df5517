"""The one parametric decoder: embedding, layers, final norm, head."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.ops.base import AttentionBatch, HeadShape, KVCache, Linear, Ops
from chairlift.runners.decoder.config import ModelConfig
from chairlift.runners.decoder.weights import Weights


@dataclass(slots=True)
class Inputs:
    """One step's tokens: `token_ids` [T] int64; `logit_rows` [R] int64, ascending: those whose logits are wanted."""

    token_ids: Tensor
    attention: AttentionBatch
    logit_rows: Tensor


@dataclass(slots=True, frozen=True)
class Layer:
    """One layer's packed weights. `qkv` and `gate_up` each are one fused projection."""

    heads: HeadShape
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A loaded model and its KV cache. Hidden size is H, vocabulary V."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Read and pack the weights; `cache_dtype`, of the KV cache, is `dtype` unless given.

        Raises UnsupportedModel naming a missing, unexpected or misshapen tensor.
        """
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.device = device
        with Weights(folder, dtype, device) as weights:
            size = (config.vocab_size, config.hidden_size)
            self.embedding = weights.take(["model.embed_tokens.weight"], [size])
            self.layers = [_layer(config, ops, weights, index) for index in range(config.num_layers)]
            self.norm = weights.take(["model.norm.weight"], [(config.hidden_size,)])
            # Like transformers, a head that is in the files wins over tying.
            own_head = "lm_head.weight" in weights or not config.tied
            head = weights.take(["lm_head.weight"], [size]) if own_head else self.embedding
            self.head = ops.linear(head, None)
            weights.refuse_unused()
            self.weight_bytes = weights.taken_bytes
        self.caches: list[KVCache] = []
        self.cos_sin = torch.empty(0)

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V, with their scales if they have any, that one token takes over all layers."""
        scale = torch.float32.itemsize if self.cache_dtype == torch.int8 else 0
        per_head = self.config.head_dim * self.cache_dtype.itemsize + scale
        return self.config.num_layers * 2 * self.config.num_kv_heads * per_head

    def allocate(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Allocate the KV cache and the table of rotations."""
        self.cos_sin = self.config.rope.table(self.config.head_dim, max_model_len).to(self.device)
        self.caches = [
            self.ops.allocate_kv_cache(num_blocks, block_size, layer.heads, self.cache_dtype, self.device)
            for layer in self.layers
        ]

    def forward(self, inputs: Inputs) -> Tensor:
        """Write K and V of all tokens and return the normalized hidden states [R, H] of `inputs.logit_rows`."""
        ops, eps, rows = self.ops, self.config.rms_norm_eps, inputs.logit_rows
        residual = functional.embedding(inputs.token_ids, self.embedding)
        hidden = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        last = len(self.layers) - 1
        for index, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            if index:
                hidden = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            query = ops.rope_and_write(
                layer.qkv(hidden), self.cos_sin, inputs.attention, cache, layer.heads, layer.q_norm, layer.k_norm, eps
            )
            if index == last and not len(rows):
                return residual[:0]
            mixed = ops.attention(query, cache, inputs.attention, layer.heads)
            if index == last and len(rows) < len(residual):
                # After the last layer's attention tokens no longer meet, so only the wanted rows go on.
                mixed, residual = mixed[rows], residual[rows]
            hidden = ops.add_rms_norm(layer.out(mixed), residual, layer.post_norm, eps)
            hidden = layer.down(ops.silu_mul(layer.gate_up(hidden)))
        return ops.add_rms_norm(hidden, residual, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [R, V] logits, in the model's dtype, of hidden states [R, H]."""
        return self.head(hidden)


def _layer(config: ModelConfig, ops: Ops, weights: Weights, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, middle = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(names: list[str], outs: list[int], width: int, has_bias: bool) -> Linear:
        weight = weights.take([f"{prefix}{name}.weight" for name in names], [(out, width) for out in outs])
        bias = weights.take([f"{prefix}{name}.bias" for name in names], [(out,) for out in outs]) if has_bias else None
        return ops.linear(weight, bias)

    def norm(name: str, width: int) -> Tensor:
        return weights.take([f"{prefix}{name}.weight"], [(width,)])

    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return Layer(
        heads=config.heads(index),
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(attention, [query, key, key], hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        out=linear(["self_attn.o_proj"], [hidden], query, config.o_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [middle, middle], hidden, config.mlp_bias),
        down=linear(["mlp.down_proj"], [hidden], middle, config.mlp_bias),
    )

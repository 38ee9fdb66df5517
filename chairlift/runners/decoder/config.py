"""A model folder's config.json, checked and made uniform over families and ages of the format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chairlift.errors import UnsupportedModel
from chairlift.folders.decoder_families import FAMILIES, Family, Windows
from chairlift.folders.model_json import positive_size, read_model_json
from chairlift.ops.base import HeadShape
from chairlift.runners.decoder.rope import RopeConfig

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ACTIVATIONS = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Fields that change the numbers in ways no family here has, with the value at which they change nothing.
_NEUTRAL: dict[str, Any] = {
    "quantization_config": None,
    "compression_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "num_experts": None,
    "num_local_experts": None,
    "partial_rotary_factor": 1.0,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "parallel_attn": False,
    # Embedders made of decoders sometimes let tokens see what follows.
    "is_causal": True,
    "use_bidirectional_attention": False,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder is built from. `windows` holds each layer's sliding window in tokens, None for full attention.

    `dtype` is the one the folder was saved in.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: Windows
    rope: RopeConfig
    dtype: torch.dtype

    def heads(self, layer: int) -> HeadShape:
        """Attention shape of one layer."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, self.windows[layer])


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises ConfigError if it is no readable model folder, and UnsupportedModel naming the field if the model would
    compute something that Chairlift does not.
    """
    return parse_config(read_model_json(folder))


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Make a ModelConfig of a parsed config.json. Raises UnsupportedModel naming the field at fault."""
    family = _family(raw)
    _refuse_unknown(raw)
    hidden, layers, heads = (
        positive_size(raw, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = heads if raw.get("num_key_value_heads") is None else positive_size(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    head_dim = (family.head_dim or hidden // heads) if raw.get("head_dim") is None else positive_size(raw, "head_dim")
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim must be even for rotary embedding, got {head_dim}")
    max_positions = positive_size(raw, "max_position_embeddings")

    def flag(value: bool | str) -> bool:
        return bool(raw.get(value, False)) if isinstance(value, str) else value

    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=positive_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_size(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(raw, family.windows, layers),
        rope=RopeConfig.parse(raw, max_positions),
        dtype=_dtype(raw),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise UnsupportedModel(f"model_type {name!r} is not supported; these are: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; these are: {', '.join(_ACTIVATIONS)}")
    for name, neutral in _NEUTRAL.items():
        value = raw.get(name)
        if value is not None and value != neutral:
            shown = value.get("quant_method", value) if isinstance(value, dict) else value
            raise UnsupportedModel(
                f"{name}={shown!r} is not supported; a model that leaves {name} unset works "
                f"(families: {', '.join(FAMILIES)}, unquantized)"
            )


def _windows(raw: Mapping[str, Any], rule: Callable[[Mapping[str, Any], int], Windows], layers: int) -> Windows:
    types = raw.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - set(_LAYER_TYPES))
        if unknown:
            raise UnsupportedModel(f"layer_types has {unknown[0]!r}; supported are: {', '.join(_LAYER_TYPES)}")
        if len(types) != layers:
            raise UnsupportedModel(f"layer_types names {len(types)} layers, but num_hidden_layers is {layers}")
    windows = rule(raw, layers)
    for layer, window in enumerate(windows):
        if window is not None and (not isinstance(window, int) or window < 1):
            raise UnsupportedModel(f"sliding_window must be a positive whole number, got {window!r}")
        if types is not None and (types[layer] == "sliding_attention") != (window is not None):
            raise UnsupportedModel(
                f"layer_types says {types[layer]!r} for layer {layer}, but a {raw['model_type']} model with "
                f"sliding_window={raw.get('sliding_window')!r} has no such layer there"
            )
    return windows


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; these are: {', '.join(_DTYPES)}")
    return _DTYPES[name]

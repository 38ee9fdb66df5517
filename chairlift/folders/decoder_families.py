"""The model families, one row each: everything in which they differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import optional_object, positive_size

Windows = tuple[int | None, ...]
Raw = Mapping[str, Any]


def _no_window(raw: Raw, num_layers: int) -> Windows:
    return (None,) * num_layers


def _one_window(raw: Raw, num_layers: int) -> Windows:
    # A Mistral config without the field means 4096; only an explicit null means full attention.
    return (raw.get("sliding_window", 4096),) * num_layers


def _window_per_layer(raw: Raw, num_layers: int) -> Windows:
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    types = raw.get("layer_types")
    if types is not None:
        if window is None and "sliding_attention" in types:
            raise UnsupportedModel("layer_types has sliding_attention, but use_sliding_window or sliding_window is off")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = raw.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _window_by_pattern(raw: Raw, num_layers: int) -> Windows:
    types = raw.get("layer_types")
    if types is None:
        every = positive_size({"sliding_window_pattern": 6, **raw}, "sliding_window_pattern")
        types = ["sliding_attention" if layer % every else "full_attention" for layer in range(1, num_layers + 1)]
    window = positive_size({"sliding_window": 4096, **raw}, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _one_rope(raw: Raw, sliding: bool) -> Raw:
    return raw


def _rope_per_type(raw: Raw, sliding: bool) -> Raw:
    given = optional_object(raw, "rope_parameters")
    unknown = sorted(given.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"rope_parameters has {unknown[0]!r}, where it must have full_ and sliding_attention")
    if sliding:
        found = {"rope_theta": raw.get("rope_local_base_freq") or 1e4} | optional_object(given, "sliding_attention")
    else:
        found = {"rope_theta": raw.get("rope_theta") or 1e6} | optional_object(given, "full_attention")
        # In older folders the rotation of these layers alone is scaled.
        found |= optional_object(raw, "rope_scaling")
    return {**raw, "rope_scaling": None, "rope_parameters": found}


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What the files call a layer's norms: of what attention and the MLP are given (pre) and of what they give (post).

    None where there is none. What they give is normalized before it is added to the residual.
    """

    attention_pre: str | None = "input_layernorm"
    attention_post: str | None = None
    mlp_pre: str | None = "post_attention_layernorm"
    mlp_post: str | None = None


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """Where one architecture departs from the common decoder.

    A bias is True, False, or the name of the config field that decides (absent means False). `qk_norm`: queries and
    keys are normalized each head by itself or the whole projection at once. `norm_offset` is added to the weights of
    norms. With `float_norms` what is normalized is multiplied by those weights before it is rounded, not after.
    `activation`: the MLP's config field and what it means to leave it out. `head_dim=None` means
    hidden_size / num_attention_heads. `query_pre_attn_scalar`: scores are divided by the square root of this config
    field, whose default this is, and not of head_dim. `scaled_embedding`: embeddings are multiplied by the square root
    of hidden_size. `tied` and `rms_norm_eps` are used where the config leaves them out. `windows` gives each layer's
    sliding window from the raw config, `rope` the fields with the rotation of layers with or without one.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: LayerNorms = LayerNorms()
    qk_norm: Literal["head", "projection"] | None = None
    norm_offset: float = 0.0
    float_norms: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    head_dim: int | None = None
    query_pre_attn_scalar: int | None = None
    scaled_embedding: bool = False
    tied: bool = False
    rms_norm_eps: float = 1e-6
    windows: Callable[[Raw, int], Windows] = _no_window
    rope: Callable[[Raw, bool], Raw] = _one_rope


FAMILIES: dict[str, DecoderFamily] = {
    "llama": DecoderFamily(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": DecoderFamily(windows=_one_window),
    "qwen2": DecoderFamily(qkv_bias=True, windows=_window_per_layer),
    "qwen3": DecoderFamily(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", head_dim=128, windows=_window_per_layer
    ),
    "gemma3_text": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=LayerNorms(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        ),
        qk_norm="head",
        norm_offset=1.0,
        float_norms=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        head_dim=256,
        query_pre_attn_scalar=256,
        scaled_embedding=True,
        tied=True,
        windows=_window_by_pattern,
        rope=_rope_per_type,
    ),
    "olmo2": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm="projection",
        float_norms=True,
        rms_norm_eps=1e-5,
    ),
}

"""A model folder's config.json, checked and made uniform over families and ages of the format.

Without torch, since the front checks a folder before it starts a worker.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chairlift.errors import ConfigError, UnsupportedModel
from chairlift.folders.alibi import Slopes
from chairlift.folders.config_names import NotNative
from chairlift.folders.decoder_families import FAMILIES
from chairlift.folders.decoder_family import Bias, DecoderFamily, Mixers
from chairlift.folders.expert_rules import ExpertConfig, parse_experts
from chairlift.folders.latent_config import LatentConfig, parse_latent
from chairlift.folders.layer_norms import LayerNorms
from chairlift.folders.layer_rules import Windows
from chairlift.folders.model_json import positive_size, read_model_json, values_checked
from chairlift.folders.multimodal import MultimodalFamily, is_native, multimodal_of
from chairlift.folders.quantization_config import QuantizationConfig, parse_quantization
from chairlift.folders.transformers_config import TransformersConfig, parse_transformers
from chairlift.ops.activation import ACTIVATIONS, Activation
from chairlift.ops.kv_layout import bytes_of_token, has_kernels
from chairlift.runners.decoder.rope import RopeConfig

if TYPE_CHECKING:
    # Whoever only reads a config.json needs no torch.
    from chairlift.ops.base import HeadShape

_DTYPES = ("float32", "float16", "bfloat16")
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Fields that change the numbers in ways no family here has, unless its row says so, with the value at which they change
# nothing.
_NEUTRAL: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "num_experts": None,
    "num_local_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "partial_rotary_factor": 1.0,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "parallel_attn": False,
    "use_parallel_residual": False,
    "qk_layernorm": False,
    "clip_qkv": None,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    # A model would load without it, and give other vectors than its own.
    "use_bidirectional_attention": False,
}


# Of these the families in which transformers computes them.
_BY_TRANSFORMERS = {"clip_qkv": ("olmo", "olmoe")}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the decoder is built from.

    `windows` holds each layer's sliding window in tokens, None for full attention, and `ropes` each layer's
    rotation. Scores are multiplied by `attention_scale`, embeddings by `embedding_scale`, what is added to the
    residual by `residual_scale`, logits by `logit_scale`; scores and logits may have a cap, and scores `slopes`, as in
    `HeadShape`.
    `norms` are what layers' are called, and layers are `parallel` as in `DecoderFamily`.
    `qk_norm` is as in `DecoderFamily`. `experts` are those of the layers that have any. With a `latent` there is one
    head of keys and values, that which is kept of a token. Some layers have `mixers` in place of attention.
    `multimodal` is the family of which this is the part for texts. Files may hold so many `extra_layers`, which predict
    tokens beyond the next and are not used. `dtype` is the name of the type the folder was saved in. With `both_ways`
    tokens see what follows them, too, so that the model embeds and writes nothing.
    """

    model_type: str
    family: DecoderFamily
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
    norms: LayerNorms
    parallel: bool
    qk_norm: Literal["head", "projection"] | None
    activation: Activation
    attention_scale: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    score_cap: float | None
    logit_cap: float | None
    windows: Windows
    ropes: tuple[RopeConfig, ...]
    slopes: Slopes | None
    both_ways: bool
    experts: ExpertConfig | None
    latent: LatentConfig | None
    mixers: Mixers | None
    multimodal: MultimodalFamily | None
    extra_layers: int
    packing: QuantizationConfig | None
    dtype: str

    def kv_bytes_per_token(self, itemsize: int, scale: int, pads_values: bool | None = None) -> int:
        """Bytes of K and V over all layers, of numbers and of a scale for each head that take so many bytes.

        `pads_values` is that of the operations; None is what those of the CPU do.
        """
        pads = has_kernels(self.head_dim) if pads_values is None else pads_values
        layers = self.num_layers - (0 if self.mixers is None else sum(self.mixers.layers))
        return layers * self.num_kv_heads * bytes_of_token(self.head_dim, itemsize, scale, pads)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of what all layers remember of a sequence beside keys and values, of numbers of so many bytes."""
        mixers = self.mixers
        return 0 if mixers is None else sum(mixers.layers) * mixers.state_bytes(self.hidden_size, itemsize)

    def heads(self, layer: int) -> "HeadShape":
        """Attention shape of one layer."""
        from chairlift.ops.base import HeadShape

        sizes, window = (self.num_heads, self.num_kv_heads, self.head_dim), self.windows[layer]
        # As long as any text it hides nothing, and may be more than kernels count to.
        if window is not None and window >= self.max_positions:
            window = None
        return HeadShape(*sizes, self.attention_scale, window, self.score_cap, self.slopes, self.both_ways)


def read_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json.

    Raises ConfigError if it is no readable model folder, and UnsupportedModel naming the field if the model would
    compute something that Chairlift does not.
    """
    return parse_config(read_model_json(folder))


def read_any_config(folder: Path, implementation: str) -> DecoderConfig | TransformersConfig:
    """Read `folder`/config.json for whoever computes the model: native kernels ("native"), or transformers, or ("auto")
    native kernels if they know the family, and all that this model has of it.

    Raises as `read_config`, also where transformers would be needed and is not installed, and for a model that writes
    nothing.
    """
    raw = read_model_json(folder)
    if implementation == "native" or (implementation == "auto" and is_native(raw)):
        try:
            return _writing(parse_config(raw))
        except NotNative:
            if implementation == "native":
                raise
    return parse_transformers(raw)


def _writing(config: DecoderConfig) -> DecoderConfig:
    if config.both_ways:
        raise UnsupportedModel(
            'this model\'s tokens see those that follow, so it writes no text: serve it with kind = "encoder"'
        )
    return config


def computed_dtype(wanted: str, config: DecoderConfig | TransformersConfig) -> str:
    """The name of the type that a model is computed in: as wanted, or ("auto") by the one that its folder has."""
    if wanted != "auto":
        return wanted
    # What was packed has far fewer digits than bfloat16, and float32 would take eight times its memory.
    is_packed = config.packing is not None and config.dtype == "float16"
    return "bfloat16" if config.dtype == "bfloat16" or is_packed else "float32"


def max_length(wanted: int | None, config: DecoderConfig | TransformersConfig) -> int:
    """The tokens that one sequence may have: as many as wanted, or as the model takes. Raises ConfigError."""
    if wanted is not None and wanted > config.max_positions:
        raise ConfigError(
            f"max_model_len ({wanted}) must not exceed the model's max_position_embeddings ({config.max_positions})"
            f"{_of_scaling(config)}"
        )
    return wanted or config.max_positions


def _of_scaling(config: DecoderConfig | TransformersConfig) -> str:
    """What to do where nothing tells whether the length is that before scaling or after it."""
    factors = [rope.values.get("factor") or 1.0 for rope in config.ropes] if isinstance(config, DecoderConfig) else []
    if max(factors, default=1.0) <= 1:
        return ""
    return f". If that is without the scaling by {max(factors):g} that config.json has, raise the field there"


@values_checked()
def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Make a DecoderConfig of a parsed config.json. Raises UnsupportedModel naming the field at fault."""
    multimodal = multimodal_of(raw)
    return _parsed(raw if multimodal is None else multimodal.text_config(raw), multimodal)


def _parsed(raw: Mapping[str, Any], multimodal: MultimodalFamily | None) -> DecoderConfig:
    family = _family(raw)
    raw = family.dialect(raw)
    _refuse_unknown(raw, family)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    hidden, layers, heads = (positive_size(raw, name) for name in sizes)
    latent = parse_latent(raw, heads) if family.latent else None
    kv_heads, head_dim = (1, latent.width) if latent is not None else _kept_heads(raw, family, hidden, heads)
    max_positions = positive_size(raw, "max_position_embeddings")
    mixers = None if family.mixers is None else family.mixers(raw, layers)
    windows = _windows(raw if mixers is None else {**raw, "layer_types": None}, family, layers)
    ropes = _ropes(raw, family, windows, max_positions, head_dim, latent)
    return DecoderConfig(
        model_type=raw["model_type"],
        family=family,
        vocab_size=positive_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_size(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max(rope.max_positions for rope in ropes),
        rms_norm_eps=float(raw.get(family.eps_field, family.rms_norm_eps)),
        tied=bool(raw.get("tie_word_embeddings", family.tied)),
        qkv_bias=_flag(raw, family.qkv_bias),
        o_bias=_flag(raw, family.o_bias),
        mlp_bias=_flag(raw, family.mlp_bias),
        norms=family.norms if family.norms_of is None else family.norms_of(raw),
        parallel=_flag(raw, family.parallel),
        qk_norm=family.qk_norm if family.qk_norm_if is None or raw.get(family.qk_norm_if) else None,
        activation=_activation(raw, family),
        attention_scale=_attention_scale(raw, family, head_dim) if latent is None else latent.scale,
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else _multiplier(raw, family, "embedding"),
        residual_scale=_multiplier(raw, family, "residual"),
        logit_scale=_logit_scale(raw, family),
        score_cap=_cap(raw, family, "attn_logit_softcapping"),
        logit_cap=_cap(raw, family, "final_logit_softcapping"),
        windows=windows,
        ropes=ropes,
        slopes=None if family.slopes is None else family.slopes(raw),
        both_ways=_both_ways(raw, family),
        experts=None if family.experts is None else parse_experts(raw, family.experts, layers),
        latent=latent,
        mixers=mixers,
        multimodal=multimodal,
        extra_layers=positive_size(raw, "num_nextn_predict_layers") if raw.get("num_nextn_predict_layers") else 0,
        packing=_packing(raw, family),
        dtype=_dtype(raw),
    )


def _flag(raw: Mapping[str, Any], value: Bias) -> bool:
    """What a family's row says is so, or the field that it names, with its default."""
    if isinstance(value, bool):
        return value
    name, default = (value, False) if isinstance(value, str) else value
    return bool(raw.get(name, default))


def _multiplier(raw: Mapping[str, Any], family: DecoderFamily, of: str) -> float:
    return float(raw.get(f"{of}_multiplier", 1.0)) if family.multipliers else 1.0


def _kept_heads(raw: Mapping[str, Any], family: DecoderFamily, hidden: int, heads: int) -> tuple[int, int]:
    """How many heads of keys and values there are, and their dimensions."""
    kv_heads = heads if raw.get("num_key_value_heads") is None else positive_size(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    head_dim = (family.head_dim or hidden // heads) if raw.get("head_dim") is None else positive_size(raw, "head_dim")
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim must be even for rotary embedding, got {head_dim}")
    return kv_heads, head_dim


def _packing(raw: Mapping[str, Any], family: DecoderFamily) -> QuantizationConfig | None:
    given = raw.get("quantization_config")
    if family.quantized is not None and isinstance(given, dict) and given.get("quant_method") == family.quantized:
        return None
    packing = parse_quantization(raw)
    experts_too = family.experts is not None and family.experts.names.transposed
    if packing is not None and (family.names.transposed or experts_too):
        what = "experts" if experts_too else "weights"
        raise UnsupportedModel(f"quantization_config is not read for {raw['model_type']}, whose {what} are transposed")
    return packing


def _family(raw: Mapping[str, Any]) -> DecoderFamily:
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise UnsupportedModel(f"model_type {name!r} is not supported; these are: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _activation(raw: Mapping[str, Any], family: DecoderFamily) -> Activation:
    field, default = family.activation
    name = raw.get(field, default)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{field} {name!r} is not supported; these are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _attention_scale(raw: Mapping[str, Any], family: DecoderFamily, head_dim: int) -> float:
    if family.multipliers:
        return _multiplier(raw, family, "attention")
    name, default = "query_pre_attn_scalar", family.query_pre_attn_scalar
    return math.pow(head_dim if default is None else positive_size({name: default, **raw}, name), -0.5)


def _logit_scale(raw: Mapping[str, Any], family: DecoderFamily) -> float:
    if family.logit_scale is not None:
        return float(raw.get(*family.logit_scale))
    return 1 / float(raw.get("logits_scaling", 1.0)) if family.multipliers else 1.0


def _cap(raw: Mapping[str, Any], family: DecoderFamily, name: str) -> float | None:
    value = raw.get(name, family.caps[name]) if family.caps else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{name} must be a number above zero, got {value!r}")
    return float(value)


def _refuse_unknown(raw: Mapping[str, Any], family: DecoderFamily) -> None:
    for name in _NEUTRAL.keys() - family.honoured:
        neutral = _NEUTRAL[name]
        value = raw.get(name)
        if value is not None and value != neutral:
            error = NotNative if raw["model_type"] in _BY_TRANSFORMERS.get(name, ()) else UnsupportedModel
            raise error(
                f"{name}={value!r} is not supported; a model that leaves {name} unset works "
                f"(families: {', '.join(FAMILIES)})"
            )


def _both_ways(raw: Mapping[str, Any], family: DecoderFamily) -> bool:
    """Whether tokens see those that follow them, too, as those of embedders made of decoders sometimes do."""
    found = False
    for name, ahead in (("is_causal", False), (family.both_ways, True)):
        value = None if name is None else raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedModel(f"{name} must be true or false, got {value!r}")
        found = found or value is ahead
    if found and (family.slopes is not None or family.latent):
        raise UnsupportedModel(
            f"is_causal=False is not supported for {raw['model_type']}, whose tokens see only what came before"
        )
    return found


def _windows_both_ways(raw: Mapping[str, Any], family: DecoderFamily, windows: Windows) -> Windows:
    """Windows of which a token's own side has one token less, as `HeadShape` counts them.

    Transformers counts those of each side, or with the family's own field those of both together.
    """
    halved = family.both_ways is not None and raw.get(family.both_ways) is True
    return tuple(None if each is None else each // 2 + 1 if halved else each + 1 for each in windows)


def _windows(raw: Mapping[str, Any], family: DecoderFamily, layers: int) -> Windows:
    types = raw.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - set(_LAYER_TYPES))
        if unknown:
            raise UnsupportedModel(f"layer_types has {unknown[0]!r}; supported are: {', '.join(_LAYER_TYPES)}")
        if len(types) != layers:
            raise UnsupportedModel(f"layer_types names {len(types)} layers, but num_hidden_layers is {layers}")
    windows = family.windows(raw, layers)
    for layer, window in enumerate(windows):
        if window is not None and (not isinstance(window, int) or window < 1):
            raise UnsupportedModel(f"sliding_window must be a positive whole number, got {window!r}")
        if types is not None and (types[layer] == "sliding_attention") != (window is not None):
            raise UnsupportedModel(
                f"layer_types says {types[layer]!r} for layer {layer}, but a {raw['model_type']} model with "
                f"sliding_window={raw.get('sliding_window')!r} has no such layer there"
            )
    return _windows_both_ways(raw, family, windows) if _both_ways(raw, family) else windows


def _ropes(
    raw: Mapping[str, Any],
    family: DecoderFamily,
    windows: Windows,
    max_positions: int,
    head_dim: int,
    latent: LatentConfig | None,
) -> tuple[RopeConfig, ...]:
    sliding = [window is not None for window in windows]
    found = {
        kind: RopeConfig.parse(
            family.rope(raw, kind), max_positions, family.rope_theta, family.rotary_share, family.grows
        )
        for kind in set(sliding)
    }
    if latent is not None:
        found = {kind: replace(rope, share=latent.share) for kind, rope in found.items()}
    for rope in found.values():
        rope.dims(head_dim)
    none = RopeConfig.none(max_positions)
    rotated = family.rotated(raw, windows)
    return tuple(found[kind] if turns else none for kind, turns in zip(sliding, rotated, strict=True))


def _dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; these are: {', '.join(_DTYPES)}")
    return str(name)

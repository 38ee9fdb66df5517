"""An encoder's config.json, checked and made uniform over families."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.errors import UnsupportedModel
from chairlift.folders.decoder_families import FAMILIES as DECODERS
from chairlift.folders.encoder_families import FAMILIES, EncoderFamily, family_of
from chairlift.folders.model_json import optional_object, positive_size, read_model_json, values_checked
from chairlift.folders.sentence_files import LogitScore
from chairlift.ops.activation import ACTIVATIONS, Activation
from chairlift.runners.decoder.config import DecoderConfig
from chairlift.runners.decoder.rope import RopeConfig

# MPNet's table of relative biases. Distances from here on share MPNet's last bucket.
BUCKETS, BUCKET_DISTANCE = 32, 128

# What RoPE of type "ntk" is made from, and no model's factor comes near.
_NTK, _MOST_FACTOR = {"rope_type", "type", "factor", "rope_theta"}, 10**6

# Of which states a head makes logits, by config.json's names; "late": of all, whose mean is then taken.
_HEAD_POOLINGS = {"cls": "cls", "bos": "cls", "mean": "mean", "late": "late"}

_NORMS_HEADS = "jina-bert-v2-qk-post-norm"

# Fields that change the numbers in ways no family here has, with the value at which they change nothing.
_NEUTRAL: dict[str, Any] = {
    "quantization_config": None,
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "pruned_heads": {},
    "embedding_size": None,
    "relative_attention_num_buckets": BUCKETS,
}


class LayerExperts(NamedTuple):
    """How many experts a layer has, to how many a token goes, and of how many layers the second has them."""

    num_experts: int
    chosen: int
    every: int


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What an encoder is built from.

    `first_position` is that of a text's first token. `windows` has for each layer how far a token sees to both sides,
    None for all; `ropes` its rotary embedding, None where there is none. `max_tokens` follows from the positions.
    `experts` are those of some layers, if any has such.
    """

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    type_vocab_size: int
    max_positions: int
    first_position: int
    max_tokens: int
    eps: float
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    head_bias: bool
    head_pooling: str
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    experts: LayerExperts | None
    raw: Mapping[str, Any]

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads


@values_checked()
def read_encoder_config(folder: Path) -> EncoderConfig:
    """Read `folder`/config.json.

    Raises ConfigError if it is no readable model folder, and UnsupportedModel naming the field if the model would
    compute something that Chairlift does not.
    """
    raw = read_model_json(folder)
    name = raw.get("model_type")
    family = family_of(raw)
    if family is None:
        raise UnsupportedModel(
            f"model_type {name!r} is no supported encoder; these are: {', '.join(FAMILIES)}, and of decoders, which "
            f"embed too, {', '.join(DECODERS)}"
        )
    _refuse_unknown(raw, family)
    # A copy in which the fields have BERT's names.
    raw = {**family.defaults, **raw, **{common: raw[own] for common, own in family.fields.items() if own in raw}}
    hidden = positive_size(raw, "hidden_size")
    heads, kv_heads = _heads(raw, family, hidden)
    layers, max_positions = positive_size(raw, "num_hidden_layers"), _max_positions(raw)
    first = _first_position(raw, family)
    windows, ropes = _positions(raw, family, layers, max_positions)

    def flag(value: bool | str) -> bool:
        return bool(raw.get(value, False)) if isinstance(value, str) else value

    return EncoderConfig(
        family=family,
        vocab_size=positive_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_size(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        type_vocab_size=_num_types(raw, family),
        max_positions=max_positions,
        first_position=first,
        max_tokens=max_positions - first,
        eps=float(raw.get("layer_norm_eps", 1e-12)),
        activation=_activation(raw),
        attention_bias=flag(family.attention_bias),
        mlp_bias=flag(family.mlp_bias),
        norm_bias=flag(family.norm_bias),
        head_bias=flag(family.head_bias),
        head_pooling=_head_pooling(raw),
        windows=windows,
        ropes=ropes,
        experts=_experts(raw) if family.experts is not None else None,
        raw=raw,
    )


def check_logit_score(score: LogitScore | None, config: EncoderConfig | DecoderConfig) -> None:
    """Raise UnsupportedModel for a score of logits that this model does not have, or not by rows of its head alone."""
    if score is None:
        return
    if not isinstance(config, DecoderConfig):
        raise UnsupportedModel("modules.json: LogitScore is of language models; this one has no logits of a next token")
    if config.logit_cap is not None:
        raise UnsupportedModel("final_logit_softcapping is not supported with LogitScore")
    if max(score.token_ids) >= config.vocab_size:
        raise UnsupportedModel(f"LogitScore is of token {max(score.token_ids)}, but vocab_size is {config.vocab_size}")


def _refuse_unknown(raw: Mapping[str, Any], family: EncoderFamily) -> None:
    known = _NEUTRAL | dict(family.neutral)
    if family.rotary and "position_embedding_type" not in family.neutral:
        del known["position_embedding_type"]  # it is of positions in a table, of which there is none
    for name, neutral in known.items():
        value = raw.get(name)
        if value is not None and value != neutral:
            raise UnsupportedModel(f"{name}={value!r} is not supported; encoders with {name}={neutral!r} are")
    # Jina's later ones, of which config.json says nothing else.
    code = optional_object(raw, "auto_map").values() if family.slopes else ()
    if any(isinstance(each, str) and _NORMS_HEADS in each for each in code):
        raise UnsupportedModel(
            f"auto_map names {_NORMS_HEADS}, whose queries and keys are normed: that is not supported"
        )


def _experts(raw: Mapping[str, Any]) -> LayerExperts:
    count, chosen, every = (positive_size(raw, name) for name in ("num_experts", "moe_top_k", "moe_every_n_layers"))
    if chosen > count:
        raise UnsupportedModel(f"moe_top_k ({chosen}) must not be more than num_experts ({count})")
    return LayerExperts(count, chosen, every)


def _activation(raw: Mapping[str, Any]) -> Activation:
    name = raw.get("hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {name!r} is not supported; these are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _head_pooling(raw: Mapping[str, Any]) -> str:
    name = raw.get("classifier_pooling", "cls")
    if name not in _HEAD_POOLINGS:
        known = ", ".join(_HEAD_POOLINGS)
        raise UnsupportedModel(f"classifier_pooling {name!r} is not supported; these are: {known}")
    return _HEAD_POOLINGS[name]


def _heads(raw: Mapping[str, Any], family: EncoderFamily, hidden: int) -> tuple[int, int]:
    """How many heads there are, and how many of keys and values."""
    heads = positive_size(raw, "num_attention_heads")
    if hidden % heads:
        raise UnsupportedModel(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    if raw.get("head_dim") not in (None, hidden // heads):
        raise UnsupportedModel(f"head_dim={raw['head_dim']!r} is not supported; {hidden // heads} is, by hidden_size")
    if not family.grouped or raw.get("num_key_value_heads") is None:
        return heads, heads
    kv_heads = positive_size(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    return heads, kv_heads


def _num_types(raw: Mapping[str, Any], family: EncoderFamily) -> int:
    return positive_size(raw, "type_vocab_size") if family.types and raw.get("type_vocab_size") != 0 else 0


def _max_positions(raw: Mapping[str, Any]) -> int:
    most = positive_size(raw, "max_position_embeddings")
    if not raw.get("rotary_scaling_factor"):
        return most
    # Of a longer text, each length has wavelengths of its own (dynamic NTK), so that no table fits.
    return min(most, positive_size(raw, "max_trained_positions"))


def _first_position(raw: Mapping[str, Any], family: EncoderFamily) -> int:
    padding = family.after_padding
    if isinstance(padding, str):
        padding = raw.get(padding, 1)
        if not isinstance(padding, int) or padding < 0:
            raise UnsupportedModel(f"{family.after_padding} must be a whole number, got {padding!r}")
    return 0 if padding is None else padding + 1


def _positions(
    raw: Mapping[str, Any], family: EncoderFamily, layers: int, max_positions: int
) -> tuple[tuple[int | None, ...], tuple[RopeConfig | None, ...]]:
    """Windows and rotations of the layers; ModernBERT has two kinds of them."""
    if not family.windows:
        return (None,) * layers, (_rope(raw, family, max_positions) if family.rotary else None,) * layers
    every = raw.get("global_attn_every_n_layers", 3)
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if index % every else "full_attention" for index in range(layers)]
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer_types must name full_attention or sliding_attention for {layers} layers")
    given = raw.get("rope_parameters") or {}
    ropes = {}
    for kind, field, theta in (
        ("full_attention", "global_rope_theta", 160000.0),
        ("sliding_attention", "local_rope_theta", 10000.0),
    ):
        settings = {"rope_theta": raw.get(field) or theta, **(raw.get("rope_scaling") or {}), **(given.get(kind) or {})}
        ropes[kind] = RopeConfig.parse({"rope_parameters": settings}, max_positions)
    window = positive_size({"local_attention": 128, **raw}, "local_attention") // 2
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows, tuple(ropes[kind] for kind in kinds)


def _rope(raw: Mapping[str, Any], family: EncoderFamily, max_positions: int) -> RopeConfig:
    """The rotation of layers that are all alike.

    GTE's NTK scaling (https://kexue.fm/archives/9706) makes all wavelengths longer, the longest by the factor: that is
    another base, and linear scaling by the rest.
    """
    found = optional_object(raw, "rope_scaling") or optional_object(raw, "rope_parameters")
    if not family.ntk or found.get("rope_type", found.get("type")) != "ntk":
        return RopeConfig.parse(raw, max_positions)
    unknown = [name for name, value in found.items() if value is not None and name not in _NTK]
    if unknown:
        raise UnsupportedModel(f"RoPE parameter {unknown[0]!r} is not supported for 'ntk'")
    factor, theta = found.get("factor"), found.get("rope_theta") or raw["rope_theta"]
    if not isinstance(factor, (int, float)) or not 1 <= factor <= _MOST_FACTOR:
        raise UnsupportedModel(f"RoPE parameter 'factor' must be from 1 to {_MOST_FACTOR} for 'ntk', got {factor!r}")
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    as_linear = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head_dim)}
    return RopeConfig.parse({"rope_parameters": as_linear}, max_positions)

"""An encoder's config.json, checked and made uniform over families."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.decoder_families import FAMILIES as DECODERS
from chairlift.folders.encoder_families import FAMILIES, EncoderFamily
from chairlift.folders.model_json import positive_size, read_model_json, values_checked
from chairlift.folders.sentence_files import LogitScore
from chairlift.ops.activation import ACTIVATIONS, Activation
from chairlift.runners.decoder.config import DecoderConfig
from chairlift.runners.decoder.rope import RopeConfig

# MPNet's table of relative biases. Distances from here on share MPNet's last bucket.
BUCKETS, BUCKET_DISTANCE = 32, 128

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


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What an encoder is built from.

    `first_position` is that of a text's first token. `windows` has for each layer how far a token sees to both sides,
    None for all; `ropes` its rotary embedding, None where there is none. `max_tokens` follows from the positions.
    """

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
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
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
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
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"model_type {name!r} is no supported encoder; these are: {', '.join(FAMILIES)}, and of decoders, which "
            f"embed too, {', '.join(DECODERS)}"
        )
    family = FAMILIES[name]
    _refuse_unknown(raw, family)
    # A copy in which the fields have BERT's names.
    raw = {**raw, **{common: raw[own] for common, own in family.fields.items() if own in raw}}
    hidden, heads = positive_size(raw, "hidden_size"), positive_size(raw, "num_attention_heads")
    if hidden % heads:
        raise UnsupportedModel(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    layers, max_positions = positive_size(raw, "num_hidden_layers"), positive_size(raw, "max_position_embeddings")
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
        type_vocab_size=positive_size(raw, "type_vocab_size") if family.types else 0,
        max_positions=max_positions,
        first_position=first,
        max_tokens=max_positions - first,
        eps=float(raw.get("layer_norm_eps", 1e-5 if family.rotary else 1e-12)),
        activation=_activation(raw),
        attention_bias=flag(family.attention_bias),
        mlp_bias=flag(family.mlp_bias),
        norm_bias=flag(family.norm_bias),
        head_bias=flag(family.head_bias),
        windows=windows,
        ropes=ropes,
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
    for name, neutral in _NEUTRAL.items():
        value = raw.get(name)
        if name == "position_embedding_type" and family.rotary:
            continue  # it is of positions in a table, of which there is none
        if value is not None and value != neutral:
            raise UnsupportedModel(f"{name}={value!r} is not supported; encoders with {name}={neutral!r} are")


def _activation(raw: Mapping[str, Any]) -> Activation:
    name = raw.get("hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {name!r} is not supported; these are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


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
    if not family.rotary:
        return (None,) * layers, (None,) * layers
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

"""A language model that transformers computes: what its config.json says of it. Without torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.errors import UnsupportedModel
from chairlift.folders.decoder_families import FAMILIES
from chairlift.folders.model_json import positive_size, values_checked
from chairlift.folders.multimodal import multimodal_of
from chairlift.folders.quantization_config import QuantizationConfig, parse_quantization

_NAME = re.compile(r"[\w-]+")
# What families call the same things.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_ORIGINAL = "original_max_position_embeddings"
_GENERATES = ("ForCausalLM", "LMHeadModel")
# Families that read images too, of which the part for texts is served.
_READ_MORE = {"gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe", "lfm2_vl"}
# With slopes in place of positions, whatever their folders say.
_SLOPED = ("bloom", "mpt")
_NOT_TAKEN_OVER = "their attention can't be taken over"
# Tokens of a sequence where a model has states alone, and so no bound.
_UNBOUNDED = 32768
# Layers with keys and values, those with states, those with both, and those that only have an MLP.
_LAYERS_KNOWN = {
    *("full_attention", "sliding_attention", "attention"),
    *("linear_attention", "conv", "mamba", "mamba2"),
    *("hybrid", "hybrid_sliding"),
    *("mlp", "moe"),
}


class Refused(NamedTuple):
    """Families that can't be served: what they have, why that is refused, and their models by `model_type`."""

    what: str
    why: str
    models: Mapping[str, str]


# Those that the checks at loading would refuse: said by config.json, before any weights are read. docs/models.md is
# written from this.
REFUSED = (
    Refused(
        "an attention that chooses what it looks at",
        "there is no kernel for it",
        {"deepseek_v32": "DeepSeek V3.2", "glm_moe_dsa": "GLM 5"},
    ),
    Refused("layers that share one attention", _NOT_TAKEN_OVER, {"zamba": "Zamba", "zamba2": "Zamba 2"}),
)


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """What must be known before the model is loaded; all else is what transformers makes of the folder."""

    model_type: str
    vocab_size: int
    head_dim: int
    max_positions: int
    dtype: str
    # How projections are packed in its files.
    packing: QuantizationConfig | None = None


@values_checked()
def parse_transformers(raw: Mapping[str, Any]) -> TransformersConfig:
    """Check a parsed config.json. Raises UnsupportedModel for what transformers can't have served here either."""
    name = raw.get("model_type")
    if not isinstance(name, str) or not name:
        raise UnsupportedModel(f"model_type {name!r} is not supported; these are: {', '.join(FAMILIES)}")
    refuse_known(raw)
    if raw.get("alibi") or name in _SLOPED:
        what = f"alibi={raw['alibi']!r}" if raw.get("alibi") else f"model_type {name!r}"
        raise UnsupportedModel(
            f"{what} means slopes in place of positions, which native kernels alone compute, of the families "
            f"{', '.join(_SLOPED)} and falcon"
        )
    if find_spec("transformers") is None:
        problem = f"is not supported by native kernels, which know {', '.join(FAMILIES)}"
        if name in FAMILIES:
            problem = "is not computed by native kernels as it is here"
        raise UnsupportedModel(
            f"model_type {name!r} {problem}; pip install 'chairlift[transformers]' has transformers compute it"
        )
    if raw.get("auto_map") and not _is_known(name):
        own = f"and transformers has no {name!r} of its own"
        raise UnsupportedModel(f"auto_map names code in the model's folder, which is never run, {own}")
    packing = parse_quantization(raw)
    raw = _text_part(raw)
    if raw.get("is_causal") is False:
        # Only masks say so, of which none is made here.
        raise UnsupportedModel(
            "is_causal=False is not supported through transformers: tokens would see only those before them"
        )
    names = raw.get("architectures") or []
    if not any(each.endswith(_GENERATES) for each in names):
        raise UnsupportedModel(f"model_type {name!r} with architectures {names}: none writes texts (ForCausalLM)")
    unlike = sorted(set(raw.get("layer_types") or raw.get("layers_block_type") or ()) - _LAYERS_KNOWN)
    if unlike or raw.get("attention_chunk_size") is not None:
        raise UnsupportedModel(f"layers of type {unlike[0] if unlike else 'chunked_attention'!r} are not supported")
    if not isinstance(raw.get("layers_block_type"), list):
        _first(raw, _LAYERS)
    recurrent = all(raw.get(name) is None for name in (*_POSITIONS, "num_attention_heads"))
    return TransformersConfig(
        model_type=name,
        vocab_size=_first(raw, ("vocab_size",)),
        head_dim=0 if recurrent and not any(map(raw.get, _HEADS)) else _head_dim(raw),
        max_positions=_UNBOUNDED if recurrent else _max_positions(raw),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        packing=packing or parse_quantization(raw),
    )


def refuse_known(raw: Any) -> None:
    """Raise UnsupportedModel for what transformers computes by an attention of its own, and nothing here does.

    `raw` is what a config.json holds, whatever that is.
    """
    if not isinstance(raw, dict):
        return
    name = raw.get("model_type")
    for what, why, models in REFUSED:
        if isinstance(name, str) and name in models:
            raise UnsupportedModel(f"model_type {name!r} is not supported: it has {what}, and {why}")


def _is_known(model_type: str) -> bool:
    """Whether transformers has a family of that name, which it then takes rather than code in the folder."""
    spec = find_spec("transformers")
    package = spec.submodule_search_locations if spec is not None else None
    if not package or not _NAME.fullmatch(model_type):
        return False
    return (Path(package[0]) / "models" / model_type.replace("-", "_")).is_dir()


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says of the part that reads and writes texts, where a model reads more than those."""
    text = raw.get("text_config")
    if raw.get("model_type") not in _READ_MORE or not isinstance(text, dict):
        return raw
    kept = {name: raw[name] for name in ("dtype", "torch_dtype") if name in raw}
    left_out = multimodal_of(raw)
    whole = text if left_out is None else left_out.text_config(raw)
    return {**kept, **whole, "architectures": [_GENERATES[0]]}


def _max_positions(raw: Mapping[str, Any]) -> int:
    """As far as one and the same list of frequencies goes: of two, transformers takes one for all that a step holds."""
    most = _first(raw, _POSITIONS)
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
            original = rope.get(_ORIGINAL) if raw.get(_ORIGINAL) is None else raw[_ORIGINAL]
            return most if original is None else min(most, positive_size({_POSITIONS[0]: original}, _POSITIONS[0]))
    return most


def _head_dim(raw: Mapping[str, Any]) -> int:
    hidden, heads = _first(raw, _HIDDEN), _first(raw, _HEADS)
    if raw.get("kv_lora_rank") is not None:
        # Keys that are made from a latent state have a part with positions, of which `head_dim` may speak alone.
        return _first(raw, ("qk_nope_head_dim",)) + _first(raw, ("qk_rope_head_dim",))
    return _first(raw, ("head_dim",)) if raw.get("head_dim") is not None else hidden // heads


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The value under the first of these names that is there, as large at most as the first one's may be."""
    found = next((raw[name] for name in names if raw.get(name) is not None), None)
    return positive_size({names[0]: found}, names[0])

"""The config.json that says what a GGUF file's metadata says."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import positive_size, values_checked
from chairlift.gguf.architecture import Architecture
from chairlift.gguf.architectures import CAUSAL, GROWTH, WINDOW, architecture_of
from chairlift.gguf.encoder_architecture import EncoderArchitecture
from chairlift.gguf.encoder_config import encoder_config
from chairlift.gguf.gguf_file import GgufFile, TensorPlace, shown
from chairlift.gguf.routed_experts import OPTIONAL

# Keys below the architecture's name, and fields of config.json.
_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Of these a file may list the value of each layer.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_REQUIRED = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
# Metadata that says of a model what nothing here computes, with the value at which it says nothing.
_REFUSED = {
    "attention.max_alibi_bias": 0,
    "attention.clamp_kqv": 0,
    GROWTH: 0,
    "ssm.conv_kernel": 0,
    "rope.scaling.yarn_log_multiplier": 0,
}
# What converters also write of models that have no such tensors, whose names have this part: of those of Granite 4 that
# are attention alone, and dense.
_OF_NO_TENSOR = {"ssm.conv_kernel": ".ssm_", "expert_shared_feed_forward_length": "_shexp."}
# What may be said of experts besides what becomes a field of config.json.
_NEUTRAL = {"expert_gating_func": 1, "expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_scale": 1}
# Numbers of the types that pack nothing.
_FLOAT32, _FLOAT16, _BFLOAT16 = 0, 1, 30
# Tensors that stretch rotations.
FACTORS = _FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_PATTERN, _WINDOW_BASE = "attention.sliding_window_pattern", "rope.freq_base_swa"
_FACTOR, _YARN_FACTOR = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
_EXTRAPOLATED, _ORIGINAL = "rope.scaling.yarn_ext_factor", "rope.scaling.original_context_length"
_OF_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    _ORIGINAL: "original_max_position_embeddings",
    "rope.scaling.mscale": "mscale",
    "rope.scaling.mscale_all_dim": "mscale_all_dim",
    "rope.scaling.query_growth": "llama_4_scaling_beta",
}
# Gemma's largest, by their layers, scale their scores by what their hidden size has for a head.
_LARGEST = {"gemma2": 46, "gemma3_text": 62}


@values_checked()
def config_of(file: GgufFile) -> dict[str, Any]:
    """Return a config.json. Raises UnsupportedModel naming the key or tensor at fault."""
    known = architecture_of(file.metadata, file.tensors)
    if not isinstance(known, EncoderArchitecture):
        return _decoder_config(file, known)
    made = encoder_config(file, known)
    return made | {"torch_dtype": dtype_of(file.tensors["token_embd.weight"], file.tensors.values())}


def _decoder_config(file: GgufFile, known: Architecture) -> dict[str, Any]:
    prefix = f"{file.metadata['general.architecture']}."
    told = known.dialect(_told(file, prefix, known.keys), prefix)
    for key, neutral in (_REFUSED | dict(known.switches)).items():
        if told.get(key, neutral) != neutral:
            raise _not_computed(prefix, key, told)
    _check_experts(told, prefix, {*known.keys, *known.switches})
    for key in (*_REQUIRED, *(key for key in known.keys if key.startswith("expert_") and key not in OPTIONAL)):
        if not told.get(key):
            raise UnsupportedModel(f"{prefix}{key} is missing in {file.path.name}, or 0")
    found = {name: told[key] for key, name in (_FIELDS | dict(known.keys)).items() if told.get(key)}
    for name, value in found.items():
        if isinstance(value, list | str):
            said = "which is not one number for all layers"
            raise UnsupportedModel(f"{name} of {file.path.name} is {shown(value)}, {said}")
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise UnsupportedModel(f"tensor 'token_embd.weight' is missing in {file.path.name}")
    heads = found["num_attention_heads"]
    head_dim = told.get("attention.key_length") or found["hidden_size"] // max(int(heads), 1)
    if told.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{prefix}attention.value_length differs from attention.key_length")
    factors = {name: file.floats(name) for name in FACTORS if name in file.tensors}
    rotation = _rotation(told, prefix, head_dim, factors)
    if known.scaling and "rope_scaling" in rotation:
        rotation["rope_scaling"] |= known.scaling
    return {
        "model_type": known.model_type,
        "architectures": ["GgufForCausalLM"],
        "vocab_size": embeddings.shape[0],
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": head_dim,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **dict.fromkeys(known.present.values(), False),
        **{field: True for name, field in known.present.items() if f"blk.0.{name}" in file.tensors},
        **{field: f"blk.0.{name}" not in file.tensors for name, field in known.absent.items()},
        "torch_dtype": dtype_of(embeddings, file.tensors.values()),
        **known.fields,
        **_score_scale(known.model_type, found, head_dim),
        **found,
        **_windows(told, prefix, known),
        **_direction(told, prefix, known),
        **rotation,
    }


def _direction(told: Mapping[str, Any], prefix: str, known: Architecture) -> dict[str, Any]:
    """Whether tokens see what follows them, where that is not the architecture's own."""
    causal = told.get(CAUSAL, True)
    if CAUSAL in known.switches or causal is True:
        return {}
    # Where windows have an end behind a token as well, and where not, programs differ.
    if causal is not False or told.get(WINDOW):
        raise _not_computed(prefix, CAUSAL, told)
    return {"is_causal": False}


def _told(file: GgufFile, prefix: str, read: Collection[str]) -> dict[str, Any]:
    """What a file says below its architecture's name, as far as it has tensors for it."""
    told = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key, part in _OF_NO_TENSOR.items():
        if key not in read and not any(part in name for name in file.tensors):
            told.pop(key, None)
    layers = told.get("block_count")
    return told | {key: same_in_all(told[key], layers) for key in _PER_LAYER if key in told}


def same_in_all(value: Any, layers: Any) -> Any:
    """The number that a list has for each of so many layers; what is no such list as it is."""
    is_same = isinstance(value, list) and len(value) == layers and len(set(value)) == 1
    return value[0] if is_same else value


def dtype_of(embeddings: TensorPlace, tensors: Iterable[TensorPlace]) -> str:
    """The type of a folder with such tensors. What is packed has fewer digits than bfloat16."""
    if embeddings.kind == _FLOAT32:
        return "float32"
    plain = all(tensor.kind in (_FLOAT32, _FLOAT16, _BFLOAT16) for tensor in tensors)
    return "float16" if embeddings.kind == _FLOAT16 and plain else "bfloat16"


def _check_experts(told: Mapping[str, Any], prefix: str, read: Collection[str]) -> None:
    """Raise UnsupportedModel for what a file says of experts that would be computed otherwise here."""
    for key, value in told.items():
        if key.startswith("expert_") and key not in read and value and value != _NEUTRAL.get(key):
            raise _not_computed(prefix, key, told)


def _not_computed(prefix: str, key: str, told: Mapping[str, Any]) -> UnsupportedModel:
    return UnsupportedModel(f"{prefix}{key} = {shown(told[key])} in a GGUF file: nothing here computes that")


def _windows(told: Mapping[str, Any], prefix: str, known: Architecture) -> dict[str, Any]:
    """Which layers have a window. Raises UnsupportedModel where layers of this architecture have none."""
    if not told.get(WINDOW):
        # Gemma 3's config.json would mean windows by saying nothing.
        return {"sliding_window_pattern": 1} if known.model_type == "gemma3_text" else {}
    if WINDOW not in known.keys:
        raise _not_computed(prefix, WINDOW, told)
    base = told.get(_WINDOW_BASE)
    if base is not None and _WINDOW_BASE not in known.keys and base != told.get("rope.freq_base"):
        raise _not_computed(prefix, _WINDOW_BASE, told)
    pattern, layers = told.get(_PATTERN), positive_size({"num_hidden_layers": told["block_count"]}, "num_hidden_layers")
    if pattern is None:
        return {}
    if isinstance(pattern, int):
        # All but the last of so many have one.
        pattern = [not pattern or layer % pattern < pattern - 1 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise UnsupportedModel(f"{prefix}{_PATTERN} = {shown(pattern)} is not for {layers} layers")
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}


def _score_scale(model_type: str, found: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    if model_type not in ("gemma2", "gemma3_text"):
        return {}
    is_largest = found["num_hidden_layers"] == _LARGEST[model_type]
    return {"query_pre_attn_scalar": found["hidden_size"] // found["num_attention_heads"] if is_largest else head_dim}


def _rotation(
    told: Mapping[str, Any], prefix: str, head_dim: int, factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """How positions are scaled, and how much of a head is rotated."""
    share: dict[str, Any] = {}
    turned = told.get("rope.dimension_count", head_dim)
    if turned != head_dim:
        share = {"partial_rotary_factor": turned / head_dim}
    # Older files have the factor alone, by another name.
    factor = told.get("rope.scaling.factor") or told.get("rope.scale_linear") or 1.0
    kind = told.get("rope.scaling.type", "linear")
    extrapolated = told.get(_EXTRAPOLATED)
    # Below 0 it is what the rule has anyway.
    if extrapolated is not None and extrapolated >= 0 and extrapolated != (kind == "yarn"):
        raise _not_computed(prefix, _EXTRAPOLATED, told)
    positions, attention = told["context_length"], told.get(_FACTOR) or 1.0
    original = told.get(_ORIGINAL, positions)
    if _FREQUENCIES in factors:
        # Factors for each wavelength, which were made from another rule: the same for texts of any length.
        same = factors[_FREQUENCIES]
        scaling: dict[str, Any] = {"short_factor": same, "long_factor": same, "attention_factor": attention}
        return share | _longrope(positions, scaling)
    if _LONG in factors and _SHORT in factors:
        scaling = {"long_factor": factors[_LONG], "short_factor": factors[_SHORT]}
        if told.get(_FACTOR):
            scaling["attention_factor"] = attention
        return share | _longrope(original, scaling)
    if kind != "yarn" and attention != 1:
        raise _not_computed(prefix, _FACTOR, told)
    if kind == "none" or (kind == "linear" and factor == 1):
        return share
    if kind == "linear":
        return share | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        return share | {"rope_scaling": {"rope_type": "yarn", "factor": factor, **_yarn(told, factor, attention)}}
    raise UnsupportedModel(f"{prefix}rope.scaling.type {shown(kind)} of a GGUF file is not read")


def _yarn(told: Mapping[str, Any], factor: float, attention: float) -> dict[str, Any]:
    """What a file says of YaRN besides the factor."""
    found = {name: told[key] for key, name in _OF_YARN.items() if key in told}
    given = told.get(_YARN_FACTOR) or 1.0
    if given * attention != 1:
        found["attention_factor"] = attention * yarn_attention(factor, given)
    return found


def yarn_attention(factor: float, given: float) -> float:
    """By how much YaRN scales what is rotated, where a file says this of it.

    Converters write `attention_factor` by that name, which is above 1 and stands for all, and `attn_factor`, which is 1
    or below and changes what is usual.
    """
    return given if given > 1 else given * (0.1 * math.log(max(factor, 1.0)) + 1.0)


def _longrope(original: int, scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": original, **scaling}}

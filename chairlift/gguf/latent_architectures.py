"""Architectures with latent attention: DeepSeek's, whose files have several models' names in one, and MiniCPM 3."""

from collections.abc import Collection, Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.architecture import Architecture, Told
from chairlift.gguf.gguf_file import shown
from chairlift.gguf.routed_experts import (
    OF_SIGMOIDS,
    ROUTED_EXPERTS,
    ROUTED_FIELDS,
    ROUTED_KEYS,
    without_layers_ahead,
)

_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # In one tensor, as older files have it, or in two.
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_HEADS, _KEY_HEADS, _ROTATED = "attention.head_count", "attention.head_count_kv", "rope.dimension_count"
_KEY, _VALUE = "attention.key_length", "attention.value_length"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# Keys that no file has: what is left of a head's keys, and its values.
_PLAIN, _OF_VALUES = "plain_length", "value_length"
_KEYS = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    _ROTATED: "qk_rope_head_dim",
    _PLAIN: "qk_nope_head_dim",
    _OF_VALUES: "v_head_dim",
}


def latent(told: Told, prefix: str) -> Told:
    """What a file says of heads, of which it has the sizes that are kept of a token, and behind `_mla` each head's own.

    Older files have the latter alone. Raises UnsupportedModel naming the key.
    """
    whole, rotated, value = (_size(told, prefix, key) for key in (_KEY, _ROTATED, _VALUE))
    if whole <= rotated:
        raise UnsupportedModel(f"{prefix}{_KEY} ({whole}) must be more than {_ROTATED} ({rotated})")
    key_heads = told.get(_KEY_HEADS)
    # One, if what is kept of a token is meant by it.
    if key_heads not in (None, 1, told.get(_HEADS)):
        raise UnsupportedModel(f"{prefix}{_KEY_HEADS} = {shown(key_heads)} in a GGUF file: nothing here computes that")
    sizes = {_KEY: rotated, _VALUE: rotated, _PLAIN: whole - rotated, _OF_VALUES: value}
    return {key: each for key, each in told.items() if key != _KEY_HEADS} | sizes


def _size(told: Told, prefix: str, key: str) -> int:
    found = told.get(f"{key}_mla") or told.get(key)
    if not isinstance(found, int) or found < 1:
        raise UnsupportedModel(f"{prefix}{key} = {shown(found)} in a GGUF file: it must be a size")
    return found


def _deepseek(told: Told, prefix: str) -> Told:
    """Of DeepSeek files say by how much scores grow where positions are stretched: a tenth of `mscale_all_dim`.

    `mscale`, of which they say nothing, is the same in all of its models.
    """
    found = dict(latent(without_layers_ahead(told, prefix), prefix))
    weight = found.pop(LOG_MULTIPLIER, None)
    if weight:
        found |= dict.fromkeys(("rope.scaling.mscale", "rope.scaling.mscale_all_dim"), round(10 * weight, 6))
    return found


def _minicpm(told: Told, prefix: str) -> Told:
    """Files don't say how large a head's values are: all together are as many numbers as a token has."""
    hidden, heads = told.get("embedding_length"), told.get(_HEADS)
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return latent(told, prefix)
    return latent({_VALUE: hidden // heads, **told}, prefix)


def _without_experts(told: Told, prefix: str) -> Told:
    """Files whose count of experts is none name the width of one all the same."""
    return {key: value for key, value in _deepseek(told, prefix).items() if not key.startswith("expert_")}


def _row(model_type: str, **more: Any) -> Architecture:
    fields = {"rope_interleave": True} | ROUTED_FIELDS | more.pop("fields", {})
    return Architecture(
        model_type,
        dialect=_deepseek,
        names=_NAMES | ROUTED_EXPERTS,
        present={},
        fields=fields,
        keys=_KEYS | ROUTED_KEYS,
        **more,
    )


# Only where there are groups does it matter how they are chosen, and then all models of this kind do it so.
DEEPSEEK2 = _row("deepseek_v2", fields={"topk_method": "group_limited_greedy"})
DEEPSEEK3 = _row("deepseek_v3", switches=OF_SIGMOIDS)
YOUTU = Architecture(
    "youtu", dialect=_without_experts, names=_NAMES, present={}, fields={"rope_interleave": True}, keys=_KEYS
)

# Of multipliers, and of the length before positions were stretched, files say nothing: the family's are taken, and the
# whole length, as llama.cpp does it.
MINICPM3 = Architecture("minicpm3", dialect=_minicpm, names=_NAMES, present={}, keys=_KEYS)


def deepseek_of(metadata: Mapping[str, Any], tensors: Collection[str]) -> Architecture:
    """Which of DeepSeek's models with experts a file is, by how it scores them.

    Not all files of GLM 4.7 Flash say so; but what corrects choices is there for scores of sigmoids alone.
    """
    corrected = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    return DEEPSEEK3 if metadata.get("deepseek2.expert_gating_func", 2 if corrected else 1) != 1 else DEEPSEEK2

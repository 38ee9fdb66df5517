"""What the config.json of a model with Mamba has, out of a GGUF file's metadata."""

from collections.abc import Sequence
from typing import NamedTuple

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.told_fields import Fields, attention_fields, expert_fields, optional_experts, plain_rotation
from chairlift.gguf.told_settings import ToldSettings

_EPS = "attention.layer_norm_rms_epsilon"
_KV, _WIDTH = "attention.head_count_kv", "feed_forward_length"
_ROTATED = "rope.scaling.finetuned"


class _Second(NamedTuple):
    """Sizes of Mamba 2: heads, the numbers of one, of all, of a state, groups, and how far a convolution sees."""

    heads: int
    head_dim: int
    inner: int
    state: int
    groups: int
    taps: int


def _second(told: ToldSettings) -> _Second:
    inner, heads = told.size("ssm.inner_size"), told.size("ssm.time_step_rank")
    groups = told.size("ssm.group_count", most=heads)
    if inner % heads or heads % groups:
        raise told.wrong("ssm.time_step_rank", f"not for {inner} numbers in {groups} groups")
    return _Second(heads, inner // heads, inner, told.size("ssm.state_size"), groups, told.size("ssm.conv_kernel"))


def _expansion(told: ToldSettings) -> int:
    """How many times as wide as a layer what Mamba computes is."""
    inner, hidden = told.size("ssm.inner_size"), told.size("embedding_length")
    if inner % hidden:
        raise told.wrong("ssm.inner_size", f"no multiple of {hidden}")
    return inner // hidden


def _has(file: GgufFile, ending: str) -> bool:
    return any(name.endswith(f".{ending}") for name in file.tensors)


def granite_hybrid(told: ToldSettings, file: GgufFile) -> Fields:
    """Granite 4 H, whose attention is not rotated."""
    heads, mamba = attention_fields(told), _second(told)
    told.must_be("attention.key_length", told.size("embedding_length") // heads["num_attention_heads"])
    count, used = optional_experts(told)
    if told.flag(_ROTATED, True):
        raise told.wrong(_ROTATED, "true, as of Bamba, which is not read")
    _refuse_scaling(told)
    width = told.size(_WIDTH)
    return {
        **heads,
        "position_embedding_type": None,
        "intermediate_size": width,
        "shared_intermediate_size": told.size("expert_shared_feed_forward_length", None if count else width),
        "num_local_experts": count,
        "num_experts_per_tok": min(used, count),
        "rms_norm_eps": told.number(_EPS),
        "attention_bias": _has(file, "attn_q.bias"),
        "attention_multiplier": told.number("attention.scale", heads["head_dim"] ** -0.5),
        "embedding_multiplier": told.number("embedding_scale", 1.0),
        "residual_multiplier": told.number("residual_scale", 1.0),
        "logits_scaling": told.number("logit_scale", 1.0),
        "layer_types": ["full_attention" if each else "linear_attention" for each in told.sizes(_KV)],
        **_mamba_fields(mamba, file),
        "mamba_expand": _expansion(told),
    }


def _refuse_scaling(told: ToldSettings) -> None:
    """Take no notice of a rotation that there is not, unless something of it is unusual."""
    told.must_be("rope.scaling.type", "none")
    for key in ("rope.freq_base", "rope.dimension_count"):
        told.has(key)


def _mamba_fields(mamba: _Second, file: GgufFile) -> Fields:
    return {
        "mamba_n_heads": mamba.heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.groups,
        "mamba_d_state": mamba.state,
        "mamba_d_conv": mamba.taps,
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }


def falcon_h1(told: ToldSettings, file: GgufFile) -> Fields:
    """Layers that have both. Its multipliers are within the weights, which were multiplied by them."""
    if "output.weight" not in file.tensors:
        problem = "its embeddings, which were multiplied by what no file says, are those of the last projection too"
        raise UnsupportedModel(f"tensor 'output.weight' is missing in {told.file_name}: {problem}")
    heads, mamba = attention_fields(told), _second(told)
    return {
        **heads,
        **plain_rotation(told, heads["head_dim"]),
        "intermediate_size": told.size(_WIDTH),
        "rms_norm_eps": told.number(_EPS),
        **_mamba_fields(mamba, file),
        "mamba_d_ssm": mamba.inner,
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_gate.bias"),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


def mamba2(told: ToldSettings, file: GgufFile) -> Fields:
    """States alone."""
    told.must_be("attention.head_count", 0)
    told.must_be(_WIDTH, 0)
    mamba = _second(told)
    return {
        "num_heads": mamba.heads,
        "head_dim": mamba.head_dim,
        "n_groups": mamba.groups,
        "state_size": mamba.state,
        "conv_kernel": mamba.taps,
        "expand": _expansion(told),
        "layer_norm_epsilon": told.number(_EPS),
        "use_bias": _has(file, "ssm_in.bias"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def nemotron_h(told: ToldSettings, file: GgufFile) -> Fields:
    """Layers that have one thing each: Mamba, attention, an MLP or experts."""
    heads, mamba = attention_fields(told), _second(told)
    # Nothing is rotated, and files say so.
    told.must_be(_ROTATED, False)
    _refuse_scaling(told)
    eps = _EPS if told.has(_EPS) else "attention.layer_norm_epsilon"
    widths = told.sizes(_WIDTH)
    kinds = [
        "full_attention" if kv else _mlp_of(layer, file) if width else "linear_attention"
        for layer, (kv, width) in enumerate(zip(told.sizes(_KV), widths, strict=True))
    ]
    width = max(widths) or 1
    if {*widths} - {0, width}:
        raise told.wrong(_WIDTH, "not one number for all layers that have any")
    return {
        **heads,
        "layers_block_type": kinds,
        "intermediate_size": width,
        "layer_norm_epsilon": told.number(eps),
        "mlp_hidden_act": "relu2",
        "mlp_bias": _has(file, "ffn_up.bias"),
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.groups,
        "ssm_state_size": mamba.state,
        "conv_kernel": mamba.taps,
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "use_bias": _has(file, "ssm_in.bias"),
        **(_nemotron_experts(told) if "moe" in kinds else {}),
    }


def _mlp_of(layer: int, file: GgufFile) -> str:
    return "moe" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "mlp"


def _nemotron_experts(told: ToldSettings) -> Fields:
    sigmoid = 2
    told.must_be("expert_gating_func", sigmoid)
    known = expert_fields(told)
    groups = told.size("expert_group_count", 1, most=known["num_experts"])
    latent = {"moe_latent_size": told.size("moe_latent_size")} if told.has("moe_latent_size") else {}
    return {
        "n_routed_experts": known["num_experts"],
        "num_experts_per_tok": known["num_experts_per_tok"],
        "moe_intermediate_size": known["moe_intermediate_size"],
        "n_shared_experts": told.size("expert_shared_count"),
        "moe_shared_expert_intermediate_size": told.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": told.flag("expert_weights_norm", False),
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": told.size("expert_group_used_count", 1, most=groups),
        **latent,
    }


def jamba(told: ToldSettings, file: GgufFile) -> Fields:
    """Mamba of the first version, attention and experts, which come in turns."""
    heads = attention_fields(told)
    told.must_be("attention.key_length", told.size("embedding_length") // heads["num_attention_heads"])
    count, used = optional_experts(told)
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(told.num_layers)]
    attention, experts = _turns(told, [kv > 0 for kv in told.sizes(_KV)]), _turns(told, routed)
    return {
        **heads,
        "intermediate_size": told.size(_WIDTH),
        "rms_norm_eps": told.number(_EPS),
        "num_experts": max(count, 1),
        "num_experts_per_tok": used if count > 1 else 1,
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
        "mamba_d_state": told.size("ssm.state_size"),
        "mamba_d_conv": told.size("ssm.conv_kernel"),
        "mamba_expand": _expansion(told),
        "mamba_dt_rank": told.size("ssm.time_step_rank"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }


def _turns(told: ToldSettings, layers: Sequence[bool]) -> tuple[int, int]:
    """Each how many layers it is so, and the first of them: beyond the last where there is none."""
    which = [layer for layer, is_so in enumerate(layers) if is_so]
    if not which:
        return len(layers) + 1, len(layers)
    period, first = which[1] - which[0] if len(which) > 1 else len(layers), which[0]
    if which != list(range(first, len(layers), period)) or first >= period:
        raise UnsupportedModel(f"layers with attention or experts in {told.file_name} don't come in equal turns")
    return period, first

"""The tensors of architectures that transformers computes: their names, and what converters change, changed back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift.gguf.hybrid_names import HybridNames, TensorChange
from chairlift.gguf.mamba_changes import FALCON_H1, GRANITE, JAMBA, MAMBA2, NEMOTRON
from chairlift.gguf.plain_changes import PLAIN_NAMES
from chairlift.gguf.tensor_forms import joined_experts, logarithm, lowered, of_one, with_channel
from chairlift.gguf.told_settings import ToldSettings

_SHORT_CONVOLUTIONS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_EMBEDDING = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_LFM2 = HybridNames(
    "lfm2",
    names=_SHORT_CONVOLUTIONS,
    whole=_EMBEDDING | {"token_embd_norm": "model.embedding_norm"},
    changes=(TensorChange("conv.conv.weight", ("conv.conv.weight",), with_channel),),
)


class _DeltaHeads(NamedTuple):
    """Of a layer with a delta rule: heads of keys and of values, and how many numbers each has."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


def _heads_of(told: ToldSettings) -> _DeltaHeads:
    values = told.size("ssm.time_step_rank")
    return _DeltaHeads(
        told.size("ssm.group_count"), values, told.size("ssm.state_size"), told.size("ssm.inner_size") // values
    )


def _grouped(rows: Tensor, heads: _DeltaHeads, width: int) -> Tensor:
    """Rows [V * width, ...] of heads of values in the order of their heads of keys, which files take in turns."""
    turns = rows.reshape(heads.values // heads.keys, heads.keys, width, *rows.shape[1:])
    return turns.transpose(0, 1).reshape(rows.shape)


def _grouped_behind_keys(rows: Tensor, told: ToldSettings) -> Tensor:
    """The same of rows that stand behind those of queries and of keys."""
    heads = _heads_of(told)
    first = 2 * heads.keys * heads.key_dim
    return torch.cat([rows[:first], _grouped(rows[first:], heads, heads.value_dim)])


def _grouped_values(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    heads = _heads_of(told)
    return _grouped(parts[0], heads, heads.value_dim)


def _grouped_scalars(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    return _grouped(parts[0], _heads_of(told), 1)


def _grouped_columns(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    return _grouped_values([parts[0].T], told).T


def _in_turns(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """Rows of queries, keys, values and gates for each head of keys, of those of all, one after the other."""
    heads, (qkv, gates) = _heads_of(told), parts
    keys = heads.keys * heads.key_dim
    rows = qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], gates
    return torch.cat([each.reshape(heads.keys, -1, each.shape[-1]) for each in rows], dim=1).flatten(0, 1)


_DELTA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_LIFTED = ("model.norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_OF_DELTA = (
    *(TensorChange(f"{norm}.weight", (f"{norm}.weight",), lowered) for norm in _LIFTED),
    TensorChange("mlp.experts.gate_up_proj", ("mlp.experts.gate.weight", "mlp.experts.up.weight"), joined_experts),
)
_WHOLE = _EMBEDDING | {"output_norm": "model.norm"}


_QWEN35 = HybridNames(
    "qwen3_5_text",
    names=_DELTA,
    whole=_WHOLE,
    changes=(
        *_OF_DELTA,
        of_one("linear_attn.in_proj_qkv.weight", lambda parts, told: _grouped_behind_keys(parts[0], told)),
        of_one("linear_attn.conv1d.weight", lambda parts, told: _grouped_behind_keys(parts[0], told).unsqueeze(1)),
        of_one("linear_attn.in_proj_z.weight", _grouped_values),
        of_one("linear_attn.in_proj_a.weight", _grouped_scalars),
        of_one("linear_attn.in_proj_b.weight", _grouped_scalars),
        of_one("linear_attn.A_log", lambda parts, told: _grouped_scalars([logarithm(parts, told)], told)),
        of_one("linear_attn.dt_bias", _grouped_scalars),
        of_one("linear_attn.out_proj.weight", _grouped_columns),
    ),
)
_QWEN3_NEXT = HybridNames(
    "qwen3_next",
    # Files of the first days have one projection.
    names=_DELTA | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
    whole=_WHOLE,
    changes=(
        *_OF_DELTA,
        TensorChange(
            "linear_attn.in_proj_qkvz.weight",
            ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
            _in_turns,
        ),
        of_one("linear_attn.conv1d.weight", with_channel),
        of_one("linear_attn.A_log", logarithm),
    ),
)
_GEMMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA_WHOLE = _WHOLE | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N = HybridNames(
    "gemma3n_text",
    names=_GEMMA_LAYER
    | {
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    whole=_GEMMA_WHOLE
    | {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
)
_GEMMA4 = HybridNames(
    "gemma4_text",
    names=_GEMMA_LAYER
    | {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_exps.weight": "experts.gate_proj",
        "ffn_up_exps.weight": "experts.up_proj",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    whole=_GEMMA_WHOLE,
    changes=(TensorChange("experts.gate_up_proj", ("experts.gate_proj", "experts.up_proj"), joined_experts),),
)

# By a file's `general.architecture`.
HYBRID_NAMES: dict[str, HybridNames] = {
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3next": _QWEN3_NEXT,
    "granitehybrid": GRANITE,
    "falcon-h1": FALCON_H1,
    "mamba2": MAMBA2,
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": NEMOTRON,
    "jamba": JAMBA,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    **PLAIN_NAMES,
}

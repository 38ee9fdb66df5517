"""Experts in GGUF files: what their tensors are called, and what files say of those of DeepSeek's kind."""

from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.architecture import Told
from chairlift.gguf.gguf_file import shown

# No known model has as many.
MOST_EXPERTS = 1024
# A tensor holds all experts, each of which has one of its own in a folder: in place of the braces is its number.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS = EXPERTS | {
    part: name.replace("shared_expert.", "shared_experts.") for part, name in EXPERTS.items() if "shexp" in part
}
# Of DeepSeek's kind, and layers that only guess the tokens after the next, which are left out as those of a folder are.
ROUTED_EXPERTS = SHARED_EXPERTS | {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"nextn.{part}": part for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
# What may be missing of the metadata that begins with `expert_`.
OPTIONAL = {f"expert_{part}" for part in ("shared_count", "weights_scale", "weights_norm", "group_count")}
OPTIONAL.add("expert_group_used_count")
_AHEAD = "nextn_predict_layers"
ROUTED_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    _AHEAD: "num_nextn_predict_layers",
}
# What it means to say nothing, in which files differ from a config.json. DeepSeek's first files say nothing of groups:
# then all experts are chosen from, as llama.cpp does it.
ROUTED_FIELDS: dict[str, Any] = {
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
# By llama.cpp's number: each expert's score is a sigmoid's.
OF_SIGMOIDS = {"expert_gating_func": 2}


def without_layers_ahead(told: Told, prefix: str) -> Told:
    """What a file says, the count of its layers without those that only guess."""
    ahead, layers = told.get(_AHEAD) or 0, told.get("block_count")
    if not isinstance(layers, int):
        return told
    if not isinstance(ahead, int) or not 0 <= ahead < layers:
        raise UnsupportedModel(
            f"{prefix}{_AHEAD} = {shown(ahead)} of {prefix}block_count = {shown(layers)} in a GGUF file: no such model "
            "is read"
        )
    return {**told, "block_count": layers - ahead}

"""What GGUF files call models, their tensors and settings, and what folders of Hugging Face call the same."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# A tensor holds all experts, each of which has one of its own in a folder: in place of the braces is its number.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
# No known model has as many.
_MOST_EXPERTS = 1024
_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures: the `model_type` of the same family, and what files of it do differently.

    Where queries and keys are `paired`, neighbours are rotated together, so their rows are in another order. `lift` is
    what was added to the weights of norms. `names` are those of a layer's tensors that differ, in full where a folder's
    has no ending. `fields` are more of config.json, `present` those of it that say whether layers have such a tensor,
    `absent` those that say whether they have none, and `keys` metadata that becomes such a field. `scaling` is what
    files leave out of YaRN. `switches` is metadata that changes what this architecture computes, with the value that is
    served.
    """

    model_type: str
    paired: bool = False
    lift: float = 0.0
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=lambda: {"attn_q.bias": "attention_bias"})
    absent: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, name: str) -> str:
        """What a folder calls a tensor of a file; as it is, if that is not known. Of experts' it has braces."""
        base, _, part = name.rpartition(".")
        if base in _WHOLE:
            return f"{_WHOLE[base]}.{part}"
        found = _LAYER.fullmatch(name)
        if found is None:
            return name
        number, base, part = found.groups()
        whole, known = self.names.get(f"{base}.{part}"), (_OF_A_LAYER | dict(self.names)).get(base)
        if whole is None and known is None:
            return name
        return f"model.layers.{number}.{whole or f'{known}.{part}'}"


_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
WINDOW = "attention.sliding_window"
_WINDOW = {WINDOW: "sliding_window"}
_SECOND = {"post_attention_norm": "post_attention_layernorm"}
_AFTER = _SECOND | {"post_ffw_norm": "post_feedforward_layernorm"}
_JOINT_MLP = {"ffn_up": "mlp.gate_up_proj"}
_LAYER_NORM_EPS = "attention.layer_norm_epsilon"
_COHERE = {_LAYER_NORM_EPS: "layer_norm_eps", "logit_scale": "logit_scale"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# Others only note by this how a model was trained.
_GRANITE_SWITCHES = {"rope.scaling.finetuned": True}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", paired=True),
    "qwen2": Architecture("qwen2", present={}),
    "qwen3": Architecture("qwen3"),
    "smollm3": Architecture("smollm3", paired=True),
    "granite": Architecture("granite", paired=True, keys=_GRANITE, switches=_GRANITE_SWITCHES),
    "olmo2": Architecture("olmo2", names=_AFTER),
    "phi3": Architecture("phi3", names=_JOINT_MLP, keys=_WINDOW),
    "glm4": Architecture(
        "glm4",
        names=_JOINT_MLP
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        # Of those that read images the rows of queries and keys are in another order.
        switches={"rope.dimension_sections": None},
    ),
    "exaone4": Architecture("exaone4", names=_AFTER, fields={"sliding_window": None}, keys=_WINDOW),
    "ernie4_5": Architecture("ernie4_5"),
    "seed_oss": Architecture(
        "seed_oss",
        names=_SECOND,
        present={"attn_q.bias": "attention_bias", "attn_output.bias": "attention_out_bias"},
    ),
    "command-r": Architecture("cohere", keys=_COHERE),
    "cohere2": Architecture("cohere2", keys=_COHERE | _WINDOW),
    "starcoder2": Architecture(
        "starcoder2",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields=_GELU | {"sliding_window": None},
        present={"attn_q.bias": "use_bias"},
        keys={_LAYER_NORM_EPS: "norm_epsilon"},
    ),
    "stablelm": Architecture(
        "stablelm",
        present={"attn_q.bias": "use_qkv_bias"},
        # Converters write that it is so wherever config.json says nothing.
        absent={"ffn_norm.weight": "use_parallel_residual"},
        keys={_LAYER_NORM_EPS: "layer_norm_eps"},
    ),
    "gemma": Architecture("gemma", lift=1.0, fields=_GELU),
    "gemma2": Architecture(
        "gemma2",
        lift=1.0,
        names=_GEMMA_NORMS,
        fields=_GELU,
        keys=_WINDOW,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        lift=1.0,
        names=_GEMMA_NORMS,
        fields=_GELU | {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
        keys=_WINDOW | {"rope.freq_base_swa": "rope_local_base_freq"},
    ),
}
# What files call OLMo 2, too, is this where there are windows.
_OLMO3 = Architecture("olmo3", names=_AFTER, keys=_WINDOW)


_OF_EXPERTS = {"expert_used_count": "num_experts_per_tok", "expert_count": "num_experts"}
_WITH_WIDTH = _OF_EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
# Those of files that count experts.
WITH_EXPERTS: dict[str, Architecture] = {
    "llama": Architecture("mixtral", paired=True, names=_MIXTRAL_EXPERTS, keys=_OF_EXPERTS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        names=_EXPERTS,
        keys=_WITH_WIDTH | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3moe": Architecture("qwen3_moe", names=_EXPERTS, keys=_WITH_WIDTH, fields={"norm_topk_prob": True}),
    "olmoe": Architecture("olmoe", names=_EXPERTS, keys=_OF_EXPERTS),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        names=_EXPERTS
        | {
            part: name.replace("shared_expert.", "shared_experts.")
            for part, name in _EXPERTS.items()
            if "shexp" in part
        }
        | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        fields={"moe_layer_start_index": 0},
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            # The same once more, for all of them.
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        names=_EXPERTS | _SECOND | {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"},
        keys=_WINDOW | _OF_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        scaling={"truncate": False},
    ),
    "granitemoe": Architecture(
        "granitemoe",
        paired=True,
        names=_EXPERTS | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        keys=_GRANITE | _OF_EXPERTS,
        switches=_GRANITE_SWITCHES,
    ),
}
# Those of models with states, whose rows are in hybrid_config.py and hybrid_changes.py.
WITH_STATES = (
    *("lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next"),
    *("granitehybrid", "falcon-h1", "mamba2", "nemotron_h", "nemotron_h_moe", "jamba"),
)


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture that a file's metadata names. Raises UnsupportedModel."""
    name = metadata.get("general.architecture")
    experts = metadata.get(f"{name}.expert_count") if isinstance(name, str) else None
    if experts is not None and not (isinstance(experts, int) and 0 <= experts <= _MOST_EXPERTS):
        raise UnsupportedModel(f"{name}.expert_count = {shown(experts)}: no more than {_MOST_EXPERTS} experts are read")
    table = WITH_EXPERTS if experts else ARCHITECTURES
    if not isinstance(name, str) or name not in table:
        kind = f"{shown(name)} with {shown(experts)} experts" if experts else shown(name)
        known = ", ".join([*table, *WITH_STATES])
        raise UnsupportedModel(f"general.architecture {kind} of a GGUF file is not read; these are: {known}")
    return _OLMO3 if name == "olmo2" and metadata.get(f"{name}.{WINDOW}") else table[name]

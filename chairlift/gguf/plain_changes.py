"""The tensors of architectures without states that transformers computes: their names, and what converters change."""

from chairlift.gguf.dense_fields import XIELU
from chairlift.gguf.hybrid_names import HybridNames, TensorChange, ToldTensor
from chairlift.gguf.tensor_forms import joined_experts

_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")} | {
    # Some converters put the three together.
    "attn_qkv": "self_attn.{}_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LAYER = _ATTENTION | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_UNGATED = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("up", "down")}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_OF_EXPERTS = (
    TensorChange("mlp.experts.gate_up_proj", ("mlp.experts.gate.weight", "mlp.experts.up.weight"), joined_experts),
)

# By a file's `general.architecture`.
PLAIN_NAMES: dict[str, HybridNames] = {
    "phi2": HybridNames(
        "phi",
        names=_LAYER | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        whole=_WHOLE | {"output_norm": "model.final_layernorm"},
    ),
    "nemotron": HybridNames("nemotron", lift=1.0, names=_LAYER | _UNGATED, whole=_WHOLE),
    "arcee": HybridNames("arcee", paired=True, names=_LAYER | _UNGATED, whole=_WHOLE),
    "hunyuan-dense": HybridNames(
        "hunyuan_v1_dense",
        names=_LAYER | _MLP | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        whole=_WHOLE,
    ),
    "apertus": HybridNames(
        "apertus",
        names=_LAYER | _QK_NORMS | _UNGATED | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        whole=_WHOLE,
        # The first two are parameters, the others buffers.
        told=tuple(
            ToldTensor(f"mlp.act_fn.{key.removeprefix('xielu.')}", key, (1,) if "alpha" in key else ()) for key in XIELU
        ),
    ),
    "phimoe": HybridNames(
        "phimoe",
        names=_LAYER | _EXPERTS | {"ffn_gate_inp": "mlp.router"},
        whole=_WHOLE,
        changes=_OF_EXPERTS,
    ),
    "minimax-m2": HybridNames(
        "minimax_m2",
        names=_LAYER | _QK_NORMS | _EXPERTS | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        whole=_WHOLE,
        changes=_OF_EXPERTS,
    ),
    "exaone-moe": HybridNames(
        "exaone_moe",
        names=_LAYER | _QK_NORMS | _MLP | _EXPERTS | _SHARED | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        whole=_WHOLE,
        changes=_OF_EXPERTS,
    ),
    "afmoe": HybridNames(
        "afmoe",
        names=_LAYER
        | _QK_NORMS
        | _MLP
        | _EXPERTS
        | _SHARED
        | {
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        whole=_WHOLE,
        changes=_OF_EXPERTS,
    ),
}

"""What GGUF files call models, their tensors and settings, and what folders of Hugging Face call the same."""

from collections.abc import Collection, Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.architecture import Architecture, Told
from chairlift.gguf.encoder_architectures import ENCODERS
from chairlift.gguf.gguf_file import shown
from chairlift.gguf.latent_architectures import DEEPSEEK2, LOG_MULTIPLIER, MINICPM3, YOUTU, deepseek_of
from chairlift.gguf.older_architectures import FALCON_TWO_NORMS, OLDER
from chairlift.gguf.routed_experts import (
    EXPERTS,
    MOST_EXPERTS,
    OF_SIGMOIDS,
    ROUTED_EXPERTS,
    ROUTED_FIELDS,
    ROUTED_KEYS,
    SHARED_EXPERTS,
    without_layers_ahead,
)

_GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
WINDOW, CAUSAL, GROWTH = "attention.sliding_window", "attention.causal", "attention.temperature_scale"
_WINDOW = {WINDOW: "sliding_window"}
_SECOND = {"post_attention_norm": "post_attention_layernorm"}
_AFTER = _SECOND | {"post_ffw_norm": "post_feedforward_layernorm"}
_JOINT_MLP = {"ffn_up": "mlp.gate_up_proj"}
_LAYER_NORM_EPS = "attention.layer_norm_epsilon"
_COHERE = {_LAYER_NORM_EPS: "layer_norm_eps", "logit_scale": "logit_scale"}
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GRANITE = _MULTIPLIERS | {"attention.scale": "attention_multiplier"}
# Others only note by this how a model was trained.
_GRANITE_SWITCHES = {"rope.scaling.finetuned": True}


def _ministral3(told: Told, prefix: str) -> Told:
    """Queries grow where positions are stretched, and what follows from `mscale_all_dim` goes by its other name."""
    if told.get("rope.scaling.type") != "yarn":
        raise UnsupportedModel(f"{prefix}{GROWTH} of a GGUF file is not read without {prefix}rope.scaling.type = yarn")
    found = {key: value for key, value in told.items() if key not in (GROWTH, LOG_MULTIPLIER)}
    if weight := told.get(LOG_MULTIPLIER):
        found |= {"rope.scaling.mscale": 1.0, "rope.scaling.mscale_all_dim": weight}
    return found | {"rope.scaling.query_growth": told[GROWTH]}


def _minicpm(told: Told, prefix: str) -> Told:
    """Scores are scaled as usual. What other scales older files leave out was written down in two ways."""
    for key in _MULTIPLIERS:
        if not told.get(key):
            raise UnsupportedModel(f"{prefix}{key} is missing in a GGUF file, or 0: convert the model again")
    hidden, heads, size = (
        told.get(key) for key in ("embedding_length", "attention.head_count", "attention.key_length")
    )
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModel(f"{prefix}attention.key_length = {shown(size)} in a GGUF file: it must be a size")
    return {**told, "attention.scale": size**-0.5}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", paired=True),
    # Those of Mistral Small; Ministral 3's say of their queries that they grow.
    "mistral3": Architecture("llama", paired=True),
    # Llama and Granite by other names. Of EXAONE's queries and keys converters don't change the order.
    "internlm2": Architecture("llama", paired=True),
    "exaone": Architecture("llama"),
    "minicpm": Architecture("granite", dialect=_minicpm, paired=True, keys=_GRANITE),
    "qwen2": Architecture("qwen2", present={}),
    "qwen3": Architecture("qwen3"),
    # The parts for texts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. All positions of a text's token are the same, so it does
    # not matter how frequencies are shared out among three.
    "qwen2vl": Architecture("qwen2", present={}),
    "qwen3vl": Architecture("qwen3"),
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
    # Of the models' own folders, and not of those for transformers, files have the joint projection.
    "chatglm": Architecture(
        "glm",
        names=_JOINT_MLP | {"attn_qkv": "self_attn.{}_proj"},
        present={"attn_q.bias": "attention_bias", "attn_qkv.bias": "attention_bias"},
    ),
    "olmo": Architecture("olmo", paired=True, keys={_LAYER_NORM_EPS: "rms_norm_eps"}),
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
    "gemma-embedding": Architecture(
        "gemma3_text",
        lift=1.0,
        names=_GEMMA_NORMS,
        fields=_GELU
        | {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "use_bidirectional_attention": True},
        keys=_WINDOW | {"rope.freq_base_swa": "rope_local_base_freq"},
        stages={"dense_2.weight": "2_Dense", "dense_3.weight": "3_Dense"},
        switches={CAUSAL: False},
    ),
    "deepseek2": YOUTU,
    "minicpm3": MINICPM3,
    **OLDER,
}
# What files call OLMo 2, too, is this where there are windows.
_OLMO3 = Architecture("olmo3", names=_AFTER, keys=_WINDOW)


_OF_EXPERTS = {"expert_used_count": "num_experts_per_tok", "expert_count": "num_experts"}
_WITH_WIDTH = _OF_EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
# Those of files that count experts.
_QWEN3_MOE = Architecture("qwen3_moe", names=EXPERTS, keys=_WITH_WIDTH, fields={"norm_topk_prob": True})
WITH_EXPERTS: dict[str, Architecture] = {
    "llama": Architecture("mixtral", paired=True, names=_MIXTRAL_EXPERTS, keys=_OF_EXPERTS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        names=EXPERTS,
        keys=_WITH_WIDTH | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "olmoe": Architecture("olmoe", names=EXPERTS, keys=_OF_EXPERTS),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        names=SHARED_EXPERTS | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
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
        names=EXPERTS | _SECOND | {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"},
        keys=_WINDOW | _OF_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        scaling={"truncate": False},
    ),
    "granitemoe": Architecture(
        "granitemoe",
        paired=True,
        names=EXPERTS | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        keys=_GRANITE | _OF_EXPERTS,
        switches=_GRANITE_SWITCHES,
    ),
    "deepseek2": DEEPSEEK2,
    "glm4moe": Architecture(
        "glm4_moe",
        dialect=without_layers_ahead,
        names=ROUTED_EXPERTS | _SECOND,
        fields=ROUTED_FIELDS,
        present={"attn_q.bias": "attention_bias", "attn_q_norm.weight": "use_qk_norm"},
        keys=ROUTED_KEYS,
        # Those that read images rotate by more than one position.
        switches=OF_SIGMOIDS | {"rope.dimension_sections": None},
    ),
    "dots1": Architecture(
        "dots1",
        dialect=without_layers_ahead,
        names=ROUTED_EXPERTS,
        fields=ROUTED_FIELDS | {"sliding_window": None},
        keys=ROUTED_KEYS,
        switches=OF_SIGMOIDS,
    ),
}
# Those whose files are told of, and changed back, by rows in hybrid_config.py, hybrid_changes.py and plain_changes.py,
# the first of them with states. Transformers computes most of them.
WITH_CHANGES = (
    *("lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next"),
    *("granitehybrid", "falcon-h1", "mamba2", "nemotron_h", "nemotron_h_moe", "jamba"),
    *("gemma3n", "gemma4"),
    *("phi2", "nemotron", "arcee", "hunyuan-dense", "apertus"),
    *("phimoe", "minimax-m2", "exaone-moe", "afmoe"),
)


_MINISTRAL3 = Architecture("ministral3", dialect=_ministral3, paired=True)


def architecture_of(metadata: Mapping[str, Any], tensors: Collection[str] = ()) -> Architecture:
    """The architecture that a file's metadata names; of some by its `tensors`, too. Raises UnsupportedModel."""
    name = metadata.get("general.architecture")
    experts = metadata.get(f"{name}.expert_count") if isinstance(name, str) else None
    if experts is not None and not (isinstance(experts, int) and 0 <= experts <= MOST_EXPERTS):
        raise UnsupportedModel(f"{name}.expert_count = {shown(experts)}: no more than {MOST_EXPERTS} experts are read")
    if isinstance(name, str) and name in ENCODERS:
        return ENCODERS[name]
    table = WITH_EXPERTS if experts else ARCHITECTURES
    if not isinstance(name, str) or name not in table:
        kind = f"{shown(name)} with {shown(experts)} experts" if experts else shown(name)
        known = ", ".join((*table, *WITH_CHANGES, *ENCODERS))
        raise UnsupportedModel(f"general.architecture {kind} of a GGUF file is not read; these are: {known}")
    if table[name] is DEEPSEEK2:
        return deepseek_of(metadata, tensors)
    if name == "mistral3" and metadata.get(f"{name}.{GROWTH}"):
        return _MINISTRAL3
    if name == "falcon" and "blk.0.attn_norm_2.weight" in tensors:
        return FALCON_TWO_NORMS
    return _OLMO3 if name == "olmo2" and metadata.get(f"{name}.{WINDOW}") else table[name]

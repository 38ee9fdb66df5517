"""The config.json of a model with states, which transformers computes, out of a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import values_checked
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.model_config import dtype_of
from chairlift.gguf.told_settings import ToldSettings

Fields = dict[str, Any]
_MOST_EXPERTS = 1024


class _Hybrid(NamedTuple):
    """A folder's `model_type`, and what its config.json has besides what those of all have."""

    model_type: str
    fields: Callable[[ToldSettings, GgufFile], Fields]


@values_checked()
def hybrid_config(file: GgufFile) -> Fields:
    """Return a config.json. Raises UnsupportedModel naming the key or tensor at fault."""
    told, row = ToldSettings(file.metadata, file.path.name), HYBRIDS[file.metadata["general.architecture"]]
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise UnsupportedModel(f"tensor 'token_embd.weight' is missing in {file.path.name}")
    told.must_be("attention.causal", True)
    found = {
        "model_type": row.model_type,
        "architectures": ["GgufForCausalLM"],
        "vocab_size": embeddings.shape[0],
        "hidden_size": told.size("embedding_length"),
        "num_hidden_layers": told.num_layers,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": dtype_of(embeddings, file.tensors.values()),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **row.fields(told, file),
    }
    told.refuse_unread()
    return found


def _attention(told: ToldSettings) -> Fields:
    """The heads of those layers that have keys and values, which is what makes them such."""
    hidden = told.size("embedding_length")
    heads = told.size("attention.head_count", most=hidden)
    head_dim = told.size("attention.key_length", hidden // heads)
    told.must_be("attention.value_length", head_dim)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": told.same("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": told.size("context_length"),
    }


def _rotation(told: ToldSettings) -> Fields:
    """A plain rotation of whole heads."""
    told.must_be("rope.scaling.type", "none")
    told.must_be("rope.scaling.factor", 1.0)
    told.has("rope.scaling.finetuned")
    return {"rope_theta": told.number("rope.freq_base", 1e4), "rope_type": "default"}


def _plain_rotation(told: ToldSettings, head_dim: int) -> Fields:
    told.must_be("rope.dimension_count", head_dim)
    return {"rope_parameters": _rotation(told)}


def _experts(told: ToldSettings) -> Fields:
    count = told.size("expert_count", most=_MOST_EXPERTS)
    return {
        "num_experts": count,
        "num_experts_per_tok": told.size("expert_used_count", most=count),
        "moe_intermediate_size": told.size("expert_feed_forward_length"),
    }


def _lfm2(told: ToldSettings, file: GgufFile) -> Fields:
    attention = _attention(told)
    told.must_be("attention.key_length", told.size("embedding_length") // attention["num_attention_heads"])
    kinds = ["full_attention" if each else "conv" for each in told.sizes("attention.head_count_kv")]
    return {
        **attention,
        **_plain_rotation(told, attention["head_dim"]),
        "intermediate_size": told.size("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": told.size("shortconv.l_cache"),
        "norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "layer_types": kinds,
    }


def _lfm2_moe(told: ToldSettings, file: GgufFile) -> Fields:
    sigmoid = 2
    if told.size("expert_gating_func") != sigmoid:
        raise told.not_computed("expert_gating_func")
    return {
        **_lfm2(told, file),
        **_experts(told),
        "num_dense_layers": told.size("leading_dense_block_count", 0, least=0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0),
    }


def _delta(told: ToldSettings, file: GgufFile) -> Fields:
    """Layers with a delta rule, all but some."""
    attention = _attention(told)
    head_dim, heads = attention["head_dim"], told.size("ssm.time_step_rank")
    turned = told.size("rope.dimension_count", head_dim, most=head_dim)
    # Which of a position's three numbers turn what: of texts all three are the same.
    told.has("rope.dimension_sections")
    keys, inner = told.size("ssm.group_count", most=heads), told.size("ssm.inner_size")
    if heads % keys or inner % heads:
        raise told.wrong("ssm.time_step_rank", f"not for {keys} heads of keys, and {inner} numbers of values")
    interval = told.size("full_attention_interval", 4)
    by_turns = [int((layer + 1) % interval > 0) for layer in range(told.num_layers)]
    recurrent = told.sizes("attention.recurrent_layers") if told.has("attention.recurrent_layers") else by_turns
    return {
        **attention,
        "rope_parameters": _rotation(told) | {"partial_rotary_factor": turned / head_dim},
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_conv_kernel_dim": told.size("ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": told.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
    }


def _delta_dense(told: ToldSettings, file: GgufFile) -> Fields:
    return {**_delta(told, file), "intermediate_size": told.size("feed_forward_length")}


def _delta_with_experts(told: ToldSettings, file: GgufFile) -> Fields:
    # That of MLPs in layers without experts, of which there are none.
    told.has("feed_forward_length")
    softmax = 1
    told.must_be("expert_gating_func", softmax)
    told.must_be("expert_weights_scale", 1.0)
    return {
        **_delta(told, file),
        **_experts(told),
        "shared_expert_intermediate_size": told.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


# By a file's `general.architecture`.
HYBRIDS: Mapping[str, _Hybrid] = {
    "lfm2": _Hybrid("lfm2", _lfm2),
    "lfm2moe": _Hybrid("lfm2_moe", _lfm2_moe),
    "qwen35": _Hybrid("qwen3_5_text", _delta_dense),
    "qwen35moe": _Hybrid("qwen3_5_moe_text", _delta_with_experts),
    "qwen3next": _Hybrid("qwen3_next", _delta_with_experts),
}

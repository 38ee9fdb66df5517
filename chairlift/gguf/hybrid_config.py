"""The config.json of a model with states, which transformers computes, out of a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import values_checked
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.model_config import dtype_of
from chairlift.gguf.told_settings import ToldSettings

Fields = dict[str, Any]


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
        "num_experts": told.size("expert_count", most=_MOST_EXPERTS),
        "num_experts_per_tok": told.size("expert_used_count", most=_MOST_EXPERTS),
        "moe_intermediate_size": told.size("expert_feed_forward_length"),
        "num_dense_layers": told.size("leading_dense_block_count", 0, least=0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0),
    }


_MOST_EXPERTS = 1024

# By a file's `general.architecture`.
HYBRIDS: Mapping[str, _Hybrid] = {"lfm2": _Hybrid("lfm2", _lfm2), "lfm2moe": _Hybrid("lfm2_moe", _lfm2_moe)}

"""Families whose config.json has other names for what the rest calls alike: made uniform before it is read."""

from collections.abc import Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_norms import LayerNorms
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import optional_object, positive_size


class NotNative(UnsupportedModel):
    """A model of a family that is native, but for something that this one has."""


def as_it_is(raw: Raw) -> Raw:
    """The names are the common ones."""
    return raw


def gemma(raw: Raw) -> Raw:
    """Gemma 1, whose first folders say "gelu" and mean the one by tanh."""
    return {**raw, "hidden_act": "gelu_pytorch_tanh"} if raw.get("hidden_act") == "gelu" else raw


def _refuse(raw: Raw, neutral: Mapping[str, Any], error: type[UnsupportedModel] = NotNative) -> None:
    """Raise the error if a field that changes the numbers has another value than the one that does not."""
    for name, value in neutral.items():
        if raw.get(name) not in (None, value):
            raise error(f"{name}={raw[name]!r} is not supported by the native kernels")


def _named(raw: Raw, names: Mapping[str, str]) -> dict[str, Any]:
    """The config with what it has of `names`, theirs by ours."""
    return {**raw, **{ours: raw[theirs] for ours, theirs in names.items() if raw.get(theirs) is not None}}


_GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_GPT_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


def gpt(raw: Raw) -> Raw:
    """GPT-2 and GPT BigCode: the sizes have short names, and the latter has one head of keys."""
    _refuse(raw, {"add_cross_attention": False, "scale_attn_weights": True, "multi_query": True})
    _refuse(raw, {"scale_attn_by_inverse_layer_idx": False})
    found = _named({**_GPT_SIZES, **raw}, _GPT_NAMES)
    found["intermediate_size"] = raw.get("n_inner") or _four_times(found)
    found["num_key_value_heads"] = 1 if raw["model_type"] == "gpt_bigcode" else None
    return found


def opt(raw: Raw) -> Raw:
    """OPT: the first ones of its size 350m norm what a layer gives, and project embeddings."""
    _refuse(raw, {"do_layer_norm_before": True, "_remove_final_layer_norm": False})
    _refuse(raw, {"layer_norm_elementwise_affine": True, "word_embed_proj_dim": raw.get("hidden_size")})
    found = _named(raw, {"intermediate_size": "ffn_dim"})
    return {**found, "layer_norm_eps": 1e-5, "num_key_value_heads": None}


_OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def granite4(raw: Raw) -> Raw:
    """Granite 4: layers have one MLP that is called shared, and some have experts besides."""
    _refuse(raw, {"hidden_act": "silu"})
    found = dict(raw)
    kinds = raw.get("layer_types") or raw.get("layers_block_type")
    found["layer_types"] = None if kinds is None else [_OLDER_KINDS.get(each, each) for each in kinds]
    found["shared_intermediate_size"] = raw.get("shared_intermediate_size", 1024)
    if not raw.get("num_local_experts", 8):
        found |= {"num_local_experts": None, "intermediate_size": found["shared_intermediate_size"]}
    return found


def qwen3_5(raw: Raw) -> Raw:
    """Qwen 3.5: positions have three numbers, which of texts are the same; and gates are of one kind."""
    _refuse(raw, {"hidden_act": "silu"})
    # Transformers reads it not at all, and would gate.
    _refuse(raw, {"attn_output_gate": True}, UnsupportedModel)
    found = {"intermediate_size": raw.get("moe_intermediate_size"), **raw}
    for name in ("rope_parameters", "rope_scaling"):
        rope = optional_object(raw, name)
        found[name] = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return found


def lfm2(raw: Raw) -> Raw:
    """LFM2: the first folders list the layers with attention, and of an MLP's size two thirds are meant."""
    found = _named({"intermediate_size": 12288, **raw}, {"intermediate_size": "block_ff_dim"})
    found["tie_word_embeddings"] = _ties_lfm2(raw)
    if raw.get("layer_types") is None and raw.get("full_attn_idxs") is not None:
        full, layers = set(raw["full_attn_idxs"]), range(positive_size(raw, "num_hidden_layers"))
        found["layer_types"] = ["full_attention" if layer in full else "conv" for layer in layers]
    if raw.get("block_auto_adjust_ff_dim", True):
        found["intermediate_size"] = _two_thirds(raw, positive_size(found, "intermediate_size"))
    return found


def lfm2_moe(raw: Raw) -> Raw:
    """LFM2 with experts, which are chosen with a bias."""
    _refuse(raw, {"use_expert_bias": True})
    return {"intermediate_size": 7168, **raw, "tie_word_embeddings": _ties_lfm2(raw)}


def _ties_lfm2(raw: Raw) -> bool:
    return bool(raw.get("tie_embedding", raw.get("tie_word_embeddings", True)))


def _two_thirds(raw: Raw, size: int) -> int:
    """Of a size, then multiplied and rounded up to whole multiples as config.json says."""
    size, factor = int(2 * size / 3), raw.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = positive_size({"block_multiple_of": 256, **raw}, "block_multiple_of")
    return multiple * -(-int(factor * size) // multiple)


def deepseek2(raw: Raw) -> Raw:
    """DeepSeek V2: experts are in groups only where the way in which they are chosen is by these."""
    _refuse(raw, {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1})
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise NotNative(f"topk_method={method!r} is not supported by the native kernels")
    return raw if method == "group_limited_greedy" else {**raw, "n_group": None, "topk_group": None}


def deepseek3(raw: Raw) -> Raw:
    """DeepSeek V3: its own code has fields for what V2 does otherwise."""
    _refuse(raw, {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1})
    return {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, **raw}


def glm4_lite(raw: Raw) -> Raw:
    """GLM 4.7 Flash: experts count more than in its larger relatives."""
    return {"routed_scaling_factor": 1.8, **raw}


def minicpm3(raw: Raw) -> Raw:
    """MiniCPM 3: multipliers go by the sizes of the model that its settings were found with (Hu et al., 2024)."""
    found = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, **raw}
    hidden, layers = positive_size(raw, "hidden_size"), positive_size(raw, "num_hidden_layers")
    depth, base = found.get("scale_depth", 1.4), found.get("dim_model_base", 256)
    found["embedding_multiplier"] = found.get("scale_emb", 12)
    found["residual_multiplier"] = 1.0 if depth is None else depth / layers**0.5
    found["logits_scaling"] = 1.0 if base is None else hidden / base
    if found.get("v_head_dim") is None:
        found["v_head_dim"] = hidden // positive_size(raw, "num_attention_heads")
    return {**found, "rope_interleave": False}


def gpt_neox(raw: Raw) -> Raw:
    """GPT-NeoX: which part of a head is rotated, and how fast, has older names."""
    found = _named(raw, {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"})
    return {**found, "num_key_value_heads": None}


def falcon(raw: Raw) -> Raw:
    """Falcon: heads of keys, of which the first ones have one, and whether both parts of a layer are side by side."""
    new, heads = bool(raw.get("new_decoder_architecture")), raw.get("num_attention_heads")
    found = {"max_position_embeddings": 2048, **raw}
    found["intermediate_size"] = raw.get("ffn_hidden_size") or _four_times(found)
    found["num_key_value_heads"] = raw.get("num_kv_heads") if new else 1 if raw.get("multi_query", True) else heads
    found["parallel_attn"] = new or bool(raw.get("parallel_attn", True))
    return found


def _four_times(raw: Raw) -> int:
    """The width of MLPs that say none."""
    return 4 * positive_size(raw, "hidden_size")


def falcon_norms(raw: Raw) -> LayerNorms:
    """Those side by side have one norm for both, or each its own."""
    if raw.get("new_decoder_architecture") and (raw.get("num_ln_in_parallel_attn") or 2) == 2:
        return LayerNorms("ln_attn", mlp_pre="ln_mlp")
    return LayerNorms(mlp_pre="input_layernorm") if raw["parallel_attn"] else LayerNorms()


def bloom(raw: Raw) -> Raw:
    """BLOOM: sizes have short names, and its folders seldom say how long texts may be."""
    _refuse(raw, {"apply_residual_connection_post_layernorm": False}, UnsupportedModel)
    found = _named(raw, {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"})
    found = {"max_position_embeddings": 2048, **_named(found, {"max_position_embeddings": "seq_length"})}
    return {**found, "intermediate_size": _four_times(found), "num_key_value_heads": None}


def mpt(raw: Raw) -> Raw:
    """MPT: sizes have short names, and attention has a config of its own."""
    attention = {f"attn_config.{name}": value for name, value in optional_object(raw, "attn_config").items()}
    switches = {"attn_type": "multihead_attention", "clip_qkv": None, "softmax_scale": None, "alibi": True}
    switches |= {"prefix_lm": False, "qk_ln": False}
    _refuse(attention, {f"attn_config.{name}": value for name, value in switches.items()}, UnsupportedModel)
    _refuse(raw, {"no_bias": True}, UnsupportedModel)
    if raw.get("norm_type") != "layernorm":
        _refuse(raw, {"norm_type": "low_precision_layernorm"}, UnsupportedModel)
    names = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    found = _named(raw, names | {"max_position_embeddings": "max_seq_len"})
    ratio = 4 if raw.get("expansion_ratio") is None else positive_size(raw, "expansion_ratio")
    found["intermediate_size"] = ratio * positive_size(found, "hidden_size")
    return {"max_position_embeddings": 2048, **found, "num_key_value_heads": None}


def cohere(raw: Raw) -> Raw:
    """Command R: some norm queries and keys, each head with weights of its own."""
    _refuse(raw, {"use_qk_norm": False})
    return raw


def stablelm(raw: Raw) -> Raw:
    """StableLM: the largest norm queries and keys, each head with weights of its own."""
    _refuse(raw, {"qk_layernorm": False})
    return raw


def stablelm_norms(raw: Raw) -> LayerNorms:
    """Those side by side have one norm for both."""
    return LayerNorms(mlp_pre="input_layernorm") if raw.get("use_parallel_residual") else LayerNorms()

"""What converters change of models with latent attention, or routed experts, and what they say of them."""

from typing import Any

import gguf
import torch

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 512,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_YARN |= {"beta_fast": 16.0, "beta_slow": 2.0}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
_ROUTED |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_hidden_layers": 3}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "head_dim": 16,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_GROUPS = {"n_group": 2, "topk_group": 1}
_V2 = _LATENT | _ROUTED | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}
# name: (model_type, config fields beside TINY), as in `support.gguf_files`.
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        _V2 | _GROUPS | {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    # Keys and values of a latent in one tensor, and nothing of groups.
    "deepseek_v2_older": ("deepseek_v2", _V2 | {"n_group": 1, "topk_group": 1}),
    "deepseek_v3": (
        "deepseek_v3",
        _LATENT
        | _ROUTED
        | _GROUPS
        | {"norm_topk_prob": True, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    # With a layer that only guesses the token after the next, and nothing of how experts are scored.
    "glm4_moe_lite_ahead": ("glm4_moe_lite", _LATENT | _ROUTED | {"norm_topk_prob": True}),
    "youtu": ("youtu", _LATENT | {"tie_word_embeddings": True}),
    "minicpm3": ("minicpm3", _LATENT | {"v_head_dim": None, "tie_word_embeddings": False}),
    "minicpm3_long": ("minicpm3", _LATENT | {"v_head_dim": None, "rope_parameters": _LONG}),
}
# Experts as those have them, and other attention.
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe_ahead": ("glm4_moe", _ROUTED | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_solar": (
        "glm4_moe",
        _ROUTED | _GROUPS | {"head_dim": 16, "rope_parameters": _PLAIN | {"partial_rotary_factor": 1.0}},
    ),
    "dots1": ("dots1", _ROUTED | {"head_dim": 16, "norm_topk_prob": True}),
}


def described(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json in whose place converters describe others: with one head of keys, which are kept of a token."""
    return config | {"num_key_value_heads": 1, "head_dim": None} if "kv_lora_rank" in config else config


def describe_latent(writer: gguf.GGUFWriter, config: dict[str, Any], older: bool) -> None:
    """Write what is said of latent attention."""
    plain, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if config["model_type"] == "minicpm3":
        _describe_minicpm(writer, config)
        return
    rank = config["kv_lora_rank"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(plain + rotated if older else rank + rotated)
    writer.add_value_length(value if older else rank)
    if not older:
        writer.add_key_length_mla(plain + rotated)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rotated)
    if (weight := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def _describe_minicpm(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def describe_routed(writer: gguf.GGUFWriter, config: dict[str, Any], older: bool) -> None:
    """Write what is said of experts beside what is said of all models', and of latent attention's lack of them."""
    count = config.get("n_routed_experts")
    writer.add_leading_dense_block_count(config["first_k_dense_replace"] if count else config["num_hidden_layers"])
    writer.add_expert_shared_count(config["n_shared_experts"] if count else 0)
    if not count:
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        return
    writer.add_expert_count(count)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if not older:
        writer.add_expert_group_count(config.get("n_group") or 1)
        writer.add_expert_group_used_count(config.get("topk_group") or 1)
    if config["model_type"] != "glm4_moe_lite" and not older:
        is_v2 = config["model_type"] == "deepseek_v2"
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if is_v2 else gguf.ExpertGatingFuncType.SIGMOID)


def in_halves(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What makes keys and values of a latent, taken apart, and for keys the other way round."""
    heads = tensor.view(config["num_attention_heads"], -1, tensor.shape[-1])
    keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    return {name.replace("kv_b_proj", "k_b_proj"): keys.transpose(1, 2), name.replace("kv_b_proj", "v_b_proj"): values}


def with_joint_rows(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, those of queries, keys and values in one."""
    found = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        # As the models' own folders call it.
        own = name.replace("model.layers", "encoder.layers").replace(
            "self_attn.q_proj", "self_attention.query_key_value"
        )
        found[own] = torch.cat(parts)
    return found


def with_layer_ahead(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The tensors, and another layer's, which only guesses the token after the next."""
    last, more = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    hidden = tensors["model.norm.weight"].shape[0]
    ahead = {name.replace(last, more): tensor for name, tensor in tensors.items() if name.startswith(last)}
    ahead |= {f"{more}{part}.weight": torch.ones(hidden) for part in ("enorm", "hnorm", "shared_head.norm")}
    words = torch.ones_like(tensors["model.embed_tokens.weight"])
    ahead |= {f"{more}{part}.weight": words for part in ("embed_tokens", "shared_head.head")}
    return tensors | ahead | {f"{more}eh_proj.weight": torch.ones(hidden, 2 * hidden)}

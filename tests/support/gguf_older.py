"""What converters change of models before Llama: the rows of joint projections, and projections that are transposed."""

from typing import Any

import gguf
import torch

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# name: (model_type, config fields beside TINY), as in `support.gguf_files`.
OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_serial": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": _PLAIN | {"partial_rotary_factor": 1.0},
        },
    ),
    "falcon": ("falcon", {"num_kv_heads": 1}),
    "falcon_two_norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_one_norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "bloom": ("bloom", {"seq_length": 512}),
    "mpt": ("mpt", {"max_seq_len": 512}),
    "mpt_steep": ("mpt", {"max_seq_len": 512, "attn_config": {"alibi_bias_max": 16}}),
}
# The architectures that files of them name.
OLDER_NAMES = {"gpt_bigcode": "starcoder", "gpt_neox": "gptneox"}
_SIZES = {
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads",),
}


def uniform(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes by the names that other families have for them, if it is a config of these."""
    if config["model_type"] not in {kind for kind, _ in OLDER.values()}:
        return config
    found = {"max_position_embeddings": 2048} | config
    for ours, theirs in _SIZES.items():
        found[ours] = next((config[name] for name in theirs if name in config), found.get(ours))
    keys = {"gpt_bigcode": 1, "falcon": config.get("num_kv_heads")}.get(config["model_type"])
    found["num_key_value_heads"] = keys or found["num_attention_heads"]
    found.setdefault("intermediate_size", 4 * found["hidden_size"])
    if config["model_type"] != "gpt_neox":
        found["intermediate_size"] = 4 * found["hidden_size"]
    found.pop("use_parallel_residual", None)
    return found


def describe_older(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write what is said beside sizes."""
    kind = config["model_type"]
    if "layer_norm_eps" not in config:
        writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))
    if kind == "gpt_neox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if kind == "falcon":
        writer.add_tensor_data_layout("jploski")
    if kind == "mpt":
        writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])


def as_written(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """A tensor as converters write it."""
    kind, sizes = config["model_type"], uniform(config)
    if kind == "gpt2" and ".h." in name and tensor.ndim == 2:
        return tensor.T
    if kind not in ("gpt_neox", "falcon", "bloom") or "query_key_value" not in name:
        return tensor
    groups = tensor.view(
        sizes["num_key_value_heads"], -1, sizes["hidden_size"] // sizes["num_attention_heads"], *tensor.shape[1:]
    )
    queries, keys, values = groups[:, :-2], groups[:, -2], groups[:, -1]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (queries, keys, values)])

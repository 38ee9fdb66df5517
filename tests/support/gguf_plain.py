"""GGUF files of small random models that transformers computes, and that have no states: what converters write of them.

They are told of as `convert_hf_to_gguf.py` tells of any model, and then of what is their own.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gguf
import torch
from support.gguf_files import describe_scaling, llama3_factors
from support.model_factory import TINY
from torch import Tensor

Config = dict[str, Any]
# Under the names that the package's map knows.
Named = Iterator[tuple[str, Tensor]]


class Written(NamedTuple):
    """How converters write a model: as which architecture, what they say of it, and what becomes of a tensor."""

    arch: str
    describe: Callable[[gguf.GGUFWriter, Config], None]
    change: Callable[[str, Tensor, Config], Named]


def describe_plain(writer: gguf.GGUFWriter, config: Config) -> None:
    """What is said of all by the names that their config.json has."""
    writer.add_block_count(config["num_hidden_layers"])
    sizes = {
        "max_position_embeddings": writer.add_context_length,
        "hidden_size": writer.add_embedding_length,
        "intermediate_size": writer.add_feed_forward_length,
        "num_attention_heads": writer.add_head_count,
        "num_key_value_heads": writer.add_head_count_kv,
        "vocab_size": writer.add_vocab_size,
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "head_dim": writer.add_key_length,
    }
    for field, add in sizes.items():
        if config.get(field) is not None:
            add(config[field])
    if config.get("head_dim"):
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    describe_scaling(writer, rope)
    if rope["rope_type"] != "dynamic":
        writer.add_rope_freq_base(rope["rope_theta"])


def _head_dim(config: Config) -> int:
    found: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return found


def _add_part_that_turns(writer: gguf.GGUFWriter, config: Config) -> None:
    share = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * _head_dim(config)))


def _describe_phi2(writer: gguf.GGUFWriter, config: Config) -> None:
    """Less than of others: neither how many words there are nor how fast heads are rotated."""
    assert config["intermediate_size"] == 4 * config["hidden_size"]
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    _add_part_that_turns(writer, config)
    writer.add_add_bos_token(False)


def _describe_nemotron(writer: gguf.GGUFWriter, config: Config) -> None:
    describe_plain(writer, config)
    # For both kinds of norms, as it is called `norm_eps`.
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_layer_norm_eps(config["norm_eps"])
    _add_part_that_turns(writer, config)
    if config["rope_parameters"]["rope_type"] == "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _describe_arcee(writer: gguf.GGUFWriter, config: Config) -> None:
    describe_plain(writer, config)
    writer.add_rope_dimension_count(_head_dim(config))


def _describe_hunyuan(writer: gguf.GGUFWriter, config: Config) -> None:
    """Where a base is stretched, files have the stretched one, and a length of their own."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    if rope["rope_type"] != "dynamic":
        describe_plain(writer, config)
        return
    describe_plain(writer, config | {"max_position_embeddings": 2**18})
    writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(2**18)


def _describe_phimoe(writer: gguf.GGUFWriter, config: Config) -> None:
    """As Phi 3, with experts."""
    describe_plain(writer, config)
    writer.add_rope_scaling_orig_ctx_len(config["max_position_embeddings"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_sliding_window(config["sliding_window"] or 0)


def _describe_minimax(writer: gguf.GGUFWriter, config: Config) -> None:
    describe_plain(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    _add_part_that_turns(writer, config)


def _describe_exaone(writer: gguf.GGUFWriter, config: Config) -> None:
    width, shared = config["moe_intermediate_size"], config["num_shared_experts"]
    describe_plain(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_shared_count(shared)
    writer.add_expert_shared_feed_forward_length(shared * width)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _describe_afmoe(writer: gguf.GGUFWriter, config: Config) -> None:
    """Which layers have a window is not said."""
    assert config["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    describe_plain(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["route_scale"])
    writer.add_sliding_window(config["sliding_window"])


def _change_plain(name: str, tensor: Tensor, config: Config) -> Named:
    """Nothing but the names of what corrects the choice of experts."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield name.replace(".expert_bias", ".expert_bias.bias"), tensor


def _change_nemotron(name: str, tensor: Tensor, config: Config) -> Named:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _change_arcee(name: str, tensor: Tensor, config: Config) -> Named:
    """Rows of queries and keys, so that neighbours are rotated together."""
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            tensor = tensor.view(config[heads], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    yield name, tensor
    yield from _with_factors(name, config)


def _change_apertus(name: str, tensor: Tensor, config: Config) -> Named:
    """What each layer's activation has is metadata."""
    if ".act_fn." not in name:
        yield name, tensor
    yield from _with_factors(name, config)


def _with_factors(name: str, config: Config) -> Named:
    rope = config["rope_parameters"]
    if name == "model.norm.weight" and rope["rope_type"] == "llama3":
        yield "rope_freqs.weight", torch.from_numpy(llama3_factors(rope, _head_dim(config)))


def add_xielu(writer: gguf.GGUFWriter, tensors: dict[str, Tensor]) -> None:
    """A list for each of what the activations of all layers have."""
    for part, add in (
        ("alpha_n", writer.add_xielu_alpha_n),
        ("alpha_p", writer.add_xielu_alpha_p),
        ("beta", writer.add_xielu_beta),
        ("eps", writer.add_xielu_eps),
    ):
        names = sorted(name for name in tensors if name.endswith(f".act_fn.{part}"))
        add([float(tensors[name].float().item()) for name in names])


_HEAD = {"head_dim": 16}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 20}
# name: (model_type, config fields)
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "phi2": ("phi", TINY | {"intermediate_size": 256, "num_key_value_heads": 4}),
    "nemotron_biased": ("nemotron", TINY | _BIASES | {"rope_parameters": _PLAIN | {"partial_rotary_factor": 0.25}}),
    "nemotron_linear": (
        "nemotron",
        TINY
        | _HEAD
        | {"rope_parameters": _PLAIN | {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5}},
    ),
    "arcee_yarn": ("arcee", TINY | {"rope_parameters": _YARN}),
    "arcee_llama3": ("arcee", TINY | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "arcee_biased": ("arcee", TINY | _BIASES | {"rope_parameters": _YARN | {"attention_factor": 1.3}}),
    "hunyuan": ("hunyuan_v1_dense", TINY | _HEAD | {"tie_word_embeddings": True}),
    "hunyuan_stretched": (
        "hunyuan_v1_dense",
        TINY | {"head_dim": 32, "rope_parameters": _PLAIN | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "apertus": ("apertus", TINY | {"rope_parameters": _LLAMA3}),
    "apertus_plain": ("apertus", TINY | {"rope_parameters": _PLAIN, "attention_bias": True}),
    "phimoe_biased": (
        "phimoe",
        TINY
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}
        | {"attention_bias": True, "lm_head_bias": True, "rope_parameters": _PLAIN},
    ),
    "phimoe_whole": ("phimoe", TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _PLAIN}),
    "minimax_m2_part": (
        "minimax_m2",
        TINY
        | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
        | {"rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "exaone_moe_four": (
        "exaone_moe",
        TINY | _FOUR | _EXPERTS | _HEAD | {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_shared_experts": 2},
    ),
    "exaone_moe_groups": (
        "exaone_moe",
        TINY
        | _FOUR
        | _EXPERTS
        | _HEAD
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "mlp_layer_types": ["sparse"] * 4}
        | {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "afmoe_four": (
        "afmoe",
        TINY | _FOUR | _EXPERTS | _HEAD | {"num_shared_experts": 2, "mup_enabled": True, "route_scale": 2.5},
    ),
}
WRITTEN_PLAIN = {
    "phi2": Written("phi2", _describe_phi2, _change_plain),
    "nemotron_biased": Written("nemotron", _describe_nemotron, _change_nemotron),
    "nemotron_linear": Written("nemotron", _describe_nemotron, _change_nemotron),
    "arcee_yarn": Written("arcee", _describe_arcee, _change_arcee),
    "arcee_llama3": Written("arcee", _describe_arcee, _change_arcee),
    "arcee_biased": Written("arcee", _describe_arcee, _change_arcee),
    "hunyuan": Written("hunyuan-dense", _describe_hunyuan, _change_plain),
    "hunyuan_stretched": Written("hunyuan-dense", _describe_hunyuan, _change_plain),
    "apertus": Written("apertus", _describe_arcee, _change_apertus),
    "apertus_plain": Written("apertus", _describe_arcee, _change_apertus),
    "phimoe_biased": Written("phimoe", _describe_phimoe, _change_plain),
    "phimoe_whole": Written("phimoe", _describe_phimoe, _change_plain),
    "minimax_m2_part": Written("minimax-m2", _describe_minimax, _change_plain),
    "exaone_moe_four": Written("exaone-moe", _describe_exaone, _change_plain),
    "exaone_moe_groups": Written("exaone-moe", _describe_exaone, _change_plain),
    "afmoe_four": Written("afmoe", _describe_afmoe, _change_plain),
}

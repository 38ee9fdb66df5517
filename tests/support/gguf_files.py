"""GGUF files of small random models, by the package's own writer, its names of tensors and its rounding."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from support.gguf_changes import (
    LATENT,
    ROUTED,
    describe_latent,
    describe_routed,
    described,
    in_halves,
    with_joint_rows,
    with_layer_ahead,
)
from support.gguf_older import OLDER, OLDER_NAMES, as_written, describe_older, uniform
from support.model_factory import TINY, randomize, temporary_root

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA = {"head_dim": 16, "tie_word_embeddings": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.25,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.6,
    "llama_4_scaling_beta": 0.7,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
# name: (model_type, config fields beside TINY). Sizes are multiples of 32, which blocks have.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biases": ("llama", {"attention_bias": True}),
    "llama_llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral3": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "ministral3": ("ministral3", {"head_dim": 32, "rope_parameters": _GROWING}),
    "internlm2": ("llama", {}),
    "exaone": ("llama", {"rope_parameters": _LLAMA3}),
    "minicpm": ("granite", _GRANITE | {"attention_multiplier": 0.25}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    # The parts for texts of models that read images.
    "qwen2vl": ("qwen2", {}),
    "qwen3vl": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": False}),
    "granite": ("granite", _GRANITE),
    # As files of Granite 4 have one that is dense: with keys of states and of experts, and heads by layers.
    "granite_4": ("granite", _GRANITE),
    "olmo2": ("olmo2", {}),
    # Only layers without a window are scaled.
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 20,
            "rope_parameters": {"sliding_attention": _PLAIN, "full_attention": _YARN},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 20}),
    "gemma": ("gemma", _GEMMA),
    "gemma2": (
        "gemma2",
        _GEMMA
        | {
            "query_pre_attn_scalar": 16,
            "sliding_window": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _GEMMA | {"num_hidden_layers": 7, "num_key_value_heads": 1, "query_pre_attn_scalar": 16, "sliding_window": 20},
    ),
    "gemma3_pattern": (
        "gemma3_text",
        _GEMMA
        | {
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 16,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "gemma3_full": ("gemma3_text", _GEMMA | {"query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 2}),
}
MODELS |= {
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-5}),
    "glm_joint": ("glm", {"head_dim": 16, "attention_bias": True}),
    "glm_unbiased_joint": ("glm", {"head_dim": 16, "attention_bias": False}),
    "olmo": ("olmo", {"num_key_value_heads": 2}),
    "exaone4": (
        "exaone4",
        {"num_hidden_layers": 3, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 20, "logit_scale": 0.25}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    # Others rotate a quarter of a head.
    "stablelm_whole": ("stablelm", {"partial_rotary_factor": 1.0}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Those with experts: the architecture that files of them name.
WITH_EXPERTS = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}
WITH_EXPERTS |= {"qwen3vlmoe": "qwen3vlmoe"}
WITH_EXPERTS |= {"granitemoe": "granitemoe", "ernie4_5_moe": "ernie4_5-moe", "gpt_oss": "gpt-oss"}
_GPT_OSS_ROPE = _YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
MODELS |= {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 96, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3vlmoe": ("qwen3_moe", _EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "granitemoe": ("granitemoe", _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3}
        | {"moe_num_shared_experts": 2},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 20}
        | {"rope_parameters": _GPT_OSS_ROPE},
    ),
}
# Those that embed, as their tokens see what follows them, too.
BOTH_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    # As embeddinggemma-300m: windows of both sides, and two projections behind pooling.
    "gemma_embedding": (
        "gemma3_text",
        _GEMMA
        | {"num_hidden_layers": 7, "num_key_value_heads": 1, "query_pre_attn_scalar": 16, "sliding_window": 20}
        | {"use_bidirectional_attention": True},
    ),
    "qwen2_both_ways": ("qwen2", {"is_causal": False}),
}
# With latent attention: the architecture that files of them name.
WITH_LATENT = dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2")
MODELS |= LATENT | ROUTED | OLDER
# Has names for layers that only guess, which the package has not of all that have such layers.
_AHEAD_OF = gguf.MODEL_ARCH.GLM4_MOE
# llama.cpp's converters turn the rows of queries and keys of these, and add one to the norms of those.
_PAIRED, _LIFTED = (
    ("llama", "smollm3", "granite", "granitemoe", "olmo", "mistral3", "internlm2", "minicpm"),
    ("gemma", "gemma2", "gemma3", "gemma-embedding"),
)
# Models whose files have a name of their own.
_BY_NAME = WITH_EXPERTS | {name: name for name in ("internlm2", "exaone", "minicpm", "qwen2vl", "qwen3vl")}
_BY_NAME |= {"gemma_embedding": "gemma-embedding"}
# Families that converters write as another.
_AS_ANOTHER = {
    "olmo3": "olmo2",
    "cohere": "command-r",
    "glm4_moe": "glm4moe",
    "glm": "chatglm",
    "mistral": "mistral3",
    "ministral3": "mistral3",
} | OLDER_NAMES
# Those whose frequencies are shared out among three positions.
_THREE_POSITIONS = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
# Those whose files say which layers have a window.
_WITH_PATTERN = ("olmo3", "gemma3_pattern", "exaone4")
# The package does not round to this one. Its blocks are as long as those whose bytes are taken for it.
_AS_BYTES_OF = {"IQ4_NL": "Q4_0"}


@functools.cache
def plain_folder(name: str) -> Path:
    """The model as a folder of Hugging Face."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = temporary_root() / f"for-gguf-{name}"
    model_type, fields = (MODELS | BOTH_WAYS)[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TINY | fields))
    randomize(model)
    model.save_pretrained(folder)
    return folder


@functools.cache
def gguf_file(name: str, kind: str = "F32", tensors_in_part: int = 0, pooling: int | None = None) -> Path:
    """The same model in a GGUF file, its matrices in a type of ggml; or the first of several with so many tensors.

    With a `pooling`, by llama.cpp's number, it is an embedder, and texts end with the end token.
    """
    pooled = "" if pooling is None else f"-pooled{pooling}"
    path = temporary_root() / f"{name}-{kind}{pooled}{tensors_in_part or ''}.gguf"
    own_config = json.loads((plain_folder(name) / "config.json").read_text())
    config = uniform(own_config)
    arch = _BY_NAME.get(name, config["model_type"].removesuffix("_text"))
    arch = WITH_LATENT.get(arch, arch)
    arch = _AS_ANOTHER.get(arch, arch)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    # With a layer more in those that have one ahead.
    maps = [gguf.get_tensor_name_map(each, config["num_hidden_layers"] + 1) for each in (number, _AHEAD_OF)]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_in_part)
    _describe_all(writer, name, config, own_config)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
        writer.add_add_eos_token(True)
    add_words(writer, config["vocab_size"])
    for own, tensor in _written(name, arch, config).items():
        own = f"{own}.weight" if own.endswith("sinks") else own.replace("correction_bias", "correction.bias")
        own = own.removeprefix("transformer.") if arch == "bloom" else own
        new = next(filter(None, (names.get_name(own, try_suffixes=(".weight", ".bias")) for names in maps)))
        array = tensor.float().squeeze() if "correction" in own else as_written(own, tensor.float(), own_config)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if arch in _PAIRED and part in own:
                array = array.view(config[heads], 2, -1, *array.shape[1:]).transpose(1, 2).reshape(array.shape)
        if arch in _LIFTED and own.endswith("norm.weight"):
            array = array + 1
        add(
            writer,
            new,
            array.numpy(),
            kind if array.ndim >= 2 and "gate_inp" not in new and not new.endswith(".bias") else "F32",
        )
    for each, tensor in projections().items() if name == "gemma_embedding" and pooling is not None else ():
        writer.add_dense_features_dims(each.removesuffix(".weight"), *tensor.shape[::-1])
        add(writer, each, tensor, kind)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for part in ("long", "short"):
            add(writer, f"rope_factors_{part}.weight", np.array(rope[f"{part}_factor"], np.float32))
    if rope.get("rope_type") == "llama3":
        add(writer, "rope_freqs.weight", llama3_factors(rope, config["hidden_size"] // config["num_attention_heads"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not tensors_in_part else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def projections() -> dict[str, NDArray[np.float32]]:
    """What embedders made of Gemma have behind pooling."""
    draw, size = np.random.default_rng(3), TINY["hidden_size"]
    shapes = {"dense_2.weight": (96, size), "dense_3.weight": (size, 96)}
    return {name: draw.standard_normal(shape, np.float32) / 8 for name, shape in shapes.items()}


def _describe_all(writer: gguf.GGUFWriter, name: str, config: dict[str, Any], own_config: dict[str, Any]) -> None:
    """Write what is said of a model, whose config.json is `own_config`, and made uniform `config`."""
    if name == "minicpm":
        # As they are for any model.
        del config["attention_multiplier"]
    is_ahead, is_old = name.endswith("_ahead"), name.endswith("_older")
    _describe(writer, described(config) | {"num_hidden_layers": config["num_hidden_layers"] + is_ahead})
    if is_ahead:
        writer.add_nextn_predict_layers(1)
    if "kv_lora_rank" in config:
        describe_latent(writer, config, is_old)
    if config["model_type"] in (*WITH_LATENT, "glm4_moe", "dots1"):
        describe_routed(writer, config, is_old)
    if name in OLDER:
        describe_older(writer, own_config)
    if name not in OLDER or config.get("rope_parameters"):
        _describe_rotation(writer, config, name in _WITH_PATTERN)
    if name in _WITH_PATTERN:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if name in _THREE_POSITIONS:
        writer.add_rope_dimension_sections([6, 5, 5, 0] if name == "qwen3vl" else [3, 3, 2, 0])
        writer.add_num_deepstack_layers(0 if name == "qwen2vl" else 2)
    if name == "granite_4":
        _describe_as_hybrid(writer, config)
    if config.get("is_causal") is False:
        writer.add_causal_attention(False)


def _written(name: str, arch: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A folder's tensors, those in one that are so in a file, and those in two."""
    tensors = together(load_file(plain_folder(name) / "model.safetensors"))
    if name.endswith("_ahead"):
        tensors = with_layer_ahead(tensors, config["num_hidden_layers"])
    if name.endswith("_joint"):
        tensors = with_joint_rows(tensors)
    if arch == "deepseek2" and not name.endswith("_older"):
        for own in [own for own in tensors if own.endswith("kv_b_proj.weight")]:
            tensors |= in_halves(own, tensors.pop(own), config)
    return tensors


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of which those of experts lie in one, as converters put them."""
    found: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        found.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(tensors[name])
    whole = {
        name: torch.stack(each) if ".experts." in name and name.endswith(".weight") else each[0]
        for name, each in found.items()
    }
    # Granite's files have gate and up in one.
    for name in [name for name in whole if name.endswith("moe.input_linear.weight")]:
        prefix = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
        gate, up = whole.pop(name).chunk(2, dim=1)
        whole |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
    return {new: tensor for name, each in whole.items() for new, tensor in _apart(name, each)}


def _apart(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """What of gpt-oss takes turns, or is transposed, as converters write it."""
    whole, _, ending = name.partition(".experts.")
    part = ending.removesuffix("_bias")
    if part not in ("gate_up_proj", "down_proj"):
        return [(name, tensor)]
    kind = "bias" if ending.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    parts = {part: rows} if part == "down_proj" else {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
    return [(f"{whole}.experts.{each}.{kind}", found) for each, found in parts.items()]


def add(writer: gguf.GGUFWriter, name: str, array: NDArray[np.float32], kind: str = "F32") -> None:
    """Add a tensor in a type that the package can round to."""
    number = gguf.GGMLQuantizationType[kind]
    array = np.ascontiguousarray(array, np.float32)
    if kind in ("F32", "F16"):
        writer.add_tensor(name, array if kind == "F32" else array.astype(np.float16))
    else:
        rounded = gguf.quants.quantize(array, gguf.GGMLQuantizationType[_AS_BYTES_OF.get(kind, kind)])
        writer.add_tensor(name, rounded, raw_dtype=number)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "ernie4_5_moe":
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["moe_num_shared_experts"])
    if "use_parallel_residual" in config:
        # As converters have it where config.json says nothing.
        writer.add_parallel_residual(True)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    optional = {
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "moe_num_experts": writer.add_expert_count,
        "moe_k": writer.add_expert_used_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }
    if "sliding_attention" not in (config.get("layer_types") or ["sliding_attention"]):
        del optional["sliding_window"]
    for field, write in optional.items():
        if config.get(field):
            write(config[field])


def _describe_as_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv([config["num_key_value_heads"]] * config["num_hidden_layers"])
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(128)
    writer.add_rope_scaling_finetuned(True)


def filled_file(path: Path, arch: str, fill: Callable[[gguf.GGUFWriter], object]) -> Path:
    """A file of this architecture that has what `fill` adds."""
    writer = gguf.GGUFWriter(path, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def describe_scaling(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    """Say of a rotation how it is stretched, by one factor or by YaRN."""
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _describe_rotation(writer: gguf.GGUFWriter, config: dict[str, Any], with_windows: bool) -> None:
    rope = config.get("rope_parameters") or _PLAIN
    if with_windows and "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rope = rope.get("full_attention", rope)
    if "partial_rotary_factor" in rope:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    writer.add_rope_freq_base(rope["rope_theta"])
    describe_scaling(writer, rope)
    if rope["rope_type"] == "yarn" and "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def add_words(writer: gguf.GGUFWriter, count: int) -> None:
    """A vocabulary of all bytes, two special tokens, and words."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "<|begin|>", "<|end|>", "ab"]
    tokens += [f"<{number}>" for number in range(count - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<|begin|>", "<|end|>") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """By how much each wavelength is stretched (Llama 3.1), as converters write it."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    found = np.where(waves < original / high, 1.0, np.where(waves > original / low, rope["factor"], between))
    return found.astype(np.float32)

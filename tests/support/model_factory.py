"""Small random-weight model folders, written by transformers, in the shapes that the tests need."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.ops.int4_grid import quantize_int4

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_GROWING = _YARN | {"original_max_position_embeddings": 48, "llama_4_scaling_beta": 0.2}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_ROUTED = _CHOSEN | {"n_routed_experts": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "head_dim": 16}
# Keys and values out of fewer numbers: 32, and 8 that are rotated.
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_GROUPED = _LATENT | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_GPT_OSS_ROPE = _YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GEMMA3 = {
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    },
}

# name: (model_type, config fields beside TINY, save_pretrained arguments)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama_head_dim": ("llama", {"head_dim": 32, "num_key_value_heads": 4}, {}),
    "llama_gelu": ("llama", {"hidden_act": "gelu"}, {}),
    "llama_sharded": ("llama", {}, {"max_shard_size": "100KB"}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}, {}),
    "llama_llama3": ("llama", {"rope_parameters": _LLAMA3}, {}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN}, {}),
    "llama_yarn_mscale": (
        "llama",
        {
            "rope_parameters": _YARN
            | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}
        },
        {},
    ),
    "llama_yarn_attention": ("llama", {"rope_parameters": _YARN | {"attention_factor": 1.25}}, {}),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "mistral_window": ("mistral", {"sliding_window": 20}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "tie_word_embeddings": True},
        {},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3_window": (
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        {},
    ),
    # The embedding's scale is not a number of bfloat16, nor the heads' size what scores are divided by.
    "gemma3": ("gemma3_text", _GEMMA3, {}),
    "gemma3_head": (
        "gemma3_text",
        _GEMMA3 | {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": False},
        {},
    ),
    "gemma2": (
        "gemma2",
        _GEMMA3
        | {
            "rope_parameters": _PLAIN,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 30.0,
        },
        {},
    ),
    "olmo2": ("olmo2", {}, {}),
    "olmo2_biases": ("olmo2", {"attention_bias": True, "head_dim": 32, "tie_word_embeddings": True}, {}),
    "olmo3": ("olmo3", _WINDOWS | {"rope_parameters": {"sliding_attention": _PLAIN, "full_attention": _YARN}}, {}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": _GROWING}, {}),
    "ministral": ("ministral", _WINDOWS | {"head_dim": 16, "sliding_window": 33}, {}),
    "gemma": ("gemma", {"head_dim": 16}, {}),
    "granite": ("granite", _GRANITE, {}),
    "granite_tied": ("granite", _GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}, {}),
    "phi3": ("phi3", {"sliding_window": 20}, {}),
    "phi3_partial": (
        "phi3",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [2.0, 3.0, 4.0, 6.0],
            },
        },
        {},
    ),
    "glm": ("glm", {"head_dim": 16}, {}),
    "glm4": ("glm4", {"head_dim": 16}, {}),
    "exaone4": ("exaone4", _WINDOWS, {}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}, {}),
    "seed_oss": ("seed_oss", {"head_dim": 16}, {}),
    "helium": ("helium", {"head_dim": 16}, {}),
    "olmo": ("olmo", {"tie_word_embeddings": True}, {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}, {}),
    "cwm": ("cwm", _WINDOWS | {"head_dim": 16, "bos_token_id": 1, "rope_parameters": _LLAMA3}, {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}, {}),
    "qwen2_moe": (
        "qwen2_moe",
        _CHOSEN
        | {
            "num_experts": 6,
            "shared_expert_intermediate_size": 72,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
        },
        {},
    ),
    "qwen3_moe": ("qwen3_moe", _CHOSEN | {"num_experts": 12, "norm_topk_prob": True, "head_dim": 16}, {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3}, {}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}, {}),
    "granitemoe": ("granitemoe", _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "glm4_moe": (
        "glm4_moe",
        _ROUTED | {"n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True},
        {},
    ),
    "dots1": ("dots1", _WINDOWS | _ROUTED | {"n_shared_experts": 1, "norm_topk_prob": True}, {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3},
        {},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 20,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        {},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _ROUTED | _GROUPED | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "attention_bias": True},
        {},
    ),
    "deepseek_v2_greedy": ("deepseek_v2", _ROUTED | _GROUPED, {}),
    "deepseek_v3": (
        "deepseek_v3",
        _ROUTED
        | _GROUPED
        | {
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
        {},
    ),
    "deepseek_v3_halves": (
        "deepseek_v3",
        _ROUTED | _LATENT | {"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "rope_interleave": False},
        {},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _ROUTED | _LATENT | {"num_hidden_layers": 3}, {}),
    "youtu": ("youtu", _LATENT | {"tie_word_embeddings": False}, {}),
    "minicpm3": ("minicpm3", _LATENT | {"v_head_dim": None, "tie_word_embeddings": False}, {}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}, {}),
    "starcoder2": ("starcoder2", {"sliding_window": 20}, {}),
    "starcoder2_untied": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}, {}),
    "cohere": ("cohere", {"attention_bias": True}, {}),
    "cohere2": ("cohere2", _WINDOWS, {}),
    "gpt_neox": ("gpt_neox", {}, {}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}, {}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}, {}),
    "falcon_one_norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
        {},
    ),
    "falcon_multi_query": ("falcon", {}, {}),
    "falcon_serial": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}, {}),
    "falcon_slopes": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True, "alibi": True}, {}),
    "bloom": ("bloom", {"seq_length": 512}, {}),
    # As many heads as no power of two, of which some families make their slopes otherwise.
    "bloom_twelve": ("bloom", {"seq_length": 512, "n_head": 12, "hidden_size": 96}, {}),
    "mpt": ("mpt", {"max_seq_len": 512}, {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1}, {}),
    "gpt2": ("gpt2", {}, {}),
    "gpt2_inner": ("gpt2", {"n_inner": 96, "tie_word_embeddings": False}, {}),
    "gpt_bigcode": ("gpt_bigcode", {}, {}),
}
# One of each family, or two where they are unlike each other.
FAMILIES = ["llama", "mistral_window", "qwen2_window", "qwen3_window", "gemma3", "olmo2", "olmo3", "ministral"]
FAMILIES += ["ministral3", "gemma", "granite", "smollm3", "phi3", "phi3_partial", "glm", "glm4", "exaone4"]
FAMILIES += ["ernie4_5", "seed_oss", "helium", "cwm", "olmo", "stablelm", "gemma2", "starcoder2", "cohere", "cohere2"]
FAMILIES += ["gpt_neox", "falcon", "falcon_slopes", "bloom", "mpt", "opt", "gpt2", "gpt_bigcode", "youtu", "minicpm3"]
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "glm4_moe", "dots1", "ernie4_5_moe"]
EXPERTS += ["gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"]
FAMILIES += EXPERTS
EXACT = list(VARIANTS)
# The same with all experts chosen: where some are nearly equal, another way of rounding chooses others, which says
# nothing of the arithmetic.
for _name in EXPERTS:
    _type, _fields, _save = VARIANTS[_name]
    _counts = [value for name, value in _fields.items() if name in ("num_experts", "num_local_experts")]
    _counts += [value for name, value in _fields.items() if name in ("n_routed_experts", "moe_num_experts")]
    _chosen = "moe_k" if "moe_k" in _fields else "num_experts_per_tok"
    _all = {_chosen: _counts[0]} | ({"topk_group": _fields["n_group"]} if "n_group" in _fields else {})
    VARIANTS[f"{_name}_all"] = _type, _fields | _all, _save
ROUNDED = [f"{name}_all" if name in EXPERTS else name for name in FAMILIES]


@functools.cache
def temporary_root() -> Path:
    """A folder that goes when the tests end."""
    root = Path(tempfile.mkdtemp(prefix="chairlift-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def model_folder(variant: str = "llama", dtype: str = "float32", seed: int = 0) -> Path:
    """The folder of a model of VARIANTS, written on first use. Skips the test where transformers is not installed."""
    folder = temporary_root() / f"{variant}-{dtype}-{seed}"
    if folder.exists():
        return folder
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields, save = VARIANTS[variant]
    config = AutoConfig.for_model(model_type, **TINY | fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **save)
    return folder


def write_model(folder: Path, model_type: str, fields: dict[str, Any], dtype: str = "float32") -> None:
    """Write a small random model of transformers', of these fields of config.json. Skips the test as above."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter a scale at which it matters; and logits far enough apart that greedy choices are no ties."""
    with torch.no_grad():
        for name, value in model.named_buffers():
            if "correction_bias" in name:
                value.normal_(0, 0.3)
        for name, value in model.named_parameters():
            if "norm" in name:
                # Gemma begins them with zeros, to which it adds 1.
                centre = 1.0 if value.any() or name.endswith("bias") else 0.0
                value.uniform_(centre - 0.5, centre + 0.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.3)
            else:
                value.normal_(0, 0.5 if "embed" in name or "head" in name else 0.15)


@functools.cache
def reference_model(variant: str = "llama", dtype: str = "float32", seed: int = 0) -> Any:
    """The same model as transformers computes it."""
    from transformers import AutoModelForCausalLM

    # Such small models only lose by threads, and lose badly when tests share a machine.
    torch.set_num_threads(1)
    folder = model_folder(variant, dtype, seed)
    # Falcon's eager attention adds what slopes take off twice.
    has_slopes = json.loads((folder / "config.json").read_text()).get("alibi", False)
    attention = {"attn_implementation": "sdpa" if has_slopes else "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **attention).eval()
    if has_slopes:
        _unrounded(model)
    return model


def _unrounded(model: Any) -> None:
    """Have Falcon add what slopes take off as it is: past 256 tokens, whatever the dtype, it rounds that to 8 bits."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.falcon import modeling_falcon

    forward = model.transformer.forward

    def exact(*given: Any, **named: Any) -> Any:
        with mock.patch.object(modeling_falcon, "build_alibi_tensor", build_alibi_tensor):
            return forward(*given, **named)

    model.transformer.forward = exact


def edited_folder(target: Path, source: Path, remove: tuple[str, ...] = (), **fields: Any) -> Path:
    """Copy a model folder to `target` with config.json fields changed and removed."""
    shutil.copytree(source, target)
    path = target / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in remove}))
    return target


def rounded_folder(target: Path, source: Path, dtype: torch.dtype, keeps: tuple[str, ...] = ()) -> Path:
    """Copy a model folder to `target` with the numbers that 4 bits make of its matrices in this type.

    Those stay whose names have one of `keeps` in them.
    """
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim == 2 and not any(part in name for part in keeps):
            steps, scales = quantize_int4(weight.to(dtype))
            tensors[name] = steps * scales
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target

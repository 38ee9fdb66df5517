"""Small random-weight models of families that transformers computes, written by transformers."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_factory import TINY, randomize, temporary_root

_GPT = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512} | dict.fromkeys(
    ("bos_token_id", "eos_token_id", "pad_token_id")
)
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
# Keys and values out of a smaller state: of 24 and 16 numbers.
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
}

# name: (model_type, config fields, beside TINY where they are not complete)
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neox": ("gpt_neox", TINY),
    "opt": ("opt", TINY | {"ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "phi": ("phi", TINY),
    "starcoder2": ("starcoder2", TINY | {"sliding_window": 20}),
    "stablelm_parallel": ("stablelm", TINY | {"use_parallel_residual": True, "qk_layernorm": True}),
    "cohere": ("cohere", TINY | {"use_qk_norm": True}),
    "cohere2": ("cohere2", TINY | _WINDOWS),
    "nemotron": ("nemotron", TINY),
    "persimmon": ("persimmon", TINY),
    "arcee": ("arcee", TINY),
    "apertus": ("apertus", TINY),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", TINY | {"head_dim": 16}),
    "nanochat": ("nanochat", TINY),
    "phimoe": ("phimoe", TINY | _LOCAL),
    "minimax_m2": ("minimax_m2", TINY | _LOCAL | {"head_dim": 16}),
    "deepseek_v2": ("deepseek_v2", TINY | _LATENT | _ROUTED | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", TINY | _LATENT | _ROUTED),
    "minicpm3": ("minicpm3", TINY | _LATENT),
    "glm4_moe_lite": ("glm4_moe_lite", TINY | _LATENT | _ROUTED),
    "youtu": ("youtu", TINY | _LATENT),
    "longcat_flash": ("longcat_flash", TINY | _LATENT | _ROUTED | {"num_layers": 2, "head_dim": 8}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", TINY | {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 2]}),
    "solar_open": ("solar_open", TINY | _ROUTED | {"head_dim": 16}),
    "biogpt": ("biogpt", TINY),
}  # fmt: skip
# Those of them that are native where nothing else is asked for.
NATIVE_TOO = {"gpt2", "gpt_bigcode", "gpt_neox", "opt", "starcoder2", "cohere2"}

# What can't be honoured, and what is said of it.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma2": ("gemma2", TINY | {"head_dim": 16}, "softcap"),
    "bloom": (
        "bloom",
        {"vocab_size": 320, "hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 512},
        "of its 2 layers 0 have",
    ),
    "mamba": ("mamba", TINY | {"state_size": 8}, "of its 2 layers 0 have"),
    "falcon_h1": ("falcon_h1", TINY | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "in parts"),
    "gpt_oss": ("gpt_oss", TINY | _LOCAL | {"head_dim": 16}, "s_aux"),
    "lfm2": ("lfm2", TINY | {"layer_types": ["conv", "full_attention"]}, "'conv'"),
}


@functools.cache
def foreign_folder(model_type: str, name: str, dtype: str = "float32") -> Path:
    """The folder of a model of FOREIGN or REFUSED, written on first use."""
    folder = temporary_root() / f"foreign-{name}-{dtype}"
    fields = FOREIGN[name][1] if name in FOREIGN else REFUSED[name][1]
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@functools.cache
def foreign_reference(name: str) -> Any:
    """The same model as transformers computes it by itself."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = foreign_folder(FOREIGN[name][0], name)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

"""Small random-weight models of families that transformers computes, written by transformers."""

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_factory import TINY, randomize, temporary_root, write_model

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

# Layers with states.
_FOUR = {"num_hidden_layers": 4}
_STATES_FIRST = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Gemma 4: heads of layers that see all are wider, a table of embeddings for each layer, and of the last ones none has
# keys and values of its own.
_GEMMA4 = {
    **_FOUR,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 2,
    "pad_token_id": 0,
}
# As its larger ones: values of layers that see all are their keys, which are fewer, with experts beside an MLP.
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
}
_LFM3 = {
    **_FOUR,
    "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
    "head_dim": 16,
    "sliding_window": 20,
}
_DELTA = {
    **_FOUR,
    **_STATES_FIRST,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_ROPE_OF_THREE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_MAMBA2 = {
    **_FOUR,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 1,
}
_SHARED = {"shared_intermediate_size": 64}
_JAMBA = {**_FOUR, "num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8}
_MAMBA_ALONE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 1,
}
_NEMOTRON = {
    **_FOUR,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
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
    "phimoe": ("phimoe", TINY | _LOCAL | {"sliding_window": 20}),
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
    "gemma2": ("gemma2", TINY | {"head_dim": 16, "sliding_window": 20, "attn_logit_softcapping": 3.0}),
    "gemma3n_text": (
        "gemma3n_text",
        TINY | _GEMMA4 | {"laurel_rank": 8, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
    ),
    "gemma4_text": ("gemma4_text", TINY | _GEMMA4),
    "gemma4_experts": ("gemma4_text", TINY | _GEMMA4 | _GEMMA4_EXPERTS),
    "vaultgemma": ("vaultgemma", TINY | _WINDOWS | {"head_dim": 16, "attn_logit_softcapping": 3.0}),
    "lfm2": ("lfm2", TINY | _FOUR | {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "lfm2_moe": ("lfm2_moe", TINY | _FOUR | _EXPERTS | {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "lfm3": ("lfm3", TINY | _LFM3),
    "qwen3_5_text": ("qwen3_5_text", TINY | _DELTA),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", TINY | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_next": ("qwen3_next", TINY | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "olmo_hybrid": ("olmo_hybrid", TINY | _DELTA | {"num_key_value_heads": 4}),
    "granitemoehybrid": ("granitemoehybrid", TINY | _MAMBA2 | _LOCAL | _STATES_FIRST | _SHARED),
    # As the small ones: without experts, in two groups, and with a bound on steps.
    "granite4_dense": (
        "granitemoehybrid",
        TINY
        | _MAMBA2
        | _STATES_FIRST
        | {"num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_groups": 2, "mamba_conv_bias": False}
        | {"position_embedding_type": "rope", "time_step_limit": [0.05, 0.6], "mamba_d_state": 12}
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3}
        | {"logits_scaling": 4.0, "mamba_proj_bias": True, "attention_bias": True},
    ),
    "bamba": ("bamba", TINY | _MAMBA2 | {"attn_layer_indices": [2]}),
    "falcon_h1": ("falcon_h1", TINY | _MAMBA2 | {"mamba_d_ssm": 64}),
    "nemotron_h": ("nemotron_h", TINY | _NEMOTRON),
    "jamba": ("jamba", TINY | _JAMBA),
    "mamba2": ("mamba2", _MAMBA_ALONE),
    "gptj": ("gptj", _GPT | {"rotary_dim": 8}),
    "codegen": ("codegen", _GPT | {"rotary_dim": 8, "n_ctx": 512}),
    "afmoe": ("afmoe", TINY | _WINDOWS | _EXPERTS | {"head_dim": 16, "num_shared_experts": 1, "mup_enabled": True}),
    "exaone_moe": ("exaone_moe", TINY | _WINDOWS | _EXPERTS | {"head_dim": 16}),
    "hy_v3": ("hy_v3", TINY | _EXPERTS | {"head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}),
    "cohere2_moe": ("cohere2_moe", TINY | _WINDOWS | _EXPERTS | {"head_dim": 16, "num_shared_experts": 1}),
    "jais2": ("jais2", TINY),
    "laguna": (
        "laguna",
        TINY | _WINDOWS | _EXPERTS | {"head_dim": 16, "num_attention_heads_per_layer": [4, 2]}
        | {"shared_expert_intermediate_size": 64, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "jetmoe": ("jetmoe", TINY | _LOCAL | {"kv_channels": 16}),
    "mellum": ("mellum", TINY | _WINDOWS | _EXPERTS | {"head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}),
    "kolibri1": ("kolibri1", TINY | _WINDOWS | _EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 64}),
    "falcon_mamba": ("falcon_mamba", {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2}),
}  # fmt: skip
# Those of them that are made of what others are made of, in another order.
ALIKE = [
    *("gptj", "codegen", "afmoe", "exaone_moe", "hy_v3", "cohere2_moe", "jais2", "laguna", "jetmoe", "mellum"),
    *("kolibri1", "falcon_mamba"),
]
# Those of them whose layers have states, all but a few.
STATEFUL = [
    *("lfm2", "lfm2_moe", "lfm3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"),
    *("granitemoehybrid", "granite4_dense", "bamba", "falcon_h1", "nemotron_h", "jamba", "mamba2"),
]
# Those of them that are native where nothing else is asked for.
NATIVE_TOO = {"gemma2", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "starcoder2", "cohere2"}
NATIVE_TOO |= {"deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "youtu"}
NATIVE_TOO |= {
    "lfm2",
    "lfm2_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "granitemoehybrid",
    "granite4_dense",
}

# What can't be honoured, and what is said of it.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "zamba2": (
        "zamba2",
        TINY
        | _FOUR
        | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 16, "n_mamba_heads": 4},
        "of its 4 layers 1 have",
    ),
    "gpt_oss": ("gpt_oss", TINY | _LOCAL | {"head_dim": 16}, "s_aux"),
}

# What the folders of Gemma 3 4B, 12B and 27B say of their part for texts; all else is left out.
_GEMMA3 = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
GEMMA3_TEXTS: dict[str, dict[str, Any]] = {
    "4b": _GEMMA3 | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": _GEMMA3
    | {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
    | {"num_attention_heads": 16, "num_key_value_heads": 8},
    "27b": _GEMMA3
    | {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128}
    | {"num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
}


def gemma3_folder(target: Path, size: str) -> Path:
    """A folder with the config.json of such a model alone."""
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16"}
    vision = {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14}
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({**config, "text_config": GEMMA3_TEXTS[size], "vision_config": vision})
    )
    return target


@functools.cache
def folder_that_sees(name: str) -> Path:
    """The folder of a model with a part for images, as those of this family are on the Hub."""
    transformers = pytest.importorskip("transformers")
    folder = temporary_root() / f"foreign-{name}-sees"
    vision = {"hidden_size": 32, "intermediate_size": 64}
    if name == "qwen3_5":
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
        sizes = TINY | _DELTA | {"rope_parameters": _ROPE_OF_THREE}
        config = transformers.Qwen3_5Config(text_config=sizes, vision_config=vision)
    else:
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
        vision |= {"patch_size": 4, "position_embedding_size": 64}
        # The larger ones let images, and these alone, see both ways.
        sizes = (
            TINY
            | _GEMMA4
            | (_GEMMA4_EXPERTS | {"use_bidirectional_attention": "vision"} if name.endswith("larger") else {})
        )
        tokens = {
            f"{each}_token_id": 310 + place
            for place, each in enumerate(("boi", "eoi", "image", "video", "boa", "audio"))
        }
        config = transformers.Gemma4Config(text_config=sizes, vision_config=vision, eoa_token_index=317, **tokens)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    randomize(model)
    model.save_pretrained(folder)
    return folder


@functools.cache
def foreign_folder(model_type: str, name: str, dtype: str = "float32") -> Path:
    """The folder of a model of FOREIGN or REFUSED, written on first use."""
    folder = temporary_root() / f"foreign-{name}-{dtype}"
    fields = FOREIGN[name][1] if name in FOREIGN else REFUSED[name][1]
    write_model(folder, model_type, fields, dtype)
    return folder


@torch.no_grad()
def greedy(model: Any, prompt: list[int], guess: list[int]) -> list[int]:
    """What transformers goes on with, as many tokens as the guess has.

    One pass over the guess tells whether each of its tokens is the likeliest after those before it. Only if one is not,
    the tokens are computed one by one.
    """
    likeliest = model(torch.tensor([prompt + guess[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return guess if likeliest == guess else _one_by_one(model, prompt, len(guess))


def _one_by_one(model: Any, prompt: list[int], count: int) -> list[int]:
    """By its own cache. Bamba counts positions wrongly there unless told of them."""
    parameters = inspect.signature(model.forward).parameters
    name = next(each for each in ("cache", "past_key_values", "cache_params") if each in parameters)
    cache, tokens, known = None, list(prompt), 0
    while len(tokens) < len(prompt) + count:
        new = torch.tensor([tokens[known:]])
        positions = torch.arange(known, len(tokens))[None]
        out = model(new, position_ids=positions, use_cache=True, **{name: cache})
        cache, known = out[name], len(tokens)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@functools.cache
def foreign_reference(name: str) -> Any:
    """The same model as transformers computes it by itself."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = foreign_folder(FOREIGN[name][0], name)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

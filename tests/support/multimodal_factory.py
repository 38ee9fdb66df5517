"""Small random-weight models that read images or sounds, too, written by transformers, or as they are on the Hub."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_factory import TINY, edited_folder, randomize, temporary_root

_SEES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PATCHES = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "hidden_size": 32, "intermediate_size": 64}
_THREE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_HEARS = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 8}
_IDS = {"image_token_id": 319, "video_token_id": 318, "vision_start_token_id": 317, "vision_end_token_id": 316}
_LLAMA, _QWEN2 = TINY | {"model_type": "llama"}, TINY | {"model_type": "qwen2"}
_COHERE2 = TINY | {"model_type": "cohere2", "head_dim": 16, "sliding_window": 20, "logit_scale": 0.25}
_DELTA = TINY | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "rope_parameters": _THREE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

# name: (config's class without "Config", its text_config, its vision_config or audio_config, more of it)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        TINY | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20},
        _SEES,
        {"image_token_index": 319, "boi_token_index": 318, "eoi_token_index": 317, "mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "Mistral3",
        TINY | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        _SEES | {"head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "mistral3_growing": (
        "Mistral3",
        TINY
        | {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 48,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.7,
            },
        },
        _SEES | {"head_dim": 16},
        {},
    ),
    "qwen2_vl": ("Qwen2VL", TINY | {"rope_parameters": _THREE}, _PATCHES | {"embed_dim": 32}, _IDS),
    "qwen2_5_vl": ("Qwen2_5_VL", TINY | {"rope_parameters": _THREE, "tie_word_embeddings": True}, _PATCHES, _IDS),
    "qwen3_vl": (
        "Qwen3VL",
        TINY | {"head_dim": 16, "rope_parameters": _THREE | {"mrope_interleaved": True}},
        _PATCHES | {"deepstack_visual_indexes": [0]},
        _IDS,
    ),
    "glm4v": (
        "Glm4v",
        TINY
        | {"head_dim": 16}
        | {"rope_parameters": _THREE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        _PATCHES,
        {**_IDS, "image_start_token_id": 317, "image_end_token_id": 316}
        | {"video_start_token_id": 315, "video_end_token_id": 314},
    ),
    "llava": ("Llava", _LLAMA, _SEES, {"image_token_index": 319}),
    "llava_next": ("LlavaNext", _LLAMA, _SEES, {"image_token_index": 319}),
    "llava_onevision": ("LlavaOnevision", _QWEN2, _SEES, {"image_token_index": 319}),
    "internvl": ("InternVL", _QWEN2, _SEES | {"image_size": [28, 28], "patch_size": [14, 14]}, {"image_token_id": 319}),
    "aya_vision": ("AyaVision", _COHERE2, _SEES, {"image_token_index": 319}),
    "cohere2_vision": ("Cohere2Vision", _COHERE2, _SEES, {"image_token_id": 319, "alignment_intermediate_size": 64}),
    "idefics3": ("Idefics3", _LLAMA, _SEES, {"image_token_id": 319}),
    "smolvlm": ("SmolVLM", _LLAMA, _SEES, {"image_token_id": 319}),
    "lfm2_vl": (
        "Lfm2Vl",
        TINY
        | {"model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
        _SEES | {"num_patches": 4},
        {"projector_hidden_size": 32},
    ),
    "qwen3_5": ("Qwen3_5", _DELTA, _PATCHES, _IDS),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2}
        | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
        _PATCHES,
        _IDS,
    ),
    "voxtral": (
        "Voxtral",
        _LLAMA,
        {**_SEES, "num_key_value_heads": 2, "num_mel_bins": 8, "max_source_positions": 8},
        {"audio_token_id": 319},
    ),
    "qwen2_audio": ("Qwen2Audio", _QWEN2, _HEARS | {"max_source_positions": 8}, {"audio_token_index": 319}),
}
# Those that transformers computes.
THROUGH_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        TINY
        | {"head_dim": 16, "rope_parameters": _THREE | {"mrope_interleaved": True}}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        _PATCHES | {"deepstack_visual_indexes": [0]},
        _IDS,
    ),
}
_HEARING = ("voxtral", "qwen2_audio")
# How names of tensors begin, and how in folders that releases of transformers saved by their modules' names.
_BY_MODULES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.language_model.",
    **{f"{part}.": f"model.{part}." for part in ("vision_tower", "multi_modal_projector", "audio_tower", "visual")},
    "image_newline": "model.image_newline",
    # Of those that have no such prefix.
    **{f"model.{part}": f"model.language_model.{part}" for part in ("embed_tokens.", "layers.", "norm.")},
}


@functools.cache
def multimodal_folder(name: str) -> Path:
    """The folder of one of these, as transformers saves it, with all its parts."""
    transformers = pytest.importorskip("transformers")
    folder = temporary_root() / f"multimodal-{name}"
    kind, text, other, more = (MODELS | THROUGH_TRANSFORMERS)[name]
    part = "audio_config" if name in _HEARING else "vision_config"
    config = getattr(transformers, f"{kind}Config")(text_config=text, **{part: other}, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomize(model)
    model.save_pretrained(folder)
    return folder


@functools.cache
def multimodal_reference(name: str) -> Any:
    """The whole model as transformers computes it."""
    import transformers

    torch.set_num_threads(1)
    model = getattr(transformers, f"{MODELS[name][0]}ForConditionalGeneration")
    return model.from_pretrained(multimodal_folder(name), dtype=torch.float32, attn_implementation="eager").eval()


def folder_by_modules(name: str, target: Path) -> Path:
    """The same with tensors that are called as transformers' modules are."""
    folder = edited_folder(target, multimodal_folder(name))
    tensors = load_file(folder / "model.safetensors")
    save_file({_renamed(each): tensor for each, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def flat_folder(name: str, target: Path) -> Path:
    """The same with the config.json of older folders, where the part for texts has none of its own."""
    folder = edited_folder(target, multimodal_folder(name))
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    raw = {**text, **raw, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def _renamed(name: str) -> str:
    start = next((start for start in _BY_MODULES if name.startswith(start)), "")
    return _BY_MODULES.get(start, "") + name.removeprefix(start)

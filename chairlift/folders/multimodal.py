"""Families that read images or sounds, too: the part of them that reads and writes texts, which native kernels compute.

Their folders have its config.json as `text_config`, or beside that of the other parts, and all parts' tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift.folders.decoder_families import FAMILIES
from chairlift.folders.model_json import optional_object

_NESTED = ("language_model.model.", "model.language_model.", "model.")
_SEES = ("vision_tower.", "multi_modal_projector.")
_TIED = "tie_word_embeddings"
# What is said of the whole model and holds for its texts.
_OF_ALL = ("dtype", "torch_dtype", "quantization_config", "compression_config")
# Of tokens of texts all three positions are the same, so that it does not matter which frequencies go by which.
_THREE_POSITIONS = ("mrope_section", "mrope_interleaved")
# Sizes that folders leave out where they are those of transformers' class for the part.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "cohere2": {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    },
    "qwen3_vl_text": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
    },
    "qwen3_5_text": {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    "qwen3_5_moe_text": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}


@dataclass(frozen=True, slots=True)
class MultimodalFamily:
    """Where the part for texts is.

    `text` is that part's `model_type` where the folder does not say it, and `called` what native families of others are
    called here. Its tensors' names begin with one of `bases`, and its head's with one of `heads`; those of the other
    parts with one of `beside`, which may follow a `model.`. `tied` is what it means to leave that field out.
    """

    text: str
    called: Mapping[str, str] = field(default_factory=dict)
    bases: tuple[str, ...] = _NESTED
    heads: tuple[str, ...] = ("lm_head", "language_model.lm_head")
    beside: tuple[str, ...] = _SEES
    tied: bool = False

    @property
    def left(self) -> list[str]:
        """Beginnings of the names of tensors that no text needs."""
        return [f"{outer}{each}" for outer in ("", "model.") for each in self.beside]

    def text_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What a folder's config.json says of the part for texts, as if it were a model of its own."""
        nested = optional_object(raw, "text_config")
        said = dict(nested or raw)
        name = self.text if not nested else str(said.get("model_type") or self.text)
        of_all = {each: raw[each] for each in _OF_ALL if raw.get(each) is not None}
        ties = [each[_TIED] for each in (raw, nested) if each.get(_TIED) is not None]
        own = {"model_type": self.called.get(name, name), _TIED: any(ties) if ties else self.tied}
        found = {**_LEFT_OUT.get(name, {}), **of_all, **said, **own}
        for kind in ("rope_scaling", "rope_parameters"):
            if (rope := optional_object(found, kind)).keys() & set(_THREE_POSITIONS):
                found[kind] = _of_one_position(rope)
        return found


def is_native(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a decoder that native kernels know, or of a model whose part for texts is one.

    Raises UnsupportedModel if that part is no object.
    """
    multimodal = multimodal_of(raw)
    name = (raw if multimodal is None else multimodal.text_config(raw)).get("model_type")
    return isinstance(name, str) and name in FAMILIES


def multimodal_of(raw: Mapping[str, Any]) -> MultimodalFamily | None:
    """That of a config.json; None where it is of a model that reads texts alone."""
    name = raw.get("model_type")
    return MULTIMODAL.get(name) if isinstance(name, str) else None


def _of_one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rope.items() if name not in _THREE_POSITIONS}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}


_QWEN3_5 = MultimodalFamily("qwen3_5_text", beside=("visual.",))
_IDEFICS = MultimodalFamily("llama", bases=("model.text_model.",), beside=("vision_model.", "connector."))
# By the whole model's `model_type`.
MULTIMODAL: Mapping[str, MultimodalFamily] = {
    "gemma3": MultimodalFamily("gemma3_text", tied=True),
    "mistral3": MultimodalFamily("mistral", tied=True),
    "qwen2_vl": MultimodalFamily("qwen2_vl_text", {"qwen2_vl_text": "qwen2"}, beside=("visual.",)),
    "qwen2_5_vl": MultimodalFamily("qwen2_5_vl_text", {"qwen2_5_vl_text": "qwen2"}, beside=("visual.",)),
    "qwen3_vl": MultimodalFamily("qwen3_vl_text", {"qwen3_vl_text": "qwen3"}, beside=("visual.",)),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, text="qwen3_5_moe_text"),
    "lfm2_vl": MultimodalFamily("lfm2", tied=True),
    "glm4v": MultimodalFamily("glm4v_text", {"glm4v_text": "glm4"}, beside=("visual.",)),
    "llava": MultimodalFamily("llama"),
    "llava_next": MultimodalFamily("llama", beside=(*_SEES, "image_newline")),
    "llava_onevision": MultimodalFamily("qwen2", beside=(*_SEES, "image_newline")),
    "internvl": MultimodalFamily("qwen2", tied=True),
    "aya_vision": MultimodalFamily("cohere2", tied=True),
    "cohere2_vision": MultimodalFamily("cohere2", tied=True),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "voxtral": MultimodalFamily("llama", beside=("audio_tower.", "multi_modal_projector.")),
    "qwen2_audio": MultimodalFamily("qwen2", beside=("audio_tower.", "multi_modal_projector.")),
}

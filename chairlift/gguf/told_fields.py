"""What a GGUF file's metadata says of a model with states, in the fields of its config.json."""

import math
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.routed_experts import MOST_EXPERTS
from chairlift.gguf.told_settings import ToldSettings

Fields = dict[str, Any]
_WORDS = "per_layer_token_embd.weight"


def attention_fields(told: ToldSettings) -> Fields:
    """The heads of those layers that have keys and values, which is what makes them such."""
    hidden = told.size("embedding_length")
    heads = told.size("attention.head_count", most=hidden)
    head_dim = told.size("attention.key_length", hidden // heads)
    told.must_be("attention.value_length", head_dim)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": told.same("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": told.size("context_length"),
    }


def rotation(told: ToldSettings) -> Fields:
    """A rotation that nothing scales."""
    told.must_be("rope.scaling.type", "none")
    told.must_be("rope.scaling.factor", 1.0)
    told.has("rope.scaling.finetuned")
    return {"rope_theta": told.number("rope.freq_base", 1e4), "rope_type": "default"}


def plain_rotation(told: ToldSettings, head_dim: int) -> Fields:
    """The same as a field, of heads that are rotated whole."""
    told.must_be("rope.dimension_count", head_dim)
    return {"rope_parameters": rotation(told)}


def expert_fields(told: ToldSettings) -> Fields:
    """How many experts there are, how many of them a token goes to, and their width."""
    count = told.size("expert_count", most=MOST_EXPERTS)
    return {
        "num_experts": count,
        "num_experts_per_tok": told.size("expert_used_count", most=count),
        "moe_intermediate_size": told.size("expert_feed_forward_length"),
    }


def optional_experts(told: ToldSettings) -> tuple[int, int]:
    """How many experts there are, if any, and how many of them a token goes to."""
    count = told.size("expert_count", 0, least=0, most=MOST_EXPERTS)
    # Those without experts say of the second what they like.
    used = told.size("expert_used_count", 1, least=0, most=MOST_EXPERTS)
    if count > 1 and not 0 < used <= count:
        raise told.wrong("expert_used_count", f"not from 1 to {count}")
    return count, used


def embeddings_of_layers(told: ToldSettings, file: GgufFile) -> Fields:
    """The table of embeddings that each layer has of its own."""
    size = told.size("embedding_length_per_layer_input", 0, least=0)
    if not size:
        return {"hidden_size_per_layer_input": 0}
    table = file.tensors.get(_WORDS)
    if table is None or len(table.shape) != 2 or math.prod(table.shape[1:]) != size * told.num_layers:
        raise UnsupportedModel(f"tensor {_WORDS!r} of {told.file_name} is missing, or not of {size} for each layer")
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}

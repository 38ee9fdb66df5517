"""What the config.json of Gemma 3n has, which transformers computes, out of a GGUF file's metadata.

Each layer has a table of embeddings of its own, several streams take turns in what layers see, and of the last layers
none has keys and values.
"""

import math

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.told_fields import Fields, embeddings_of_layers, rotation
from chairlift.gguf.told_settings import ToldSettings

_LEFT, _STREAMS = "blk.0.laurel_l.weight", "altup.num_inputs"


def gemma3n(told: ToldSettings, file: GgufFile) -> Fields:
    """The fields of a config.json. Raises UnsupportedModel naming the key or tensor at fault."""
    hidden, head_dim = told.size("embedding_length"), told.size("attention.key_length")
    told.must_be("attention.value_length", head_dim)
    told.must_be("rope.dimension_count", head_dim)
    windowed = told.sizes("attention.sliding_window_pattern")
    streams, left = told.size(_STREAMS, most=64), file.tensors.get(_LEFT)
    if left is None or len(left.shape) != 2:
        raise UnsupportedModel(f"tensor {_LEFT!r} of {told.file_name} is missing, or no matrix")
    return {
        "num_attention_heads": told.size("attention.head_count", most=hidden),
        "num_key_value_heads": told.size("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": told.sizes("feed_forward_length"),
        "max_position_embeddings": told.size("context_length"),
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "sliding_window": told.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "num_kv_shared_layers": told.size("attention.shared_kv_layers", least=0, most=told.num_layers - 1),
        "rope_parameters": {
            "full_attention": rotation(told),
            "sliding_attention": {"rope_type": "default", "rope_theta": told.number("rope.freq_base_swa", 1e4)},
        },
        "final_logit_softcapping": told.number("final_logit_softcapping", 30.0),
        "altup_num_inputs": streams,
        "altup_active_idx": told.size("altup.active_idx", least=0, most=streams - 1),
        "laurel_rank": left.shape[0],
        "activation_sparsity_pattern": [_share_below(each) for each in told.quantiles("activation_sparsity_scale")],
        **embeddings_of_layers(told, file),
    }


def _share_below(quantile: float) -> float:
    """Of a normal distribution."""
    return (1 + math.erf(quantile / math.sqrt(2))) / 2

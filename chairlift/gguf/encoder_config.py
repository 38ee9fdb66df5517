"""The config.json that says what a GGUF file of an encoder says."""

import math
from collections.abc import Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.encoder_architecture import EncoderArchitecture, size_of
from chairlift.gguf.encoder_architectures import HEAD, HEAD_POOLING, PROJECTOR, RMS_EPS
from chairlift.gguf.gguf_file import GgufFile, shown

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_EPS, _LABELS, _POOLING = "attention.layer_norm_epsilon", "classifier.output_labels", "pooling_type"
# That all of a text is seen, and other things that are so anyway, with the one value that they may have.
_SWITCHES: dict[str, Any] = {
    "attention.causal": False,
    "attention.max_alibi_bias": 0,
    "attention.clamp_kqv": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    HEAD_POOLING: 2,
}
# What changes no vector: all are normalized, whatever Ollama's files say of that.
_OF_NO_MATTER = (_POOLING, "normalize_embeddings")
_TYPES, _NUM_TYPES = "token_types.weight", "tokenizer.ggml.token_type_count"
_RANK = 4
# No model has as many.
_MOST_LABELS = 2**16


def encoder_config(file: GgufFile, known: EncoderArchitecture) -> dict[str, Any]:
    """Return a config.json. Raises UnsupportedModel naming the key or tensor at fault."""
    prefix = f"{file.metadata['general.architecture']}."
    told = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise UnsupportedModel(f"tensor 'token_embd.weight' is missing in {file.path.name}")
    sizes = {name: size_of(file.metadata, prefix, key) for key, name in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    head_dim = sizes["hidden_size"] // heads
    switches = _SWITCHES | dict(known.switches)
    switches |= {"attention.head_count_kv": heads, "vocab_size": embeddings.shape[0]}
    switches |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), head_dim)
    served = {*_SIZES, *known.also, _EPS, _LABELS, *_OF_NO_MATTER}
    for key, value in told.items():
        if key in switches and value == switches[key] and type(value) in (bool, int, float, str):
            continue
        if key not in served:
            raise UnsupportedModel(f"{prefix}{key} = {shown(value)} in a GGUF file: nothing here computes that")
    return {
        "model_type": known.model_type,
        "architectures": ["GgufModel"],
        "vocab_size": embeddings.shape[0],
        **sizes,
        "layer_norm_eps": _eps(told, prefix),
        "type_vocab_size": _num_types(file),
        **known.fields,
        **known.more(file, prefix),
        **_head(file, known, told, prefix),
    }


def _eps(told: Mapping[str, Any], prefix: str) -> float:
    # Of ModernBERT's two names for it files may have the second alone.
    value = told.get(_EPS, told.get(RMS_EPS))
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{prefix}{_EPS} must be a number above zero in a GGUF file, got {shown(value)}")
    return float(value)


def _num_types(file: GgufFile) -> int:
    """How many kinds of texts there are, whose embeddings converters may have left out."""
    place, told = file.tensors.get(_TYPES), file.metadata.get(_NUM_TYPES)
    if place is None:
        return 0
    if told is not None and (type(told) is not int or told != place.shape[0]):
        raise UnsupportedModel(f"{_NUM_TYPES} = {shown(told)} in a GGUF file, but {_TYPES!r} has {place.shape[0]} rows")
    return place.shape[0]


def _head(file: GgufFile, known: EncoderArchitecture, told: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What says that a model classifies or ranks: a head, where no vector is asked for."""
    kind, tensors = told.get(_POOLING), file.tensors
    last = tensors.get(f"{PROJECTOR}.weight")
    if kind != _RANK and (kind is not None or not (last or f"{HEAD}.weight" in tensors)):
        return {}
    if last is None or len(last.shape) != 2 or not known.head or not tensors.keys() >= set(known.head):
        problem = f"{file.path.name} is of a model that ranks or classifies, but has not all of its head"
        needed = f"it needs {', '.join(map(repr, known.head))}" if known.head else "such are not read"
        raise UnsupportedModel(f"{problem}: {needed}; serve the folder that it was made of")
    count, labels = last.shape[0], told.get(_LABELS)
    if labels is None:
        labels = [f"LABEL_{index}" for index in range(min(count, _MOST_LABELS))]
    if not isinstance(labels, list) or len(labels) != count or not all(isinstance(each, str) for each in labels):
        problem = f"{prefix}{_LABELS} = {shown(labels)} in a GGUF file"
        raise UnsupportedModel(f"{problem} is no list of {count} texts, of which {PROJECTOR!r} makes logits")
    return {
        "architectures": ["GgufForSequenceClassification"],
        "id2label": {str(index): label for index, label in enumerate(labels)},
    }

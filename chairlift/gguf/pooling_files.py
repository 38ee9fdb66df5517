"""What sentence-transformers keeps of an embedder, made from what a GGUF file says of pooling."""

from collections.abc import Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import is_classifier
from chairlift.gguf.gguf_file import shown

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
# By llama.cpp's numbers. The first gives a vector of each token.
_NONE, _MEAN, _POOLINGS = 0, 1, {1: "mean", 2: "cls", 3: "lasttoken"}


def pooling_files(metadata: Mapping[str, Any], config: Mapping[str, Any], is_encoder: bool) -> dict[str, Any]:
    """Return the contents of modules.json and of 1_Pooling/config.json, empty for a model of which none is said.

    Those are empty, too, for an encoder that by its `config` classifies.

    Files do not say that vectors are normalized: llama.cpp does that to all. Raises UnsupportedModel naming the key.
    """
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(key)
    if is_encoder and is_classifier(config):
        return {MODULES: [], POOLING: {}}
    if is_encoder and kind is None:
        # Such are made of folders without modules.json, whose vectors are means for sentence-transformers. Programs of
        # llama.cpp give a vector of each token then, and want to be told how to pool.
        kind = _MEAN
    if kind is None:
        return {MODULES: [], POOLING: {}}
    # An encoder is good for nothing else.
    known = _POOLINGS if is_encoder else (_NONE, *_POOLINGS)
    if type(kind) is not int or kind not in known:
        raise UnsupportedModel(f"{key} = {shown(kind)} in a GGUF file: nothing here computes that")
    if kind == _NONE:
        # What has no pooling is still a language model, and as an encoder refused.
        return {MODULES: _modules("Transformer"), POOLING: {}}
    return {MODULES: _modules("Transformer", "Pooling", "Normalize"), POOLING: {"pooling_mode": _POOLINGS[kind]}}


def _modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]

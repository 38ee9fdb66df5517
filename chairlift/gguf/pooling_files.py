"""What sentence-transformers keeps of an embedder, made from what a GGUF file says of pooling."""

from collections.abc import Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import is_classifier
from chairlift.gguf.architectures import ARCHITECTURES
from chairlift.gguf.encoder_architectures import ENCODERS
from chairlift.gguf.gguf_file import GgufFile, shown

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
_IDENTITY = "torch.nn.modules.linear.Identity"
# By llama.cpp's numbers. The first gives a vector of each token.
_NONE, _MEAN, _POOLINGS = 0, 1, {1: "mean", 2: "cls", 3: "lasttoken"}


def pooling_files(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of modules.json and of 1_Pooling/config.json, empty for a model of which none is said.

    Those are empty, too, for an encoder that by its `config` classifies. What is behind pooling has a config.json, too.

    Files do not say that vectors are normalized: llama.cpp does that to all. Raises UnsupportedModel naming the key.
    """
    name = file.metadata.get("general.architecture")
    is_encoder = (
        name in ENCODERS or config.get("use_bidirectional_attention") is True or config.get("is_causal") is False
    )
    key = f"{name}.pooling_type"
    kind = file.metadata.get(key)
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
    stages = _stages(file)
    modules = _modules("Transformer", "Pooling", *["Dense"] * len(stages), "Normalize")
    return {MODULES: modules, POOLING: {"pooling_mode": _POOLINGS[kind]}} | stages


def _stages(file: GgufFile) -> dict[str, Any]:
    """What projects pooled vectors, as far as the file has it. Raises UnsupportedModel for some of it alone."""
    known = ARCHITECTURES.get(file.metadata["general.architecture"])
    stages = {} if known is None else known.stages
    found = {name: file.tensors[name].shape for name in stages if name in file.tensors}
    if found and (len(found) < len(stages) or any(len(shape) != 2 for shape in found.values())):
        raise UnsupportedModel(f"{file.path.name} has not all of {', '.join(stages)}, or none of two dimensions")
    for name, sizes in found.items():
        for end, size in zip(("out", "in"), sizes, strict=True):
            key = f"{file.metadata['general.architecture']}.{name.removesuffix('.weight')}_feat_{end}"
            if file.metadata.get(key, size) != size:
                raise UnsupportedModel(f"{key} = {shown(file.metadata[key])} in a GGUF file, but {name} has {size}")
    return {
        f"{stages[name]}/config.json": {
            "in_features": ins,
            "out_features": outs,
            "bias": False,
            "activation_function": _IDENTITY,
        }
        for name, (outs, ins) in found.items()
    }


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

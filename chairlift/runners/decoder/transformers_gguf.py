"""A GGUF file's tensors as transformers loads a model from them."""

from pathlib import Path

import torch

from chairlift.errors import UnsupportedModel
from chairlift.folders.tensor_files import GGUF_WEIGHTS
from chairlift.gguf.architectures import WITH_CHANGES
from chairlift.gguf.gguf_file import GgufFile, shown
from chairlift.gguf.hybrid_tensors import HybridTensors
from chairlift.ops.ggml_blocks import unpack_blocks


def gguf_tensors(folder: Path, dtype: torch.dtype) -> HybridTensors | None:
    """The tensors of a folder that was made for a GGUF file; None of another. Raises UnsupportedModel.

    They are for a model of this type.
    """
    path = folder / GGUF_WEIGHTS
    if not path.exists():
        return None
    name = GgufFile(path, with_vocabulary=False).metadata.get("general.architecture")
    if not isinstance(name, str) or name not in WITH_CHANGES:
        known = ", ".join(WITH_CHANGES)
        raise UnsupportedModel(f"of GGUF files transformers computes those of {known} here, not of {shown(name)}")
    return HybridTensors(path, name, unpack_blocks, dtype)

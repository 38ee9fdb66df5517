"""A GGUF file's tensors as transformers loads a model from them: each is unpacked when its turn comes."""

from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.folders.tensor_files import GGUF_WEIGHTS
from chairlift.gguf.architectures import BY_TRANSFORMERS
from chairlift.gguf.gguf_file import GgufFile, shown
from chairlift.gguf.hybrid_tensors import HybridTensors
from chairlift.ops.ggml_blocks import unpack_blocks


class LaterTensor:
    """One of a file's tensors, which is read when all of it is asked for, as a slice of safetensors is."""

    def __init__(self, tensors: HybridTensors, name: str) -> None:
        self._tensors, self._name = tensors, name

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self._tensors.get_tensor(self._name)


def gguf_tensors(folder: Path, dtype: torch.dtype) -> dict[str, LaterTensor]:
    """The tensors of a folder that was made for a GGUF file, by name; none of another. Raises UnsupportedModel.

    They are for a model of this type.
    """
    path = folder / GGUF_WEIGHTS
    if not path.exists():
        return {}
    name = GgufFile(path, with_vocabulary=False).metadata.get("general.architecture")
    if not isinstance(name, str) or name not in BY_TRANSFORMERS:
        known = ", ".join(BY_TRANSFORMERS)
        raise UnsupportedModel(f"of GGUF files transformers computes those of {known} here, not of {shown(name)}")
    tensors = HybridTensors(path, name, unpack_blocks, dtype)
    return {each: LaterTensor(tensors, each) for each in tensors.keys()}  # noqa: SIM118

"""ggml's types of tensors, as the package gguf has them: which are read, and what room a tensor takes in its file."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile, TensorPlace

# By their names in ggml.
READ = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)


class Packing(NamedTuple):
    """A tensor's type, how many numbers and bytes a block of it has, and how many bytes the tensor."""

    kind: Any
    numbers: int
    block_bytes: int
    num_bytes: int


class TensorTypes:
    """The types by their numbers; `dequantize` unpacks blocks of one."""

    def __init__(self) -> None:
        """Ask the package. Raises UnsupportedModel if it is not there."""
        try:
            import gguf
            from gguf.quants import dequantize
        except ImportError as error:
            raise UnsupportedModel(
                f"GGUF files need the package gguf: pip install 'chairlift[gguf]' ({error})"
            ) from error
        self._kinds = {kind.value: kind for kind in gguf.GGMLQuantizationType}
        self._sizes: Any = gguf.GGML_QUANT_SIZES
        self.dequantize: Any = dequantize

    def packing_of(self, name: str, place: TensorPlace) -> Packing:
        """How a tensor is packed. Raises UnsupportedModel naming it if its type is not read, or can't have its rows."""
        kind = self._kinds.get(place.kind)
        if kind is None or kind.name not in READ:
            said = f"type {place.kind}" if kind is None else kind.name
            raise UnsupportedModel(f"tensor {name!r} is of {said}, which is not read; these are: {', '.join(READ)}")
        numbers, size = self._sizes[kind]
        width = place.shape[-1] if place.shape else 1
        if width % numbers:
            raise UnsupportedModel(f"tensor {name!r} has rows of {width} numbers, which {kind.name} can't have")
        return Packing(kind, numbers, size, math.prod(place.shape[:-1]) * (width // numbers * size))

    def packing_within(self, name: str, place: TensorPlace, file_name: str) -> Packing:
        """The same of a tensor that must lie within its file, which errors call by this name."""
        packing = self.packing_of(name, place)
        if place.offset + packing.num_bytes > len(place.data):
            raise UnsupportedModel(f"tensor {name!r} lies beyond the end of {file_name}")
        return packing


def numbers_of(path: Path) -> int:
    """How many numbers a file's tensors have. Raises UnsupportedModel naming one that could not be read."""
    file, types = GgufFile(path, with_vocabulary=False), TensorTypes()
    for name, place in file.tensors.items():
        types.packing_within(name, place, path.name)
    return sum(math.prod(place.shape) for place in file.tensors.values())

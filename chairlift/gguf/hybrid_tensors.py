"""The tensors of a GGUF file that has them otherwise than a folder of transformers', as such a folder has them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.gguf_tensors import GgufTensors, TensorShape, UnpackBlocks
from chairlift.gguf.hybrid_changes import HYBRID_NAMES
from chairlift.gguf.hybrid_names import TensorChange
from chairlift.gguf.told_settings import ToldSettings, numbers_of_layers

_LAYER = re.compile(r"blk\.(\d{1,6})\.")


class HybridTensors:
    """Reads tensors by the names of a folder. Raises UnsupportedModel naming the tensor at fault."""

    def __init__(
        self,
        path: Path,
        architecture: str,
        unpack_natively: UnpackBlocks | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Open a file of this architecture, whose blocks that unpacks where it can.

        What is put together of several is rounded to that type before: of experts it may take gigabytes.
        """
        self._known, self._dtype = HYBRID_NAMES[architecture], dtype
        self._tensors = GgufTensors(path, unpack_natively, self._known)
        self._told = ToldSettings(self._tensors.metadata, path.name)
        # Of a folder's name: what it is made of, and how, if it is not as it lies there.
        self._made: dict[str, tuple[Sequence[str], TensorChange | None]] = {}
        self._there = {*self._tensors.keys()}
        changes = {part: change for change in self._known.changes for part in change.parts}
        for name in self._tensors.keys():  # noqa: SIM118
            if self._guesses(name):
                continue
            before, own = self._known.layer_of(name)
            change = changes.get(own)
            parts = [name] if change is None else [f"{before}{part}" for part in change.parts]
            target = name if change is None else f"{before}{change.target}"
            if self._made.setdefault(target, (parts, change)) != (parts, change):
                raise UnsupportedModel(f"{path.name} has tensor {target!r} twice, in one piece and in several")
        self._numbers = dict(self._told_tensors())
        # What is made already, as somebody asked for its shape.
        self._ready: dict[str, Tensor] = {}

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return [*self._made, *(name for name in self._numbers if name not in self._made)]

    def count_told(self) -> int:
        """How many numbers lie in no tensor of the file."""
        return sum(each.numel() for each in self._numbers.values())

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of tensors that are as they lie in the file."""
        for name, (parts, change) in self._made.items():
            if change is None and [*parts] == [name]:
                yield name, tuple(self._tensors.get_slice(name).get_shape())

    def unknown(self) -> list[str]:
        """Those of names that no folder has anything for."""
        return self._tensors.unknown()

    def get_slice(self, name: str) -> TensorShape:
        """What has a tensor's shape. One that is in another form in the file is made for it, and kept."""
        if name not in self._numbers and self._made[name][1] is None:
            return self._tensors.get_slice(name)
        self._ready[name] = self.get_tensor(name)
        return TensorShape(tuple(self._ready[name].shape))

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor as float32, or as it is if it is in 16 bits."""
        if name in self._ready:
            return self._ready.pop(name)
        if name in self._numbers:
            return self._numbers[name]
        parts, change = self._made[name]
        if missing := [part for part in parts if part not in self._there]:
            raise UnsupportedModel(f"tensor {name!r} can't be made, as {missing[0]!r} is missing in the GGUF file")
        found = [self._part(part, len(parts)) for part in parts]
        if change is None:
            return found[0]
        try:
            return change.make(found, self._told).contiguous()
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(f"{part!r} of {list(each.shape)}" for part, each in zip(parts, found, strict=True))
            raise UnsupportedModel(f"tensor {name!r} can't be made of {shapes}: {error}") from error

    def _told_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those that are metadata of the file."""
        for each in self._known.told:
            numbers = numbers_of_layers(self._tensors.metadata, each.key, self._told.num_layers, self._told.file_name)
            for layer, number in enumerate(numbers):
                yield f"{self._known.layers}.{layer}.{each.target}", torch.full(each.shape, number)

    def _part(self, name: str, count: int) -> Tensor:
        tensor = self._tensors.get_tensor(name)
        return tensor if count == 1 else tensor.to(self._dtype)

    def _guesses(self, name: str) -> bool:
        """Whether it is of a layer behind the model's own, which guesses tokens ahead: nothing here asks for those."""
        found = _LAYER.match(self._tensors.own_name(name))
        first = self._told.num_layers
        return found is not None and first <= int(found[1]) < first + self._told.num_guessing


def open_tensors(path: Path, unpack_natively: UnpackBlocks, dtype: torch.dtype) -> GgufTensors | HybridTensors:
    """What reads a file's tensors by the names of a folder, for a model of this type."""
    name = GgufFile(path, with_vocabulary=False).metadata.get("general.architecture")
    if isinstance(name, str) and name in HYBRID_NAMES:
        return HybridTensors(path, name, unpack_natively, dtype)
    return GgufTensors(path, unpack_natively)

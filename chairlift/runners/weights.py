"""Tensors of a model folder: which file holds which, checked by name and shape, copied in the dtype wanted."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chairlift.errors import UnsupportedModel, clip
from chairlift.folders.quantization_config import QuantizationConfig
from chairlift.folders.tensor_files import GGUF_WEIGHTS, weight_files
from chairlift.gguf.gguf_tensors import GgufTensors
from chairlift.gguf.hybrid_tensors import HybridTensors, open_tensors
from chairlift.ops.ggml_blocks import unpack_blocks
from chairlift.runners.quantized_weights import QuantizedWeights

# Buffers that old checkpoints carry and that are derived from the config.
_DERIVED = (".rotary_emb.inv_freq", "embeddings.position_ids")


class Matrix(NamedTuple):
    """A projection's weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None = None


class Weights:
    """The safetensors files of a folder, or its GGUF file, memory-mapped.

    `take` copies, so nothing of a file is held once it is closed. Use as a context manager. Raises UnsupportedModel
    naming the file or tensor at fault.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, packing: QuantizationConfig | None = None
    ) -> None:
        """Open the files of a folder whose projections are packed so, or not at all."""
        self.dtype = dtype
        self.device = device
        self._handles: list[Any] = []
        self._handle_of: dict[str, Any] = {}
        self._unused: set[str] = set()
        for handle in _handles(folder, dtype):
            self._handles.append(handle)
            self._handle_of.update(dict.fromkeys(handle.keys(), handle))
        self._unused = {name for name in self._handle_of if not name.endswith(_DERIVED)}
        self._packed = None if packing is None else QuantizedWeights(packing, self._handle_of.keys(), self._get)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._packed = None
        self._handle_of.clear()
        self._handles.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._handle_of or self._is_packed(name)

    def _is_packed(self, name: str) -> bool:
        return self._packed is not None and self._packed.has(name)

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self._handle_of[name].get_tensor(name)
        return tensor

    def take(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None = None) -> Tensor:
        """Return the named tensors concatenated along their first dimension, on this reader's device.

        They get this reader's dtype unless another is given.
        """
        for name, shape in zip(names, shapes, strict=True):
            if not self._is_packed(name):
                self._check(name, shape)
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=dtype or self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            found = self._unpack(name, shape) if self._is_packed(name) else self._read(name)
            out[start : start + shape[0]].copy_(found)
            start += shape[0]
        return out

    def take_bytes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of bytes as it is. Raises UnsupportedModel if it is none."""
        self._check(name, shape)
        self._unused.discard(name)
        tensor: Tensor = self._handle_of[name].get_tensor(name)
        if tensor.dtype != torch.uint8:
            raise UnsupportedModel(f"tensor {name!r} is {tensor.dtype}, but packed weights are bytes")
        return tensor.to(self.device)

    def names(self) -> list[str]:
        """Those of all tensors, with that of a packed projection's weight in place of what it is packed in."""
        if self._packed is None:
            return list(self._handle_of)
        bases = {name.rpartition(".")[0] for name in self._handle_of}
        packed = [name for base in sorted(bases) if self._packed.has(name := f"{base}.weight")]
        parts = {part for name in packed for part in self._packed.parts_of(name)}
        return [*packed, *(name for name in self._handle_of if name not in parts)]

    def whole(self, name: str) -> Tensor:
        """Return a tensor as it is, or unpacked to float32, of whatever shape it says that it has."""
        return self._unpack(name, self.shape(name)) if self._is_packed(name) else self._read(name)

    def unused(self) -> set[str]:
        """The names of tensors that nobody has taken, but for those that are derived from the config, and for biases
        that are zero of packed projections."""
        return self._unused

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, or that which a packed projection is said to have. Raises UnsupportedModel if there is
        none of this name."""
        if self._packed is not None and self._packed.has(name):
            return self._packed.shape(name)
        handle = self._handle_of.get(name)
        if handle is None:
            raise UnsupportedModel(f"tensor {name!r} is missing from the model's {self._files()}")
        return tuple(handle.get_slice(name).get_shape())

    def _files(self) -> str:
        """What the tensors are in, and which of a GGUF file's may be one that is missed, under another name."""
        files = [handle for handle in self._handles if isinstance(handle, GgufTensors | HybridTensors)]
        if not files:
            return "safetensors files"
        unknown = [name for file in files for name in file.unknown()]
        beside = f", of whose tensors these are not known here: {clip(', '.join(unknown), 300)}" if unknown else ""
        return f"GGUF file{beside}"

    def leave(self, prefixes: Sequence[str]) -> None:
        """Take no notice of tensors whose names begin so."""
        self._unused = {name for name in self._unused if not name.startswith(tuple(prefixes))}

    def leave_derived(self, endings: tuple[str, ...]) -> None:
        """Take no notice of tensors whose names end so."""
        self._unused = {name for name in self._unused if not name.endswith(endings)} if endings else self._unused

    def refuse_unused(self, under: Sequence[str] = ("",)) -> None:
        """Raise UnsupportedModel if the files hold tensors, of names that begin so, that no part of the model took."""
        unused = {name for name in self._unused if name.startswith(tuple(under))}
        if unused:
            name = min(unused)
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise UnsupportedModel(f"unexpected tensor {name!r}{more}: the model in config.json has no such part")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise UnsupportedModel unless the tensor is there with this shape, before memory is taken for it."""
        found = self.shape(name)
        if found != shape:
            raise UnsupportedModel(f"tensor {name!r} has shape {list(found)}, but config.json asks for {list(shape)}")

    def _unpack(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._packed is not None
        self._unused.difference_update(self._packed.parts_of(name))
        # Some writers add biases that are all zero to projections that have none.
        bias = f"{name.removesuffix('weight')}bias"
        if bias in self._unused and not self._get(bias).any():
            self._unused.discard(bias)
        if len(shape) == 3:
            return self._packed.read_experts(name, (shape[0], shape[1], shape[2]))
        if len(shape) != 2:
            raise UnsupportedModel(f"tensor {name!r} is packed, but no projection")
        return self._packed.read(name, (shape[0], shape[1]))

    def _read(self, name: str) -> Tensor:
        self._unused.discard(name)
        tensor = self._get(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UnsupportedModel(
                f"tensor {name!r} is {tensor.dtype}; float32, float16 and bfloat16 weights work, quantized ones do not"
            )
        return tensor


def _handles(folder: Path, dtype: torch.dtype) -> Iterator[Any]:
    """What reads a folder's tensors for a model of this type, by `keys`, `get_slice` and `get_tensor`."""
    if (folder / GGUF_WEIGHTS).exists():
        yield open_tensors(folder / GGUF_WEIGHTS, unpack_blocks, dtype)
        return
    for path in weight_files(folder):
        try:
            yield safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path} cannot be read as safetensors: {error}") from error

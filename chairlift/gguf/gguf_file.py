"""A GGUF file's metadata, and where its tensors lie.

The format is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. The package `gguf` reads it as well, in some
seconds for a vocabulary of usual size, and without bounds; of it we take what a tensor's type is, and how it is
unpacked.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chairlift.errors import UnsupportedModel, clip

# What no real file comes near: pairs of metadata, tensors, elements of an array, bytes of a name and of a text, and
# dimensions.
_MOST_PAIRS, _MOST_TENSORS, _MOST_ELEMENTS, _MOST_NAME, _MOST_TEXT, _MOST_DIMS = 4096, 2**17, 2**22, 256, 2**24, 4
_MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
# Of a number's type: how it lies in the file.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8"} | {
    12: "<f8"
}


class TensorPlace(NamedTuple):
    """A tensor's shape, outermost first, the number of its type in ggml, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """`metadata` by key, and `tensors` by name. Raises UnsupportedModel, saying where, for a file that is none."""

    def __init__(self, path: Path) -> None:
        """Read all but the tensors."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorPlace] = {}
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
        self._at = 0
        try:
            self._read()
        except (ValueError, OverflowError, struct.error) as error:
            raise UnsupportedModel(f"{path} is no whole GGUF file, at byte {self._at}: {error}") from error

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a tensor in float32. Raises UnsupportedModel if it is none."""
        place = self.tensors[name]
        end = place.offset + 4 * math.prod(place.shape)
        if place.kind or end > min(len(self.data), place.offset + 2**20):
            raise UnsupportedModel(f"tensor {name!r} of {self.path.name} is not some float32 numbers within the file")
        found: list[float] = np.frombuffer(self.data[place.offset : end], "<f4").tolist()
        return found

    def _read(self) -> None:
        if self._bytes(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<u4")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not read; 2 and 3 are")
        num_tensors = self._count("tensors", _MOST_TENSORS)
        for _ in range(self._count("pairs of metadata", _MOST_PAIRS)):
            key = self._name()
            if key in self.metadata:
                raise ValueError(f"key {key!r} comes twice")
            self.metadata[key] = self._value(self._number("<u4"), key)
        places = {}
        for _ in range(num_tensors):
            name = self._name()
            if name in places:
                raise ValueError(f"tensor {name!r} comes twice")
            places[name] = self._place(name)
        alignment = self.metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16:
            raise ValueError(f"{_ALIGNMENT} is {shown(alignment)}")
        begin = -(-self._at // alignment) * alignment
        self.tensors = {name: place._replace(offset=begin + place.offset) for name, place in places.items()}

    def _place(self, name: str) -> TensorPlace:
        dims = self._number("<u4")
        if dims > _MOST_DIMS:
            raise ValueError(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._number("<u8") for _ in range(dims))
        if not 0 < math.prod(shape) <= 2**40:
            raise ValueError(f"tensor {name!r} has shape {list(shape)}")
        return TensorPlace(shape[::-1], self._number("<u4"), self._number("<u8"))

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"key {key!r} is of unknown type {kind}")
        of, count = self._number("<u4"), self._count(f"elements of {key!r}", _MOST_ELEMENTS)
        if of == _STRING:
            return [self._text() for _ in range(count)]
        if of not in _NUMBERS:
            raise ValueError(f"key {key!r} is a list of unknown type {of}")
        form = np.dtype(_NUMBERS[of])
        return np.frombuffer(self._bytes(count * form.itemsize), form).tolist()

    def _count(self, what: str, most: int) -> int:
        count: int = self._number("<u8")
        if count > most:
            raise ValueError(f"{count} {what}, more than the {most} that are read")
        return count

    def _number(self, form: str) -> Any:
        dtype = np.dtype(form)
        return np.frombuffer(self._bytes(dtype.itemsize), dtype)[0].item()

    def _name(self) -> str:
        name = self._text()
        if len(name) > _MOST_NAME or not name.isprintable():
            raise ValueError(f"a name of {len(name)} characters, or of some that can't be printed")
        return name

    def _text(self) -> str:
        # Read for each token of a vocabulary: without numpy it is some times as fast.
        (length,) = struct.unpack_from("<Q", self.data, self._at)
        self._at += 8
        if length > _MOST_TEXT:
            raise ValueError(f"a text of {length} bytes")
        # What is no UTF-8 is a part of a character, as tokens may be.
        return self._bytes(length).decode("utf-8", "replace")

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self.data):
            raise ValueError(f"the file ends at byte {len(self.data)}, before what it says it holds")
        found, self._at = self.data[self._at : end], end
        return found


def shown(value: object) -> str:
    """What a file says, for an error: it may be anything, of any length."""
    return clip(repr(value), 60)


def numbers_of(path: Path) -> int:
    """How many numbers a file's tensors have. Raises UnsupportedModel."""
    return sum(math.prod(place.shape) for place in GgufFile(path).tensors.values())

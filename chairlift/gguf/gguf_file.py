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
from chairlift.folders.tensor_files import GGUF_WEIGHTS
from chairlift.gguf.part_names import GGUF_PART, part_name

# What no real file comes near: pairs of metadata, tensors, elements of all arrays together, bytes of a name and of a
# text, and dimensions.
_MOST_PAIRS, _MOST_TENSORS, _MOST_ELEMENTS, _MOST_NAME, _MOST_TEXT, _MOST_DIMS = 4096, 2**17, 2**22, 256, 2**24, 4
_MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
# Of a number's type: how it lies in the file.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8"} | {
    12: "<f8"
}


class TensorPlace(NamedTuple):
    """A tensor's shape, outermost first, the number of its type in ggml, and where its bytes begin in which data."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    data: mmap.mmap


class GgufFile:
    """`metadata` by key, and `tensors` by name, also those of a model's other parts.

    Raises UnsupportedModel, saying where, for a file that is none.
    """

    def __init__(self, path: Path, *, with_vocabulary: bool = True) -> None:
        """Read all but the tensors of a file, and of the other parts if it is the first of several.

        Without the vocabulary lists of texts are None.
        """
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorPlace] = {}
        parts = parts_of(path)
        for index, part in enumerate(parts):
            own, tensors = _FileHead(part, with_vocabulary).read()
            if (own.get("split.count") or 1, own.get("split.no") or 0) != (len(parts), index):
                said = f"split.no = {shown(own.get('split.no'))} and split.count = {shown(own.get('split.count'))}"
                raise UnsupportedModel(
                    f"{part.name} has {said}, but by its name it is part {index + 1} of {len(parts)}"
                )
            if self.tensors.keys() & tensors.keys() or len(self.tensors) + len(tensors) > _MOST_TENSORS:
                raise UnsupportedModel(f"{part.name} has tensors of another part, or too many")
            self.metadata = self.metadata or own
            self.tensors |= tensors

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a tensor in float32. Raises UnsupportedModel if it is none."""
        place = self.tensors[name]
        end = place.offset + 4 * math.prod(place.shape)
        if place.kind or end > min(len(place.data), place.offset + 2**20):
            raise UnsupportedModel(f"tensor {name!r} of {self.path.name} is not some float32 numbers within the file")
        found: list[float] = np.frombuffer(place.data[place.offset : end], "<f4").tolist()
        return found


class _FileHead:
    """One file up to its tensors, as it is read."""

    def __init__(self, path: Path, with_vocabulary: bool) -> None:
        self._path, self._with_vocabulary = path, with_vocabulary
        self._metadata: dict[str, Any] = {}
        self._num_elements = 0
        if not path.is_file():
            # A pipe would be waited for.
            raise UnsupportedModel(f"{path} cannot be read: it is no file")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
        """Metadata and tensors."""
        try:
            return self._metadata, self._tensors()
        except (ValueError, OverflowError, struct.error) as error:
            raise UnsupportedModel(f"{self._path} is no whole GGUF file, at byte {self._at}: {error}") from error

    def _tensors(self) -> dict[str, TensorPlace]:
        if self._bytes(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<u4")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not read; 2 and 3 are")
        num_tensors = self._count("tensors", _MOST_TENSORS)
        for _ in range(self._count("pairs of metadata", _MOST_PAIRS)):
            key = self._name()
            if key in self._metadata:
                raise ValueError(f"key {key!r} comes twice")
            self._metadata[key] = self._value(self._number("<u4"), key)
        places = {}
        for _ in range(num_tensors):
            name = self._name()
            if name in places:
                raise ValueError(f"tensor {name!r} comes twice")
            places[name] = self._place(name)
        alignment = self._metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16:
            raise ValueError(f"{_ALIGNMENT} is {shown(alignment)}")
        begin = -(-self._at // alignment) * alignment
        return {name: place._replace(offset=begin + place.offset) for name, place in places.items()}

    def _place(self, name: str) -> TensorPlace:
        dims = self._number("<u4")
        if dims > _MOST_DIMS:
            raise ValueError(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._number("<u8") for _ in range(dims))
        if not 0 < math.prod(shape) <= 2**40:
            raise ValueError(f"tensor {name!r} has shape {list(shape)}")
        return TensorPlace(shape[::-1], self._number("<u4"), self._number("<u8"), self._data)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"key {key!r} is of unknown type {kind}")
        of, count = self._number("<u4"), self._number("<u8")
        self._num_elements += count
        if self._num_elements > _MOST_ELEMENTS:
            raise ValueError(f"{count} elements of {key!r}, and with those of other lists more than {_MOST_ELEMENTS}")
        if of == _STRING:
            return [self._text() for _ in range(count)] if self._with_vocabulary else self._pass_texts(count)
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
        # What is no UTF-8 is a part of a character, as tokens may be.
        return self._bytes(self._length()).decode("utf-8", "replace")

    def _pass_texts(self, count: int) -> None:
        for _ in range(count):
            length = self._length()
            self._at += length
        self._bytes(0)

    def _length(self) -> int:
        # Read for each token of a vocabulary: without numpy it is some times as fast.
        length: int = struct.unpack_from("<Q", self._data, self._at)[0]
        if length > _MOST_TEXT:
            raise ValueError(f"a text of {length} bytes")
        self._at += 8
        return length

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError(f"the file ends at byte {len(self._data)}, before what it says it holds")
        found, self._at = self._data[self._at : end], end
        return found


def parts_of(path: Path) -> list[Path]:
    """The files of a model in several parts, of which this is the first, or this alone. Raises UnsupportedModel.

    They lie beside each other and are told apart by their names. A link that stands for a file in a folder of its own
    (side_folder.py) leads to it.
    """
    named = path.readlink() if path.name == GGUF_WEIGHTS and path.is_symlink() else path
    found = GGUF_PART.fullmatch(named.name)
    if found is None:
        return [path]
    base, number, count = found[1], int(found[2]), int(found[3])
    if number != 1 or not count:
        raise UnsupportedModel(f"{named.name} is not the first of its parts: name {part_name(base, 1, count)}")
    parts = [named.with_name(part_name(base, number, count)) for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise UnsupportedModel(f"{part.name} is missing beside {named.name}, a model in {count} parts")
    return parts


def shown(value: object) -> str:
    """What a file says, for an error: it may be anything, of any length."""
    return clip(repr(value), 60)

"""Payloads and results between processes: JSON-like values, bytes and NumPy arrays, as msgpack and raw frames.

Large arrays travel as frames of their own, which neither side copies. No pickle, so no message can run code.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

# Below this many bytes a copy is cheaper than a frame.
_INLINE_BYTES = 4096
_INLINE, _FRAMED, _OBJECTS = 1, 2, 3
# Levels of lists and dicts, and how many of them on one level.
_MAX_DEPTH, _MAX_LISTS = 96, 2**22
_PLAIN_KINDS = "biufcSUmM"
# The bytes that a number is counted as, and what any value has beside its content.
_NUMBER = 8
_NUMBERS = frozenset({int, float, bool})


def encode(value: Any, *, checked: bool = False) -> list[bytes | memoryview]:
    """Return the frames of a value of dicts, lists, strings, numbers, bytes, arrays, and whatever NumPy can read.

    NumPy scalars become plain numbers. Arrays that are framed are not copied: they must not change until the frames are
    sent. Raises TypeError for other objects, for structured arrays and bfloat16; OverflowError for integers beyond 64
    bits; ValueError for a value that contains itself, or is nested too deeply. What is `checked` is known not to be: to
    look takes seconds where there are millions of lists.
    """
    if not checked:
        _check_depth(value)
    writer = _FrameWriter()
    writer.frames[0] = writer.written(value)
    return writer.frames


def encode_each(values: Sequence[Any]) -> list[bytes | memoryview]:
    """The same frames of a list of values that are `checked`, made by a thread while others go on.

    msgspec lets no other thread run before it has written a whole value, so they are written one by one.
    """
    writer = _FrameWriter()
    writer.frames[0] = msgspec.msgpack.encode([msgspec.Raw(writer.written(value)) for value in values])
    return writer.frames


def size_in_header(values: Sequence[Any], most: int) -> int:
    """About the bytes of values in their first frame; beyond `most` it looks no further.

    Large arrays have frames of their own, which are not written, and others are small.
    """
    size = 0
    rest: list[Any] = [values]
    while rest and size <= most:
        outer = rest.pop()
        size += _NUMBER * len(outer)
        # Lists of numbers are not gone through one by one.
        if size > most or (isinstance(outer, list) and _NUMBERS.issuperset(map(type, outer))):
            continue
        for inner in outer.values() if isinstance(outer, dict) else outer:
            kind = type(inner)
            if kind is str or kind is bytes:
                size += len(inner)
            elif kind is dict or kind is list or kind is tuple:
                rest.append(inner)
            elif kind is np.ndarray and inner.dtype == object:
                size += _NUMBER * inner.size
    return size


class _FrameWriter:
    """Makes frames of what is no plain data. Functions that name each other would keep frames until they are collected.

    The first frame is that of the plain data.
    """

    def __init__(self) -> None:
        self.frames: list[bytes | memoryview] = [b""]

    def written(self, value: Any) -> bytes:
        """A value as it stands in the first frame. Raises as `encode`."""
        try:
            return msgspec.msgpack.encode(value, enc_hook=self.convert)
        except RecursionError:
            raise ValueError("the value is nested too deeply, or contains itself") from None

    def convert(self, part: Any) -> Any:
        """Return plain data for a part, or an extension that stands for it."""
        if isinstance(part, np.generic) and part.dtype.kind in "biufSU":
            return part.item()
        if not hasattr(part, "__array__"):
            raise TypeError(
                f"{type(part).__module__}.{type(part).__qualname__} can't be sent between processes; give dicts, "
                "lists, strings, numbers, bytes or arrays"
            )
        try:
            array = np.asarray(part)
        except Exception as error:
            # A tensor that is on a GPU, wants gradients or is bfloat16, each of which raises its own kind.
            raise TypeError(f"{type(part).__qualname__} can't be made a NumPy array: {error}") from error
        return self._extension(array)

    def _extension(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        kind = array.dtype.kind
        if kind == "O":
            return self._ext(_OBJECTS, array.shape, array.ravel().tolist())
        if kind not in _PLAIN_KINDS:
            raise TypeError(f"arrays of {array.dtype.name} can't be sent between processes; convert to float32, say")
        if array.nbytes < _INLINE_BYTES:
            return self._ext(_INLINE, array.shape, array.dtype.str, array.tobytes())
        self.frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return self._ext(_FRAMED, array.shape, array.dtype.str, len(self.frames) - 1)

    def _ext(self, code: int, *parts: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts, enc_hook=self.convert))


def _check_depth(value: Any) -> None:
    """Raise ValueError for what is nested so deeply that others could not read it, or would have no end of lists."""
    level = [value] if isinstance(value, list | tuple | dict) else []
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | tuple | dict)
        ]
        if not level:
            return
        if len(level) > _MAX_LISTS:
            raise ValueError(f"the value has more than {_MAX_LISTS:,} lists and dicts on one level, or contains itself")
    raise ValueError(f"the value is nested more than {_MAX_DEPTH} levels deep, or contains itself")


def decode(frames: Sequence[memoryview], kind: Any = Any) -> Any:
    """Return what `encode` was given, or, with a `kind`, what msgspec makes of it. Tuples come back as lists.

    Arrays that were framed lie in the frames' own memory, and arrays may be written to if the frames may. Raises
    msgspec.DecodeError or ValueError for frames that `encode` did not make.
    """

    return msgspec.msgpack.decode(frames[0], type=kind, ext_hook=_FrameReader(frames).convert)


def decode_each(frames: Sequence[memoryview]) -> list[Any]:
    """The same of a list, read by a thread while others go on: value by value, as `encode_each` writes them."""
    convert = _FrameReader(frames).convert
    values = msgspec.msgpack.decode(frames[0], type=list[msgspec.Raw])
    return [msgspec.msgpack.decode(value, ext_hook=convert) for value in values]


class _FrameReader(NamedTuple):
    """Reads the extensions that `_FrameWriter` makes."""

    frames: Sequence[memoryview]

    def convert(self, code: int, data: memoryview) -> Any:
        """Return the array that an extension stands for."""
        shape, *rest = msgspec.msgpack.decode(data, ext_hook=self.convert)
        if code == _OBJECTS:
            return _objects(shape, rest[0])
        dtype, content = rest
        buffer = bytearray(content) if code == _INLINE else self.frames[content]
        array: np.ndarray = np.ndarray(shape, dtype, buffer)
        return array if array.flags.aligned else array.copy()


def _objects(shape: list[int], values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # at once, NumPy would look into lists and arrays
        array[index] = value
    return array.reshape(shape)

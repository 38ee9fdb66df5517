"""Tensors on the wire: as JSON values or raw bytes, to arrays and back."""

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.errors import InvalidRequest
from chairlift.runners.tensors import dtype_of
from chairlift.server.http.api_errors import ApiError

TensorArray = npt.NDArray[Any]

_MAX_DIMENSIONS, _MAX_SIZE = 32, 2**40
_NUMBERS = frozenset({bool, int, float})
_LENGTH = struct.Struct("<I")
# What kinds of JSON values an array of some kind may be made of.
_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: bytes | memoryview) -> TensorArray:
    """An array from little-endian bytes, row by row; a BYTES element is its length in 4 bytes and itself.

    BF16 becomes FP32, which has all its numbers.
    """
    if datatype == "BF16":
        halves = from_raw(name, "UINT16", shape, raw).astype(np.uint32)
        return (halves << 16).view(np.float32)
    dtype, size = _dtype(name, datatype), _size(name, shape)
    if datatype == "BYTES":
        return _objects(_elements(name, raw, size), name, shape)
    if len(raw) != size * dtype.itemsize:
        expected = f"{size * dtype.itemsize} bytes for {datatype} {list(shape)}"
        raise InvalidRequest(f"input {name!r} needs {expected}, got {len(raw)}", name)
    return np.frombuffer(raw, dtype=dtype.newbyteorder("<")).reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> TensorArray:
    """An array from JSON values, nested or flat. A number that the type can't hold is an error, never rounded."""
    dtype, size = _dtype(name, datatype), _size(name, shape)
    leaves = _leaves(name, values)
    if datatype == "BYTES":
        return _objects(leaves, name, shape)
    # Among texts NumPy would make every element as wide as the longest.
    if not _NUMBERS.issuperset(map(type, leaves)):
        raise InvalidRequest(f"input {name!r} has values that are not {datatype}", name)
    # Of integers on both sides of 2**63 NumPy would make floats, which hold none of the large ones exactly.
    exact = dtype == np.uint64 and set(map(type, leaves)) == {int}
    if exact and not (min(leaves) >= 0 and max(leaves) < 2**64):
        raise _outside(name, datatype)
    try:
        given = np.asarray(values, np.uint64 if exact else None)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"input {name!r} has rows of different lengths", name) from None
    if given.size != size:
        raise InvalidRequest(f"input {name!r} needs {size} values for shape {list(shape)}, got {given.size}", name)
    if given.size and given.dtype.kind not in _KINDS[dtype.kind]:
        raise InvalidRequest(f"input {name!r} has values that are not {datatype}", name)
    if dtype.kind in "iu" and given.size:
        bounds = np.iinfo(dtype)
        if int(given.min()) < bounds.min or int(given.max()) > bounds.max:
            raise _outside(name, datatype)
    with np.errstate(over="ignore"):
        array = given.astype(dtype)
    # What was sent as infinite (gRPC can) may stay so.
    if dtype.kind == "f" and not np.array_equal(np.isinf(array), np.isinf(given)):
        raise _outside(name, datatype)
    return array.reshape(shape)


def _outside(name: str, datatype: str) -> InvalidRequest:
    return InvalidRequest(f"input {name!r} has values outside the range of {datatype}", name)


def to_raw(array: TensorArray, datatype: str) -> bytes:
    """The array's bytes, as `from_raw` reads them. Numbers of BF16 are the nearest to those of the array."""
    if datatype == "BF16":
        return _halves(array).astype("<u2", copy=False).tobytes()
    if datatype != "BYTES":
        return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        raw = element.encode() if isinstance(element, str) else bytes(element)
        parts += (_LENGTH.pack(len(raw)), raw)
    return b"".join(parts)


def _halves(array: TensorArray) -> npt.NDArray[np.uint16]:
    """The upper halves of FP32 numbers, rounded to the nearest, of two to the even one."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # What is no number must not become infinite.
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def to_values(name: str, array: TensorArray, datatype: str) -> list[Any]:
    """The array's values in one flat list. Raises ApiError for those that JSON has no place for."""
    if datatype == "BF16":
        message = f"output {name!r}: the data type 'BF16' has no JSON values; ask for it as binary data"
        raise ApiError(400, message, name, "binary_output")
    flat: list[Any] = array.ravel().tolist()
    if datatype != "BYTES":
        return flat
    try:
        return [element if isinstance(element, str) else bytes(element).decode() for element in flat]
    except UnicodeDecodeError:
        message = f"output {name!r} is not text; ask for it as binary data"
        raise ApiError(400, message, name, "binary_output") from None


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype == "BF16":
        raise InvalidRequest(f"input {name!r}: the data type 'BF16' has no JSON values; send its bytes", name)
    try:
        return dtype_of(datatype)
    except ValueError as error:
        raise InvalidRequest(f"input {name!r}: {error}", name) from None


def _size(name: str, shape: Sequence[int]) -> int:
    if any(length < 0 for length in shape):
        raise InvalidRequest(f"input {name!r}: a shape has no negative numbers, got {list(shape)}", name)
    # Without its zeros, as NumPy also looks at the strides of empty arrays.
    if len(shape) > _MAX_DIMENSIONS or math.prod(max(length, 1) for length in shape) > _MAX_SIZE:
        problem = f"a shape has at most {_MAX_DIMENSIONS} dimensions and {_MAX_SIZE} elements"
        raise InvalidRequest(f"input {name!r}: {problem}", name)
    return math.prod(shape)


def _elements(name: str, raw: bytes | memoryview, most: int) -> list[bytes]:
    """The elements, if there are no more than the shape has: many millions of empty ones fit into little memory."""
    found: list[bytes] = []
    start, end = 0, len(raw)
    while start < end:
        if len(found) == most:
            raise InvalidRequest(f"input {name!r} needs {most} elements, got more", name)
        if start + _LENGTH.size > end:
            break
        (length,) = _LENGTH.unpack_from(raw, start)
        start += _LENGTH.size + length
        found.append(bytes(raw[start - length : start]))
    if start != end:
        raise InvalidRequest(f"input {name!r}: the lengths of its elements don't add up to its {end} bytes", name)
    return found


def _leaves(name: str, values: Any) -> list[Any]:
    """All values in the order in which nested lists have them."""
    level = [values]
    for _ in range(_MAX_DIMENSIONS + 1):
        if list not in set(map(type, level)):
            return level
        level = list(chain.from_iterable(each if type(each) is list else (each,) for each in level))
    raise InvalidRequest(f"input {name!r} is nested more than {_MAX_DIMENSIONS} levels deep", name)


def _objects(elements: list[Any], name: str, shape: Sequence[int]) -> TensorArray:
    if len(elements) != math.prod(shape):
        raise InvalidRequest(f"input {name!r} needs {math.prod(shape)} elements, got {len(elements)}", name)
    if not all(isinstance(element, str | bytes) for element in elements):
        raise InvalidRequest(f"input {name!r} has values that are not BYTES", name)
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = [element.encode() if isinstance(element, str) else element for element in elements]
    return array.reshape(shape)

"""Named tensors of single items: data types as the Open Inference Protocol spells them, checks, and stacking."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from chairlift.errors import InvalidRequest
from chairlift.runners.items import TensorSpec

# BYTES are object arrays of `bytes`. NumPy has no BF16; FP32 has all its numbers.
_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(np.float32),
    "BYTES": np.dtype(object),
}
_DATATYPES = {dtype: datatype for datatype, dtype in _DTYPES.items() if datatype != "BF16"}
DATATYPES = tuple(_DTYPES)


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the NumPy type of a protocol data type. Raises ValueError, listing those that exist."""
    if datatype not in _DTYPES:
        raise ValueError(f"data type {datatype!r} is not one of {', '.join(DATATYPES)}")
    return _DTYPES[datatype]


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Return the protocol's name of a NumPy type. Raises ValueError for a type that it has no name for."""
    found = _DATATYPES.get(dtype.newbyteorder("="))
    if found is None:
        raise ValueError(f"arrays of {dtype.name} have no data type in the Open Inference Protocol")
    return found


def itemsize_of(datatype: str) -> int:
    """Return the bytes of a number on the wire. Raises ValueError as `dtype_of`."""
    return 2 if datatype == "BF16" else dtype_of(datatype).itemsize


def as_floats(value: Any) -> np.ndarray:
    """Make FP32 of numbers, or of an array or tensor that may be bfloat16, for which NumPy has no type."""
    if not isinstance(value, np.ndarray) and hasattr(value, "float"):
        value = value.float()  # a tensor of torch
    return np.asarray(value, np.float32)


def as_bytes(texts: Any) -> np.ndarray:
    """Make a BYTES tensor of an array or nested list of text, as UTF-8, or bytes."""
    array = np.asarray(texts, dtype=object)
    made = np.empty(array.size, dtype=object)
    made[:] = [each.encode() if isinstance(each, str) else each for each in array.ravel()]
    return made.reshape(array.shape)


def check_tensors(
    tensors: Mapping[str, Any], specs: Sequence[TensorSpec], side: Literal["input", "output"] = "input"
) -> None:
    """Hold one item's tensors against what a model takes or gives. Raises InvalidRequest that names the tensor."""
    for spec in specs:
        if spec.name not in tensors:
            raise InvalidRequest(f"{side} {spec.name!r} is missing", spec.name)
        problem = _problem(tensors[spec.name], spec)
        if problem:
            raise InvalidRequest(f"{side} {spec.name!r} must {problem}", spec.name)
    unknown = tensors.keys() - {spec.name for spec in specs}
    if unknown:
        name = min(unknown)
        known = ", ".join(spec.name for spec in specs)
        raise InvalidRequest(f"the model has no {side} {name!r}, only {known}", name)


def _problem(array: Any, spec: TensorSpec) -> str | None:
    if not isinstance(array, np.ndarray):
        return f"be an array, got {type(array).__name__}"
    if array.dtype != dtype_of(spec.datatype):
        return f"be {spec.datatype}, got {_named(array.dtype)}"
    fits = len(array.shape) == len(spec.shape) and all(
        wanted in (-1, given) for wanted, given in zip(spec.shape, array.shape, strict=True)
    )
    return None if fits else f"have shape {list(spec.shape)} (-1 is any), got {list(array.shape)}"


def groups(values: Sequence[Any]) -> list[list[int]]:
    """Sort arrays (or dicts of arrays) into those that can be stacked: the indices of each group, in order."""
    found: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        found.setdefault(_shape_key(value), []).append(index)
    return list(found.values())


def _shape_key(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, *_shape_key(value[name])) for name in sorted(value))
    return (value.shape, value.dtype.str)


def stack(values: Sequence[Any]) -> Any:
    """Stack arrays (or dicts of arrays) of equal shapes along a new first axis."""
    if isinstance(values[0], Mapping):
        return {name: np.stack([value[name] for value in values]) for name in values[0]}
    return np.stack(values)


def split(stacked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Undo `stack` for a dict: one dict for each row. All must have equally many rows."""
    names = list(stacked)
    return [dict(zip(names, rows, strict=True)) for rows in zip(*stacked.values(), strict=True)]


def _named(dtype: np.dtype[Any]) -> str:
    try:
        return datatype_of(dtype)
    except ValueError:
        return dtype.name

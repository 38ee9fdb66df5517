"""Named tensors of single items: data types as the Open Inference Protocol spells them."""

from typing import Any

import numpy as np

# BYTES are object arrays of `bytes`. BF16 is missing: NumPy has no such type.
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
    "BYTES": np.dtype(object),
}
_DATATYPES = {dtype: datatype for datatype, dtype in _DTYPES.items()}
DATATYPES = tuple(_DTYPES)


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the NumPy type of a protocol data type. Raises ValueError, listing those that exist."""
    if datatype not in _DTYPES:
        raise ValueError(f"data type {datatype!r} is not one of {', '.join(DATATYPES)}")
    return _DTYPES[datatype]


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Return the protocol's name of a NumPy type; text is BYTES. Raises ValueError for a type that has none."""
    if dtype.kind in "SU":
        return "BYTES"
    found = _DATATYPES.get(dtype.newbyteorder("="))
    if found is None:
        raise ValueError(f"arrays of {dtype.name} have no data type in the Open Inference Protocol")
    return found

"""Embeddings as answers give them: shortened, normalized, and written as JSON."""

from base64 import b64encode
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from chairlift.errors import InvalidRequest
from chairlift.runners.items import ItemInfo

Vectors = npt.NDArray[np.float32]


def check_dimensions(info: ItemInfo, dimensions: int | None) -> None:
    """Refuse more dimensions than the model has, or none."""
    if dimensions is None:
        return
    if dimensions < 1 or (info.dimensions is not None and dimensions > info.dimensions):
        message = f"dimensions must be between 1 and the model's {info.dimensions}, got {dimensions}"
        raise InvalidRequest(message, "dimensions")


def stack(values: Sequence[npt.ArrayLike], dimensions: int | None = None, normalize: bool = False) -> Vectors:
    """One row for each vector; a shortened one is brought back to length 1, as Matryoshka models are meant to be."""
    rows: Vectors = np.asarray(values, dtype=np.float32)
    if dimensions is not None and dimensions < rows.shape[1]:
        rows, normalize = rows[:, :dimensions], True
    if normalize:
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = (rows / np.where(norms > 0, norms, 1)).astype(np.float32)
    return rows


def as_json(rows: Vectors) -> list[bytes]:
    """Each row as a JSON array of numbers."""
    encode = msgspec.json.encode
    return [encode(row.tolist()) for row in rows]


def as_base64(rows: Vectors) -> list[bytes]:
    """Each row as a JSON string: base64 of little-endian float32."""
    return [b'"' + b64encode(row) + b'"' for row in np.ascontiguousarray(rows, dtype="<f4")]

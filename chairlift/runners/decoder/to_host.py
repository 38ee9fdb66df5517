"""Results of a step, brought from the device to the host all at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Each tensor begins at a multiple of this many bytes, so that any type can be read where it lies.
_ALIGNMENT = 8
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32, torch.int64: np.int64}


def to_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return tensors of one device as arrays, by one copy; on the CPU they are the same memory."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    return split(pack(tensors).cpu().numpy(), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, end to end."""
    parts = []
    for tensor in tensors:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        parts += [flat, flat.new_zeros(-len(flat) % _ALIGNMENT)]
    return torch.cat(parts)


def split(packed: NDArray[np.uint8], tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Read arrays of the shapes and types of `tensors` out of what `pack` made of them."""
    arrays: list[NDArray[Any]] = []
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        arrays.append(packed[start:end].view(_NUMPY[tensor.dtype]).reshape(tensor.shape))
        start = end + -end % _ALIGNMENT
    return arrays

"""Blocks of ggml's packed types, unpacked natively: see native/ggml_blocks.cpp."""

import numpy as np
from numpy.typing import NDArray

from chairlift.ops.native import find_library


def unpack_blocks(kind: int, blocks: NDArray[np.uint8], numbers: NDArray[np.float32]) -> bool:
    """Unpack blocks [N, bytes] of a type, by its number in ggml, into numbers [N, numbers of one].

    Returns whether the type is known here and the library is there; both arrays must be contiguous.
    """
    library = find_library()
    data = blocks.ctypes.data, len(blocks), numbers.ctypes.data
    return library is not None and bool(library.chairlift_unpack_blocks(kind, *data))

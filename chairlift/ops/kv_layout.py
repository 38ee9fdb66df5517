"""What keys and values take in a cache, as far as memory is counted by it. Without torch, for who only counts."""

# As in native/kv.h: the heads that the native kernels take, and what rows of V are filled up to.
MAX_HEAD_DIM = 576
_ROW = 16


def has_kernels(head_dim: int) -> bool:
    """Whether the native kernels take heads of this size."""
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def padded_dim(head_dim: int) -> int:
    """The numbers of a row of V in the native kernels' cache."""
    return -(-head_dim // _ROW) * _ROW


def bytes_of_token(head_dim: int, itemsize: int, scale: int, pads_values: bool) -> int:
    """Bytes of a token's K and V under one head, of numbers and of a scale that take so many bytes."""
    values = padded_dim(head_dim) if pads_values else head_dim
    return (head_dim + values) * itemsize + 2 * scale

"""Attention heads as the native kernels see them."""

from torch import Tensor

from chairlift.ops.base import HeadShape
from chairlift.ops.native import DTYPES, FLOAT, HeadsStruct


def heads_struct(heads: HeadShape, k: Tensor) -> HeadsStruct:
    """Return the C structure of `heads` over the cache `k`. It keeps what it points to."""
    sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, k.shape[3], heads.window or 0)
    slopes = None if heads.slopes is None else (FLOAT * heads.num_heads)(*heads.slopes)
    return HeadsStruct(*sizes, heads.both_ways, heads.scale, heads.cap or 0.0, DTYPES[k.dtype], slopes)

"""The rows of projections in the order of a folder, out of that of a GGUF file."""

from typing import Any

import torch
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown


def unpaired(rows: Tensor, heads: Any, name: str) -> Tensor:
    """Rows of queries or keys in the order in which the halves of a head are rotated, not its neighbours.

    Raises UnsupportedModel naming the tensor, as all here.
    """
    if not isinstance(heads, int) or heads < 1 or rows.shape[0] % (2 * heads):
        raise UnsupportedModel(f"tensor {name!r} has {rows.shape[0]} rows, which are not {shown(heads)} heads")
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()


def rows_of_parts(num_rows: int, heads: Any, key_heads: Any, name: str) -> list[int]:
    """How many rows of a joint projection are queries', keys' and values'."""
    counts = heads, key_heads
    are_counts = all(isinstance(each, int) and 0 < each <= num_rows for each in counts)
    if not are_counts or heads % key_heads or num_rows % (heads + 2 * key_heads):
        said = f"{shown(heads)} heads of queries and {shown(key_heads)} of keys and of values"
        raise UnsupportedModel(f"tensor {name!r} has {num_rows} rows, which are not {said}")
    size = num_rows // (heads + 2 * key_heads)
    return [heads * size, key_heads * size, key_heads * size]


def grouped(rows: Tensor, heads: Any, key_heads: Any, name: str) -> Tensor:
    """Rows of all queries, keys and values, put by the heads of keys: queries that belong to one, its own, its values'.

    Of those with a head of keys for each of queries that is a query, a key and a value by turns.
    """
    parts = torch.split(rows, rows_of_parts(rows.shape[0], heads, key_heads, name))
    return torch.cat([part.reshape(key_heads, -1, *rows.shape[1:]) for part in parts], dim=1).reshape(rows.shape)


def joined_up(keys: Tensor, values: Tensor) -> Tensor:
    """What makes keys and values of a latent [heads * (P + V), R], out of [heads, R, P] for keys and [heads, V, R]."""
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)

"""Steps of attention over a paged cache, by any operations: inputs, blocks that lie anywhere, and outputs."""

import torch

from chairlift.ops.base import AttentionBatch, HeadShape
from chairlift.ops.contract import Ops
from chairlift.ops.rotation import RotaryTable

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2}}
# Two prefill chunks and a decode of sequences of unequal length, one of which joins late.
STEPS = [
    [(0, 5), (0, 77), (0, 300), (0, 0)],
    [(5, 6), (77, 110), (300, 301), (0, 33)],
    [(6, 7), (110, 111), (301, 302), (33, 34)],
]
SHAPES = [
    # heads, kv heads, head_dim, block_size, window
    (9, 3, 64, 16, None),
    (4, 4, 32, 16, None),
    (14, 2, 64, 32, 50),
    (8, 1, 128, 16, None),
    (6, 2, 40, 8, 17),
    (3, 1, 80, 24, None),
    (4, 2, 96, 5, 1),
    (2, 1, 256, 16, 300),
    (80, 1, 64, 16, None),
    (2, 2, 8, 1, 64),
    (7, 1, 576, 16, None),
    (17, 1, 288, 8, None),  # more heads than rows are multiplied at once
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype])


def angles(length: int, dim: int) -> torch.Tensor:
    frequency = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(0, dim, 2).float() / dim))
    return torch.cat((frequency.cos(), frequency.sin()), dim=-1).contiguous()


def blocks_for(lengths: list[int], block_size: int) -> list[list[int]]:
    """Scattered physical blocks for sequences of these lengths."""
    needed = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    return [[order.pop() for _ in range(count)] for count in needed]


def make_batch(parts: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> AttentionBatch:
    """Tokens first:last of each sequence, whose blocks are `tables`."""
    positions = [torch.arange(first, last) for first, last in parts]
    padded = torch.full((len(parts), max(map(len, tables)) + 2), 10**9, dtype=torch.int32)
    slots = []
    for row, (table, at) in enumerate(zip(tables, positions, strict=True)):
        padded[row, : len(table)] = torch.tensor(table)
        slots.append(torch.tensor(table)[at // block_size] * block_size + at % block_size)
    return AttentionBatch(
        query_start=torch.tensor([0, *(last - first for first, last in parts)]).cumsum(0).int(),
        context_len=torch.tensor([last for _, last in parts], dtype=torch.int32),
        block_tables=padded,
        slot_mapping=torch.cat(slots),
        positions=torch.cat(positions),
        max_query_len=max(last - first for first, last in parts),
        max_context_len=max(last for _, last in parts),
    )


def norms_of(heads: HeadShape, norm: str | None, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Weights of the norms of queries and keys: of each "head" in `dtype`, or of the "projection" in float32."""
    if norm == "projection":
        sizes = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        return [random(size, seed=seed) for size, seed in zip(sizes, (98, 99), strict=True)]
    return [random(heads.head_dim, dtype=dtype, seed=seed) if norm else None for seed in (98, 99)]


def run_steps(ops: Ops, heads: HeadShape, dtype: torch.dtype, block_size: int, steps: list[list[tuple[int, int]]],
              keep: list[int] | None = None, norm: str | None = None, cached: torch.dtype | None = None,
              ) -> list[torch.Tensor]:  # fmt: skip
    """Rotate, write and attend, step by step; each step gives (first, last) of every sequence, of which `keep` run."""
    lengths = [max(last for _, last in parts) for parts in zip(*steps, strict=True)]
    keep = list(range(len(lengths))) if keep is None else keep
    tables = blocks_for(lengths, block_size)
    cache = ops.allocate_kv_cache(sum(map(len, tables)) + 3, block_size, heads, cached or dtype, CPU)
    for pages in cache:
        # What other sequences left behind must never matter.
        pages.fill_(float("nan") if pages.is_floating_point() else 99)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    inputs = [random(length, width, dtype=dtype, seed=seed) for seed, length in enumerate(lengths)]
    norms = norms_of(heads, norm, dtype)
    cos_sin = angles(max(lengths), heads.head_dim)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    for parts in steps:
        running = [index for index in keep if parts[index][0] < parts[index][1]]
        if not running:
            continue
        batch = make_batch([parts[index] for index in running], [tables[index] for index in running], block_size)
        qkv = torch.cat([inputs[index][slice(*parts[index])] for index in running])
        query = ops.rope_and_write(qkv, RotaryTable(cos_sin), batch, cache, heads, *norms, 1e-6)
        out = ops.attention(query, cache, batch, heads)
        starts = batch.query_start.tolist()
        for row, index in enumerate(running):
            outputs[index].append(out[starts[row] : starts[row + 1]])
    return [torch.cat(outputs[index]) for index in keep]

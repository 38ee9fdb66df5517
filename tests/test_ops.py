"""The native operations against the reference, for every instruction set that was built."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.ops import cpu, select
from chairlift.ops.base import AttentionBatch, HeadShape, Ops
from chairlift.ops.reference import ReferenceOps

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2}}
DTYPES = [torch.float32, torch.bfloat16]
needs_native = pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the native library is not built")


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def native(dtype: torch.dtype) -> Ops:
    return cpu.CpuOps(dtype)


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
    )


def run_steps(ops: Ops, heads: HeadShape, dtype: torch.dtype, block_size: int, steps: list[list[tuple[int, int]]],
              keep: list[int] | None = None, norm: bool = False) -> list[torch.Tensor]:  # fmt: skip
    """Rotate, write and attend, step by step; each step gives (first, last) of every sequence, of which `keep` run."""
    lengths = [max(last for _, last in parts) for parts in zip(*steps, strict=True)]
    keep = list(range(len(lengths))) if keep is None else keep
    tables = blocks_for(lengths, block_size)
    cache = ops.allocate_kv_cache(sum(map(len, tables)) + 3, block_size, heads, dtype, CPU)
    for pages in cache:
        # What other sequences left behind must never matter.
        pages.fill_(float("nan"))
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    inputs = [random(length, width, dtype=dtype, seed=seed) for seed, length in enumerate(lengths)]
    norms = [random(heads.head_dim, dtype=dtype, seed=seed) for seed in (98, 99)] if norm else [None, None]
    cos_sin = angles(max(lengths), heads.head_dim)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    for parts in steps:
        running = [index for index in keep if parts[index][0] < parts[index][1]]
        batch = make_batch([parts[index] for index in running], [tables[index] for index in running], block_size)
        qkv = torch.cat([inputs[index][slice(*parts[index])] for index in running])
        query = ops.rope_and_write(qkv, cos_sin, batch, cache, heads, *norms, 1e-6)
        out = ops.attention(query, cache, batch, heads)
        starts = batch.query_start.tolist()
        for row, index in enumerate(running):
            outputs[index].append(out[starts[row] : starts[row + 1]])
    return [torch.cat(outputs[index]) for index in keep]


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
]


@needs_native
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
def test_attention_is_that_of_the_reference(native: Ops, dtype: torch.dtype, shape: tuple, norm: bool) -> None:
    num_heads, num_kv_heads, dim, block_size, window = shape
    heads = HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window)
    actual = run_steps(native, heads, dtype, block_size, STEPS, norm=norm)
    expected = run_steps(ReferenceOps(), heads, dtype, block_size, STEPS, norm=norm)
    for one, other in zip(actual, expected, strict=True):
        close(one, other)

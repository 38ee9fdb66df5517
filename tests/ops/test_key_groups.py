"""Attention of texts of any lengths laid end to end, held against one text after the other."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chairlift.ops import cuda, key_groups
from chairlift.ops.base import AttentionBatch, HeadShape, KeyGroup, KVCache
from chairlift.ops.cuda import CudaOps
from chairlift.ops.reference import ReferenceOps

# (tokens in the step, tokens in the context): prompts, chunks of prompts, and decodes among them.
LENGTHS = [(7, 7), (1, 90), (33, 110), (1, 1), (64, 64), (2, 41)]
# (heads, heads of keys, size of a head, tokens in a block, window)
SHAPES = [(4, 4, 16, 5, None), (6, 2, 64, 16, None), (8, 1, 32, 16, 20), (3, 3, 128, 24, 64)]
HAS_CUDA = torch.cuda.is_available()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def step(shape: tuple, device: str = "cpu") -> tuple[Tensor, KVCache, AttentionBatch, HeadShape]:
    """Queries over a cache in whose blocks the contexts lie scattered, with no number anywhere else."""
    num_heads, num_kv_heads, dim, block_size, window = shape
    needed = [-(-context // block_size) for _, context in LENGTHS]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    tables = torch.full((len(LENGTHS), max(needed)), 10**9, dtype=torch.int32)
    cache = tuple(torch.full((len(order), block_size, num_kv_heads, dim), float("nan")).bfloat16() for _ in range(2))
    for row, (_, context) in enumerate(LENGTHS):
        mine = torch.tensor([order.pop() for _ in range(needed[row])])
        tables[row, : len(mine)] = mine
        places = torch.arange(context)
        for kind, pages in enumerate(cache):
            pages[mine[places // block_size], places % block_size] = drawn(context, num_kv_heads, dim + kind)[..., :dim]
    counts = [count for count, _ in LENGTHS]
    unused = torch.zeros(sum(counts), dtype=torch.int64)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        context_len=torch.tensor([context for _, context in LENGTHS], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=unused.to(device),
        positions=unused.to(device),
        max_query_len=max(counts),
        max_context_len=max(context for _, context in LENGTHS),
    )
    heads = HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window)
    return drawn(sum(counts), num_heads * dim).to(device), tuple(each.to(device) for each in cache), batch, heads


def packed_attention(q: Tensor, k: Tensor, v: Tensor, group: KeyGroup, heads: HeadShape) -> Tensor:
    """What PyTorch's kernel gives on a GPU."""
    found = []
    spans = zip(pairwise(group.query_start.tolist()), pairwise(group.key_start.tolist()), strict=True)
    for (first, last), (begin, end) in spans:
        assert last - first <= group.max_query_len
        assert end - begin <= group.max_context_len
        key = torch.arange(end - begin)
        query = key[-(last - first) :, None]
        seen = (key <= query) & (key > query - (heads.window or 10**6))
        parts = [each[None].transpose(1, 2) for each in (q[first:last], k[begin:end], v[begin:end])]
        mixed = scaled_dot_product_attention(*parts, seen, scale=heads.scale, enable_gqa=True)
        found.append(mixed[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("most", [100, 10**6], ids=["in groups", "together"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contexts_are_laid_end_to_end(shape: tuple, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_takes_lengths", lambda device, heads: True)
    monkeypatch.setattr(cuda, "_flash", packed_attention)
    monkeypatch.setattr(key_groups, "_MOST_KEYS", most)
    given = step(shape)
    found = CudaOps().attention(*given)
    torch.testing.assert_close(found, ReferenceOps().attention(*given), rtol=2e-2, atol=1e-2)
    groups = given[2].known_groups
    assert groups is not None
    # Of contexts of 7 and 90, 110, 1 and 64, and 41.
    assert [len(group.slots) for group in groups] == ([97, 110, 65, 41] if most == 100 else [313])


@pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device")
@pytest.mark.parametrize("most", [100, 10**6], ids=["in groups", "together"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_of_pytorch_takes_them(shape: tuple, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_groups, "_MOST_KEYS", most)
    given = step(shape, "cuda")
    assert cuda._takes_lengths(given[0].device, given[3])
    found = CudaOps().attention(*given).cpu()
    torch.testing.assert_close(found, ReferenceOps().attention(*step(shape)), rtol=2e-2, atol=1e-2)


def test_sequences_of_no_step() -> None:
    """A batch of nobody has no groups."""
    given = step(SHAPES[0])[2]
    given.known_on_host = [0], []
    assert key_groups.key_groups(given, 16) == []

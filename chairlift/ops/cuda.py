"""Operations on CUDA: those of the reference, with PyTorch's own attention kernels where these compute the same."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.ops.base import AttentionBatch, HeadShape, KeyGroup, KVCache, Quantization
from chairlift.ops.key_groups import key_groups, row_parts
from chairlift.ops.reference import ReferenceOps, gather


class CudaOps(ReferenceOps):
    """`Ops` on CUDA. Attention in bfloat16 is PyTorch's, which knows no caps, slopes or sinks; all else is as is.

    float32 stays with the reference: PyTorch's kernels may round it to tf32.
    """

    def __init__(self, quantization: Quantization = "none") -> None:
        super().__init__(quantization)
        self.name = self.name.replace("reference", "cuda")

    def attention(
        self, q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of each token of q [T, Hq * D] over its sequence's cached tokens, up to itself: [T, Hq * D]."""
        plain = sinks is None and heads.cap is None and heads.slopes is None
        if not (plain and q.dtype == cache[0].dtype == torch.bfloat16):
            return super().attention(q, cache, batch, heads, sinks)
        if batch.max_query_len == 1:
            return _decode(q, cache, batch, heads)
        if _takes_lengths(q.device, heads):
            return _together(q, cache, batch, heads)
        return _one_by_one(q, cache, batch, heads)


def _decode(q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape) -> Tensor:
    """Where each sequence has one token: filled up to the longest context, all at once unless that is too much."""
    found = [_decode_rows(*part, cache, batch.max_context_len, heads) for part in row_parts(q, batch)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _decode_rows(
    q: Tensor, context_len: Tensor, block_tables: Tensor, cache: KVCache, context: int, heads: HeadShape
) -> Tensor:
    block_size, positions = cache[0].shape[1], torch.arange(context, device=q.device)
    ends = context_len.unsqueeze(1)
    seen = positions < ends
    # What lies behind a sequence's last token may be anything, even no number: its first token stands there instead.
    mine = positions.where(seen, 0)
    blocks = block_tables.long().gather(1, mine // block_size)
    slots = blocks * block_size + mine % block_size
    k, v = (pages.flatten(0, 1)[slots].transpose(1, 2) for pages in cache)
    if heads.window is not None:
        seen &= positions >= ends - heads.window
    # The queries that share keys take the place of a text's tokens.
    grouped = q.view(len(q), heads.num_kv_heads, -1, heads.head_dim)
    mask = seen[:, None, None].expand(-1, heads.num_kv_heads, grouped.shape[2], -1)
    return F.scaled_dot_product_attention(grouped, k, v, mask, scale=heads.scale).reshape(len(q), -1)


@functools.cache
def _takes_lengths(device: torch.device, heads: HeadShape) -> bool:
    """Whether there is a kernel for texts of any lengths: PyTorch's flash attention, from Ampere on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return heads.head_dim % 8 == 0 and heads.head_dim <= 256


def _together(q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape) -> Tensor:
    """All sequences in one call, or in a few where their contexts are long."""
    out, queries = torch.empty_like(q), q.view(len(q), heads.num_heads, heads.head_dim)
    for group in key_groups(batch, cache[0].shape[1]):
        k, v = (pages.flatten(0, 1)[group.slots] for pages in cache)
        out[group.rows] = _flash(queries[group.rows], k, v, group, heads).flatten(1)
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, group: KeyGroup, heads: HeadShape) -> Tensor:
    """Attention of a group: q [T, Hq, D], k and v [K, Hkv, D] -> [T, Hq, D].

    A sequence's tokens are the last of its context (FlashAttention-2, Dao 2023, from its version 2.1 on).
    """
    found: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        group.query_start,
        group.key_start,
        group.max_query_len,
        group.max_context_len,
        0.0,
        not heads.both_ways,
        False,
        scale=heads.scale,
        window_size_left=None if heads.window is None else heads.window - 1,
        window_size_right=heads.window - 1 if heads.both_ways and heads.window is not None else None,
    )[0]
    return found


def _one_by_one(q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape) -> Tensor:
    """One sequence after the other."""
    out = torch.empty_like(q)
    starts, contexts = batch.on_host()
    for index, context in enumerate(contexts):
        first, last = starts[index], starts[index + 1]
        count = last - first
        k, v = (gather(pages, batch.block_tables[index], context).transpose(0, 1)[None] for pages in cache)
        query = q[first:last].view(count, heads.num_heads, heads.head_dim).transpose(0, 1)[None]
        whole = count == context and (heads.window is None or context <= heads.window)
        mixed = F.scaled_dot_product_attention(
            query,
            k,
            v,
            None if whole else _mask(count, context, heads, q.device),
            is_causal=whole and not heads.both_ways,
            scale=heads.scale,
            enable_gqa=heads.num_heads > heads.num_kv_heads,
        )
        out[first:last] = mixed[0].transpose(0, 1).reshape(count, -1)
    return out


def _mask(count: int, context: int, heads: HeadShape, device: torch.device) -> Tensor:
    """Which of a sequence's tokens its last ones see: [count, context]."""
    query = torch.arange(context - count, context, device=device).unsqueeze(1)
    key = torch.arange(context, device=device)
    seen = (key <= query) | heads.both_ways
    return seen if heads.window is None else seen & (key > query - heads.window) & (key < query + heads.window)

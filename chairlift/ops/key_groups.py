"""Sequences of a step whose keys are copied side by side, for kernels that take texts of any lengths end to end."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from chairlift.ops.base import AttentionBatch, KeyGroup

# How many tokens' keys and values are copied at once: half a gigabyte at 8 heads of 128 numbers in 16 bits.
_MOST_KEYS = 1 << 17


def row_parts(q: Tensor, batch: AttentionBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, `context_len` and `block_tables` of sequences with one token each, of as many as are computed at once.

    Each is filled up to the longest context, so that the shape alone says where they part, which can be recorded.
    """
    rows = max(_MOST_KEYS // max(batch.max_context_len, 1), 1)
    queries, context_len, tables = (torch.split(each, rows) for each in (q, batch.context_len, batch.block_tables))
    return zip(queries, context_len, tables, strict=True)


def key_groups(batch: AttentionBatch, block_size: int) -> list[KeyGroup]:
    """All sequences of a step, in groups whose contexts have few enough tokens; a sequence may be a group of its own.

    Waits for the device once a step, for the lengths.
    """
    if batch.known_groups is None:
        _, contexts = batch.on_host()
        batch.known_groups, first, keys = [], 0, 0
        for index, context in enumerate(contexts):
            if index > first and keys + context > _MOST_KEYS:
                batch.known_groups.append(_group(batch, first, index, block_size))
                first, keys = index, 0
            keys += context
        if contexts:
            batch.known_groups.append(_group(batch, first, len(contexts), block_size))
    return batch.known_groups


def _group(batch: AttentionBatch, first: int, stop: int, block_size: int) -> KeyGroup:
    """That of sequences `first` up to `stop`."""
    starts, contexts = (each[first : stop + more] for each, more in zip(batch.on_host(), (1, 0), strict=True))
    lengths = batch.context_len[first:stop].long()
    key_start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total, device = sum(contexts), lengths.device
    owners = torch.repeat_interleave(torch.arange(stop - first, device=device), lengths, output_size=total)
    places = torch.arange(total, device=device) - key_start[owners]
    blocks = batch.block_tables[first:stop].long()[owners, places // block_size]
    return KeyGroup(
        slice(starts[0], starts[-1]),
        batch.query_start[first : stop + 1] - starts[0],
        key_start.int(),
        blocks * block_size + places % block_size,
        max(after - before for before, after in pairwise(starts)),
        max(contexts),
    )

"""Attention over the paged cache, for models whose layers are transformers' modules.

transformers lets one register an attention function under a name; a model that is loaded with that name calls it in
each layer, makes no masks, and leaves the cache to it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chairlift.errors import UnsupportedModel
from chairlift.ops.base import AttentionBatch, HeadShape, KVCache
from chairlift.ops.contract import Ops
from chairlift.ops.rotation import RotaryTable
from chairlift.runners.decoder.rope import RopeConfig
from chairlift.runners.decoder.transformers_rotation import Rotation, rotated

NAME = "chairlift"
# As far as kernels count: a wider one hides nothing either.
_MOST_WINDOW = 2**31 - 1
# What says nothing of how to attend, or nothing that is not said by the batch.
_HARMLESS = {
    *("position_ids", "cache_position", "position_embeddings", "is_causal", "use_cache", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch"),
}


# Cosines and sines of the pass's positions [1, T, D].
Angles = tuple[Tensor, Tensor]


class HeadNorms(NamedTuple):
    """RMS norms [D] of each head's queries and keys; none of either, or both."""

    query: Tensor | None = None
    key: Tensor | None = None
    eps: float = 0.0


class PagedAttention:
    """The caches of all layers, by their place; `batch` is where the tokens of the pass lie.

    Until it has caches it computes without them, and notes what heads each layer has, in `heads`, and whose keys and
    values it attends to where these are another layer's (Gemma 4), in `shares`.
    """

    def __init__(self, ops: Ops) -> None:
        self.heads: dict[int, HeadShape] = {}
        self.shares: dict[int, int] = {}
        # What was noted last; held, so that no other has its identity.
        self._keys: dict[int, Tensor] = {}
        # That of layers which are told of none, since transformers puts it into a mask.
        self.window: int | None = None
        self.batch: AttentionBatch | None = None
        self._ops = ops
        self._caches: dict[int, KVCache] = {}
        self.modules: dict[int, nn.Module] = {}
        self.rotation = Rotation()
        # Where queries and keys come rotated all have the first row of a table that turns nothing.
        self._still: AttentionBatch | None = None
        self._tables: dict[int, Tensor] = {}
        # Where they do not, each has a row of its own.
        self._turned: AttentionBatch | None = None

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the caches of the layers that were noted."""
        self._keys.clear()
        for layer, heads in self.heads.items():
            if layer in self.shares:
                # It writes there once more what is there.
                self._caches[layer] = self._caches[self.shares[layer]]
            else:
                self._caches[layer] = self._ops.allocate_kv_cache(num_blocks, block_size, heads, dtype, device)
            size = heads.head_dim
            if size not in self._tables:
                self._tables[size] = RopeConfig.none(1).table(size, 1).to(device)

    @property
    def caches(self) -> list[KVCache]:
        """Those of all layers, each once."""
        return [cache for layer, cache in self._caches.items() if layer not in self.shares]

    def begin(self, batch: AttentionBatch) -> None:
        """A pass over these tokens begins."""
        self.batch = batch
        self._still = replace(batch, positions=torch.zeros_like(batch.positions))
        self._turned = replace(batch, positions=torch.arange(len(batch.positions), device=batch.positions.device))
        self.rotation.begin()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: HeadShape) -> Tensor:
        """Queries [1, Hq, T, D], keys and values [1, Hkv, T, D] -> [1, T, Hq, D]."""
        table = self.rotation.take(query, key)
        if not self._caches:
            self._note(layer, key, heads)
            if table is not None:
                query, key = rotated(query, table), rotated(key, table)
            return _without_cache(query, key, value, heads)
        assert self.batch is not None
        tokens, cache, qkv = query.shape[2], self._caches[layer], _side_by_side(query, key, value)
        batch = self._still if table is None else self._turned
        assert batch is not None
        table = self._tables[heads.head_dim] if table is None else table
        turned = self._ops.rope_and_write(qkv, RotaryTable(table), batch, cache, heads)
        return self._ops.attention(turned, cache, self.batch, heads).view(1, tokens, heads.num_heads, heads.head_dim)

    def _note(self, layer: int, key: Tensor, heads: HeadShape) -> None:
        self.heads[layer], self._keys[layer] = heads, key
        owner = next((other for other, known in self._keys.items() if known is key and other not in self.shares), layer)
        if owner != layer:
            self.shares[layer] = owner

    def attend_rows(self, layer: int, qkv: Tensor, angles: Angles, norms: HeadNorms) -> Tensor:
        """Queries, keys and values side by side [T, (Hq + 2 Hkv) * D] -> [T, Hq * D].

        Queries and keys have yet to be normalized, if there are norms, and to be rotated.
        """
        heads, tokens = self.heads[layer], len(qkv)
        table = self.rotation.table(*angles, heads.head_dim)
        if self._caches:
            assert self.batch is not None
            assert self._turned is not None
            cache = self._caches[layer]
            turned = self._ops.rope_and_write(qkv, RotaryTable(table), self._turned, cache, heads, *norms)
            return self._ops.attention(turned, cache, self.batch, heads).view(tokens, -1)
        each = qkv.view(1, tokens, -1, heads.head_dim).transpose(1, 2)
        query, key, value = torch.split(each, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
        if norms.query is not None and norms.key is not None:
            query = self._ops.rms_norm(query.contiguous(), norms.query, norms.eps)
            key = self._ops.rms_norm(key.contiguous(), norms.key, norms.eps)
        return _without_cache(rotated(query, table), rotated(key, table), value, heads).reshape(tokens, -1)


def _side_by_side(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Queries [1, Hq, T, D], keys and values [1, Hkv, T, D] -> [T, (Hq + 2 Hkv) * D], as they lie if they lie so."""
    (_, num_heads, tokens, dim), num_kv_heads = query.shape, key.shape[1]
    width, first = (num_heads + 2 * num_kv_heads) * dim, query.storage_offset()
    starts = first, first + num_heads * dim, first + (num_heads + num_kv_heads) * dim
    memory = query.untyped_storage().data_ptr()
    if all(
        each.untyped_storage().data_ptr() == memory
        and each.stride()[1:] == (dim, width, 1)
        and each.storage_offset() == start
        for each, start in zip((query, key, value), starts, strict=True)
    ):
        return query.as_strided((tokens, width), (width, 1), first)
    return torch.cat([each[0].transpose(0, 1).reshape(tokens, -1) for each in (query, key, value)], dim=1)


# Whose pass it is. A process may have several models, each with a thread of its own.
_current: ContextVar[PagedAttention] = ContextVar("attention under way")


@contextmanager
def under_way(paged: PagedAttention) -> Iterator[None]:
    """Around a pass: attention is that of this model."""
    before = _current.set(paged)
    try:
        yield
    finally:
        _current.reset(before)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call. Raises UnsupportedModel for whatever can't be honoured."""
    _refuse(module, attention_mask, others)
    _, num_heads, _, head_dim = query.shape
    size = value.shape[-1]
    if size > head_dim:
        raise UnsupportedModel(f"values of {size} numbers a head, keys of {head_dim}: no cache here fits")
    # Zeros make values as long as keys, which is what a layer's cache holds.
    if size < head_dim:
        value = torch.nn.functional.pad(value, (0, head_dim - size))
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    paged = _current.get()
    window = paged.window if sliding_window is None else sliding_window
    window = None if window is None else min(window, _MOST_WINDOW)
    heads = HeadShape(num_heads, key.shape[1], head_dim, scale, window, softcap or None)
    paged.modules[module.layer_idx] = module
    return paged.attend(module.layer_idx, query, key, value, heads)[..., :size], None


def _refuse(module: Any, mask: Tensor | None, others: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for attention that is another than causal, or that something is added to."""
    if mask is not None:
        raise UnsupportedModel("the model makes masks of its own for its attention, which are not read")
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise UnsupportedModel("its tokens see what follows them")
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise UnsupportedModel("its attention does not say which layer it is")
    for name, value in others.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise UnsupportedModel(f"its attention has {name!r}, which the kernels do not know")


def _without_cache(query: Tensor, key: Tensor, value: Tensor, heads: HeadShape) -> Tensor:
    """Causal attention of one sequence over itself; windows are wider than the few tokens that come here."""
    repeats = heads.num_heads // heads.num_kv_heads
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    if heads.cap is None:
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=heads.scale)
        return found.transpose(1, 2)
    scores = heads.cap * ((query @ key.mT).float() * heads.scale / heads.cap).tanh()
    follows = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(follows, float("-inf")).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2)

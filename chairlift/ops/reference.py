"""Every operation in plain torch: the meaning that the faster implementations are tested against.

CPU and CUDA, float32 and bfloat16. Each operation computes in float32 and rounds where transformers does.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.ops.activation import Activation, activate, gated
from chairlift.ops.base import (
    Allowed,
    AttentionBatch,
    DecoderWeights,
    Draws,
    Head,
    HeadShape,
    KVCache,
    Linear,
    Mlp,
    Quantization,
)
from chairlift.ops.drawing import best_allowed, draw_tokens, exclude_tokens
from chairlift.ops.encoder import EncoderWeights, PlainEncoder
from chairlift.ops.int4_grid import quantize_int4
from chairlift.ops.key_groups import row_parts
from chairlift.ops.rotation import RotaryTable, rotate

# How many scores of a prompt are there at once: a quarter of a gigabyte, and as much for each step of their softmax.
_MOST_SCORES = 1 << 26


class ReferenceLinear:
    """A weight as it is given, or rounded as `Ops` says; implements `Linear` and `Head`.

    One of 4 bits is held as the bytes that its factors make.
    """

    num_candidates = 1

    def __init__(self, weight: Tensor, bias: Tensor | None, quantization: Quantization) -> None:
        self.weight = weight
        self.scales: Tensor | None = None
        if quantization != "none":
            self.weight, self.scales = (quantize if quantization == "int8" else quantize_int4)(weight)
        self.bias = bias
        self.dtype = weight.dtype
        self.nbytes = self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self.sums(x).to(self.dtype)

    def sums(self, x: Tensor) -> Tensor:
        """Return x * weight^T + bias, in float32 if quantized."""
        if self.scales is None:
            return F.linear(x, self.weight, self.bias)
        rounded, scales = quantize(x)
        # Sums of products of 8-bit numbers are exact in float64.
        sums = F.linear(rounded.double(), self.weight.double()) * scales.double() * self.scales.double().T
        return (sums if self.bias is None else sums + self.bias).float()

    logits = sums

    def best(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return the highest logit of each row, [R] float32, and its first token, [R], as `Head.best`."""
        # At once, since bfloat16 reductions are many times slower on a CPU than this conversion.
        return best_allowed(self.sums(hidden).float(), allowed)

    def candidates(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return what `best` does, [R, 1] both, as `Head.candidates`."""
        values, tokens = self.best(hidden, allowed)
        return values[:, None], tokens[:, None]

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the weight, [T, in], for ids [T]."""
        rows = F.embedding(ids, self.weight)
        return rows if self.scales is None else (rows.float() * self.scales[ids]).to(self.dtype)


class FollowedLinear:
    """A function of what another gives. Implements `Linear`."""

    def __init__(self, linear: Linear, function: Callable[[Tensor], Tensor]) -> None:
        self._linear, self._function = linear, function
        self.nbytes = linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> what the function makes of [T, out]."""
        return self._function(self._linear(x))


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * I] -> activation(gate) * up [T, I]."""
    lower, upper = gate_up.chunk(2, dim=-1)
    return gated(lower, upper, activation)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows x [N, D] to int8 by each one's highest magnitude; return them and the scales, [N, 1]."""
    highest = x.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(highest > 0, 127 / highest, 0.0)
    return (x.float() * inverse).round().to(torch.int8), highest / 127


class ReferenceOps:
    """`Ops` in plain torch. K and V of one layer are [num_blocks, block_size, num_kv_heads, head_dim] each.

    Those of an int8 cache are followed by the scales of K and of V, [num_blocks, block_size, num_kv_heads] each.
    """

    pads_values = False

    def __init__(self, quantization: Quantization = "none") -> None:
        self.name = "reference" if quantization == "none" else f"reference, {quantization}"
        self.quantization = quantization

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return x [T, in] -> [T, out] for weight [out, in] and bias [out]."""
        return ReferenceLinear(weight, bias, self.quantization)

    def gated_linear(self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu") -> Linear:
        """Return x [T, in] -> activation(gate) * up [T, I] for weight [2 * I, in]."""
        return FollowedLinear(self.linear(weight, bias), partial(gate, activation=activation))

    def activated_linear(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> Linear:
        """Return x [T, in] -> activation(x * weight^T + bias) for weight [out, in] and bias [out]."""
        return FollowedLinear(self.linear(weight, bias), partial(activate, activation=activation))

    def head(self, weight: Tensor) -> Head:
        """Return the last projection of weight [V, H]."""
        return ReferenceLinear(weight, None, self.quantization)

    def fuse(
        self,
        weights: DecoderWeights,
        caches: Sequence[KVCache],
        rotations: Sequence[RotaryTable],
        states: Sequence[Sequence[Tensor]],
    ) -> None:
        """There is nothing faster than one operation after the other."""

    def fuse_mlp(self, norm: Tensor, eps: float, mlp: Mlp) -> None:
        """Nor here."""

    def encoder(self, weights: EncoderWeights) -> PlainEncoder:
        """Return an encoder's forward pass."""
        return PlainEncoder(weights, self.linear)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] / rms(x) rounded to the weight's dtype, times weight [D]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x [T, D] into `residual` [T, D] in place and return rms_norm(residual) [T, D]."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def exclude(self, logits: Tensor, allowed: Allowed) -> None:
        """Make logits [R, V] float32 -inf in place except those of the tokens that are allowed."""
        exclude_tokens(logits, allowed)

    def highest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the highest of logits [R, V], [R], and the first token that has it, [R] int64."""
        values, ids = logits.max(-1)
        return values, ids

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw token ids for each row of logits [R, V] float32: [R, D] int64."""
        return draw_tokens(logits, draws)

    def recurrence(self) -> None:
        """None: whoever has layers with states computes them as it can."""
        return

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """K and V, each [num_blocks, block_size, num_kv_heads, head_dim], and for int8 the scales of both."""
        tokens = (num_blocks, block_size, heads.num_kv_heads)
        cache = [torch.zeros((*tokens, heads.head_dim), dtype=dtype, device=device) for _ in "kv"]
        if dtype == torch.int8:
            cache += [torch.zeros(tokens, dtype=torch.float32, device=device) for _ in "kv"]
        return tuple(cache)

    def rope_and_write(
        self,
        qkv: Tensor,
        rotation: RotaryTable,
        batch: AttentionBatch,
        cache: KVCache,
        heads: HeadShape,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalize (if asked), rotate, write K and V to their slots; return q [T, Hq * D]."""
        dim, num_q, num_kv = heads.head_dim, heads.num_heads, heads.num_kv_heads
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, dim), [num_q, num_kv, num_kv], dim=1)
        if q_norm is not None:
            q = self._norm_heads(q, q_norm, eps)
        if k_norm is not None:
            k = self._norm_heads(k, k_norm, eps)
        cos, sin = rotation.cos_sin[batch.positions].unsqueeze(1).chunk(2, dim=-1)
        written = [rotate(k, cos, sin), v]
        if cache[0].dtype == torch.int8:
            (k, k_scales), (v, v_scales) = map(_quantize, written)
            written = [k, v, k_scales, v_scales]
        for pages, new in zip(cache, written, strict=True):
            pages.flatten(0, 1)[batch.slot_mapping] = new
        if rotation.query_factors is not None:
            factors = rotation.query_factors[batch.positions].view(-1, 1, 1)
            cos, sin = cos * factors, sin * factors
        return rotate(q, cos, sin).reshape(qkv.shape[0], -1)

    def _norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize heads x [T, N, D], each by itself or, for weight [N * D], together."""
        together = x.flatten(1) if weight.shape[0] > x.shape[2] else x
        return self.rms_norm(together, weight, eps).view(x.shape)

    def attention(
        self, q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of each token of q [T, Hq * D] over its sequence's cached tokens, up to itself: [T, Hq * D]."""
        if batch.max_query_len == 1 and q.device.type != "cpu":
            return decode_attention(q, cache, batch, heads, sinks)
        out = torch.empty_like(q)
        starts, contexts = batch.on_host()
        for index, context in enumerate(contexts):
            first, last = starts[index], starts[index + 1]
            k, v, *scales = (gather(pages, batch.block_tables[index], context) for pages in cache)
            if scales:
                k, v = (rounded * scale.unsqueeze(-1) for rounded, scale in zip((k, v), scales, strict=True))
            out[first:last] = _attend(q[first:last], k, v, heads, sinks)
        return out


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H, D] in steps of a 127th of the largest of each head, int8, and those steps [T, H] float32."""
    largest = x.float().abs().amax(-1)
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    return (x.float() * inverse.unsqueeze(-1)).round().to(torch.int8), largest / 127


def _scaled(products: Tensor, heads: HeadShape, before: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scores of products of queries and keys, which are so many tokens `before` those.

    `before` is as wide as scores are, and `shape` lays out a number for each head as scores have them.
    """
    scores = products * heads.scale
    if heads.cap is not None:
        scores = heads.cap * (scores / heads.cap).tanh()
    return scores if heads.slopes is None else scores - _slopes(heads.slopes, before.device).view(shape) * before


@lru_cache(maxsize=16)
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _softmax(scores: Tensor, sinks: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The softmax over the last dimension, beside sinks [Hq], which `shape` lays out as scores have their heads."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.view(shape).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1]


def decode_attention(
    q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape, sinks: Tensor | None = None
) -> Tensor:
    """`Ops.attention` where each sequence has one token, q [S, Hq * D]: without waiting for the device.

    Sequences are filled up to the longest context, which on the CPU costs more than one after the other, and computed
    all at once unless that is too much.
    """
    found = [_decode_rows(*part, cache, batch.max_context_len, heads, sinks) for part in row_parts(q, batch)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _decode_rows(
    q: Tensor,
    context_len: Tensor,
    block_tables: Tensor,
    cache: KVCache,
    context: int,
    heads: HeadShape,
    sinks: Tensor | None,
) -> Tensor:
    count, used, ends = len(q), -(-context // cache[0].shape[1]), context_len.unsqueeze(1)
    positions = torch.arange(context, device=q.device)
    seen = positions < ends
    if heads.window is not None:
        seen &= positions >= ends - heads.window
    # Entries past a sequence's own blocks are undefined, and its last block may hold anything behind its last token.
    mine = torch.arange(used, device=q.device) * cache[0].shape[1] < ends
    blocks = block_tables[:, :used].long().where(mine, 0)
    k, v, *scales = (pages[blocks].flatten(1, 2)[:, :context].float() for pages in cache)
    if scales:
        k, v = (rounded * scale.unsqueeze(-1) for rounded, scale in zip((k, v), scales, strict=True))
    grouped = q.float().view(count, heads.num_kv_heads, -1, heads.head_dim)
    shape = (1, heads.num_kv_heads, -1, 1)
    before = (ends - 1 - positions)[:, None, None]
    scores = _scaled(torch.einsum("shgd,skhd->shgk", grouped, k), heads, before, shape)
    weights = _softmax(scores.masked_fill_(~seen[:, None, None], float("-inf")), sinks, shape)
    v = v.masked_fill(~seen[:, :, None, None], 0)
    return torch.einsum("shgk,skhd->shgd", weights, v).reshape(count, -1).to(q.dtype)


def gather(pages: Tensor, blocks: Tensor, context: int) -> Tensor:
    """The first `context` tokens of one sequence, [context, num_kv_heads, ...], out of its blocks."""
    used = -(-context // pages.shape[1])
    return pages[blocks[:used].long()].flatten(0, 1)[:context]


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: HeadShape, sinks: Tensor | None) -> Tensor:
    """The last q.shape[0] tokens of one sequence over all of it: q [n, Hq * D], k and v [context, Hkv, D]."""
    count, context = q.shape[0], k.shape[0]
    rows = max(_MOST_SCORES // max(heads.num_heads * context, 1), 1)
    k, v, found = k.float(), v.float(), list[Tensor]()
    query = torch.arange(context - count, context, device=q.device).unsqueeze(1)
    for part in zip(torch.split(q, rows), torch.split(query, rows), strict=True):
        found.append(_attend_rows(*part, k, v, heads, sinks))
    return found[0] if len(found) == 1 else torch.cat(found)


def _attend_rows(q: Tensor, query: Tensor, k: Tensor, v: Tensor, heads: HeadShape, sinks: Tensor | None) -> Tensor:
    """The tokens of one sequence that are at `query` [n, 1]; k and v are float32."""
    groups = heads.num_heads // heads.num_kv_heads
    grouped = q.float().view(len(q), heads.num_kv_heads, groups, heads.head_dim)
    shape = (heads.num_kv_heads, -1, 1, 1)
    key = torch.arange(len(k), device=q.device)
    scores = _scaled(torch.einsum("qhgd,khd->hgqk", grouped, k), heads, query - key, shape)
    hidden = (key > query) & (not heads.both_ways)
    if heads.window is not None:
        hidden |= (key <= query - heads.window) | (key >= query + heads.window)
    weights = _softmax(scores.masked_fill_(hidden, float("-inf")), sinks, shape)
    return torch.einsum("hgqk,khd->qhgd", weights, v).reshape(len(q), -1).to(q.dtype)

"""What an encoder is made of, and its forward pass in plain torch: the meaning of the native one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.ops.activation import Activation, activate
from chairlift.ops.base import DenseMlp, Int32s, Linear, Mlp
from chairlift.ops.experts import Experts, Routing
from chairlift.ops.rotation import rotate

# How many scores of texts over themselves are there at once: a quarter of a gigabyte, and as much for what is added.
_MOST_SCORES = 1 << 26

# What is wanted of each text: all tokens' hidden states, their mean, or the first or last token's.
Output = Literal["tokens", "mean", "first", "last"]


@dataclass(slots=True, frozen=True)
class Norm:
    """Normalization over the last dimension: weight [H] and bias [H] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True, frozen=True)
class Projection:
    """A weight [out, in] and a bias [out] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True, frozen=True)
class EncoderLayer:
    """One layer's weights. `qkv` is one fused projection, `up` of a gated encoder [2 * I, H], what is activated first.

    Norms come before their part of the layer (pre-norm, where `attention_norm` may be missing) or after its residual.
    `window`: how far a token sees to either side (None: all of its text). `cos_sin` [positions, head_dim] float32
    rotates queries and keys by halves. With a `router` [E, H] float32 there are E experts: their projections follow
    each other in `up` [E * I, H], without biases, and in `down` [E * H, I], whose bias [H] is added once.
    """

    attention_norm: Norm | None
    qkv: Projection
    out: Projection
    mlp_norm: Norm
    up: Projection
    down: Projection
    window: int | None
    cos_sin: Tensor | None
    router: Tensor | None = None


@dataclass(slots=True, frozen=True)
class EncoderWeights:
    """An encoder of hidden size H.

    `words` [V, H]; `positions` [P, H], of which a text's first token has number `first_position`; `types` [N, H].
    `bias` [heads, 2 * L - 1] float32 is added to the scaled score of key k for query q at column k - q + L - 1. With
    `rms` norms divide by the root mean square alone, and have no bias. A token goes to `experts_chosen` experts.
    """

    words: Tensor
    positions: Tensor | None
    types: Tensor | None
    first_position: int
    embedding_norm: Norm | None
    layers: Sequence[EncoderLayer]
    final_norm: Norm | None
    bias: Tensor | None
    activation: Activation
    gated: bool
    pre_norm: bool
    rms: bool
    eps: float
    num_heads: int
    experts_chosen: int = 1

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.words.shape[1]

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.words.shape[1] // self.num_heads

    @property
    def most_tokens(self) -> int | None:
        """The longest text for which there are positions, rotations and biases; None where nothing limits it."""
        limits = [layer.cos_sin.shape[0] for layer in self.layers if layer.cos_sin is not None]
        if self.positions is not None:
            limits.append(self.positions.shape[0] - self.first_position)
        if self.bias is not None:
            limits.append((self.bias.shape[1] + 1) // 2)
        return min(limits, default=None)


@dataclass(slots=True)
class Texts:
    """S texts, their T tokens end to end: `token_ids` [T], `type_ids` [T] or None (all 0), `starts` [S + 1]."""

    token_ids: Int32s
    type_ids: Int32s | None
    starts: Int32s


class EncoderForward(Protocol):
    """A forward pass; `nbytes` is what its weights take."""

    nbytes: int

    def __call__(self, texts: Texts, output: Output) -> Tensor:
        """Return hidden states after the last norm, float32: [T, H] for "tokens", else [S, H]."""
        ...


@dataclass(slots=True, frozen=True)
class _Activated:
    """A projection, and what activates its outputs. Implements `Linear`."""

    linear: Linear
    activate: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.activate(self.linear(x))


@dataclass(slots=True, frozen=True)
class _Biased:
    """What adds a bias to an MLP's outputs. Implements `Mlp`."""

    mlp: Mlp
    bias: Tensor

    @property
    def nbytes(self) -> int:
        return self.mlp.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.bias


class PlainEncoder:
    """`EncoderForward` in torch operations, on any device; `linear` says how projections are multiplied."""

    def __init__(self, weights: EncoderWeights, linear: Callable[[Tensor, Tensor | None], Linear]) -> None:
        self._weights = weights
        self._attentions = [
            tuple(linear(part.weight, part.bias) for part in (layer.qkv, layer.out)) for layer in weights.layers
        ]
        self._mlps = [self._mlp(layer, linear) for layer in weights.layers]
        tables = (weights.words, weights.positions, weights.types)
        self.nbytes = sum(table.nbytes for table in tables if table is not None)
        self.nbytes += sum(linear.nbytes for linears in self._attentions for linear in linears)
        self.nbytes += sum(mlp.nbytes for mlp in self._mlps)

    def _mlp(self, layer: EncoderLayer, linear: Callable[[Tensor, Tensor | None], Linear]) -> Mlp:
        def made(up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> DenseMlp:
            return DenseMlp(_Activated(linear(up, up_bias), self._activate), linear(down, down_bias))

        up, down = layer.up, layer.down
        if layer.router is None:
            return made(up.weight, up.bias, down.weight, down.bias)
        count = layer.router.shape[0]
        parts = zip(up.weight.chunk(count), down.weight.chunk(count), strict=True)
        experts = [made(up_part.contiguous(), None, down_part.contiguous(), None) for up_part, down_part in parts]
        routing = Routing(count, self._weights.experts_chosen)
        mixture = Experts(routing, layer.router, None, None, experts, None, False)
        return mixture if down.bias is None else _Biased(mixture, down.bias)

    def __call__(self, texts: Texts, output: Output) -> Tensor:
        """Return hidden states, float32: [T, H] for "tokens", else [S, H]."""
        weights = self._weights
        device = weights.words.device
        starts = torch.from_numpy(texts.starts).to(device).long()
        lengths = starts.diff()
        places = torch.arange(len(texts.token_ids), device=device) - starts[:-1].repeat_interleave(lengths)
        hidden = self._embed(texts, places)
        groups = _groups(texts.starts, device)
        for layer, linears, mlp in zip(weights.layers, self._attentions, self._mlps, strict=True):
            mixed = self._attention(hidden, layer, linears, groups, places)
            hidden = self._fed_forward(mixed, layer, mlp)
        if weights.final_norm is not None:
            hidden = self._norm(hidden, weights.final_norm)
        hidden = hidden.float()
        if output == "tokens":
            return hidden
        if output == "mean":
            return text_means(hidden, starts)
        return hidden[starts[:-1] if output == "first" else starts[1:] - 1]

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        if self._weights.rms:
            return F.rms_norm(x, (x.shape[-1],), norm.weight, self._weights.eps)
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, self._weights.eps)

    def _embed(self, texts: Texts, places: Tensor) -> Tensor:
        weights, device = self._weights, places.device
        hidden = F.embedding(torch.from_numpy(texts.token_ids).to(device), weights.words)
        if weights.types is not None:
            types = texts.type_ids
            hidden = hidden + (
                weights.types[0] if types is None else F.embedding(torch.from_numpy(types).to(device), weights.types)
            )
        if weights.positions is not None:
            hidden = hidden + F.embedding(places + weights.first_position, weights.positions)
        return hidden if weights.embedding_norm is None else self._norm(hidden, weights.embedding_norm)

    def _attention(
        self, x: Tensor, layer: EncoderLayer, linears: tuple[Linear, ...], groups: list[Tensor], places: Tensor
    ) -> Tensor:
        pre, (qkv, out) = self._weights.pre_norm, linears
        normed = self._norm(x, layer.attention_norm) if pre and layer.attention_norm is not None else x
        x = x + out(self._attend(qkv(normed), layer, groups, places))
        return x if pre or layer.attention_norm is None else self._norm(x, layer.attention_norm)

    def _fed_forward(self, x: Tensor, layer: EncoderLayer, mlp: Mlp) -> Tensor:
        if self._weights.pre_norm:
            return x + mlp(self._norm(x, layer.mlp_norm))
        return self._norm(x + mlp(x), layer.mlp_norm)

    def _activate(self, x: Tensor) -> Tensor:
        if not self._weights.gated:
            return activate(x, self._weights.activation)
        active, gate = x.chunk(2, dim=-1)
        return activate(active, self._weights.activation) * gate

    def _attend(self, qkv: Tensor, layer: EncoderLayer, groups: list[Tensor], places: Tensor) -> Tensor:
        """Attention of each text over itself: qkv [T, 3 * H] -> [T, H]; texts of one length go together."""
        weights = self._weights
        q, k, v = qkv.view(len(qkv), 3, weights.num_heads, -1).unbind(1)
        if layer.cos_sin is not None:
            cos, sin = layer.cos_sin[places].unsqueeze(1).chunk(2, dim=-1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for rows in groups:
            keys, values = (part[rows].transpose(1, 2) for part in (k, v))
            at_once = max(_MOST_SCORES // (rows.numel() * weights.num_heads), 1)
            for some in torch.split(rows, at_once, 1):
                mask = _mask(weights, places[some[0]], rows.shape[1], layer.window)
                mixed = F.scaled_dot_product_attention(q[some].transpose(1, 2), keys, values, mask)
                out[some] = mixed.transpose(1, 2)
        return out.flatten(1)


def text_sums(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each text's rows: hidden [T, H] -> [S, H], for `lengths` [S] int64; the same bits each time."""
    if hidden.device.type != "cpu":
        # There index_add_ adds in whatever order threads come.
        return torch.segment_reduce(hidden, "sum", lengths=lengths, axis=0)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    return hidden.new_zeros(len(lengths), hidden.shape[1]).index_add_(0, owner, hidden)


def text_means(hidden: Tensor, starts: Tensor) -> Tensor:
    """Mean of each text's rows: hidden [T, H] -> [S, H], for `starts` [S + 1] int64."""
    lengths = starts.diff()
    return text_sums(hidden, lengths) / lengths.unsqueeze(1)


def _groups(starts: Int32s, device: torch.device) -> list[Tensor]:
    """The rows of the tokens of texts of one length [G, length], for each length that there is."""
    lengths = np.diff(starts)
    found = []
    for length in np.unique(lengths).tolist():
        first = torch.from_numpy(starts[:-1][lengths == length]).to(device).long()
        found.append(first.unsqueeze(1) + torch.arange(length, device=device))
    return found


def _mask(weights: EncoderWeights, queries: Tensor, length: int, window: int | None) -> Tensor | None:
    """Which keys of a text of this length are seen by those at `queries` [n], or what is added to their scores.

    [n, length] bool or [heads, n, length]; None where all are seen as they are.
    """
    seen = None
    if window is not None and length > window + 1:
        keys, queried = torch.arange(length, device=queries.device), queries.unsqueeze(1)
        seen = (keys >= queried - window) & (keys <= queried + window)
    if weights.bias is None:
        return seen
    # A query's biases are those of the one before it, moved by a column.
    added = weights.bias.unfold(1, length, 1)[:, (weights.bias.shape[1] - 1) // 2 - queries].to(weights.words.dtype)
    return added if seen is None else added.masked_fill(~seen, -torch.inf)

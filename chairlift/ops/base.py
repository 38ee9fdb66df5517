"""What the operations of a decoder take and give: weights, batches, and the shapes of heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.ops.gated_delta_net import GatedDeltaNet
from chairlift.ops.mamba_mixer import MambaMixer
from chairlift.ops.short_convolution import ShortConvolution

# K and V of one layer in an implementation's own layout; of an int8 cache the scales too.
KVCache = tuple[Tensor, ...]
Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
# For each row of logits the tokens that may be chosen, [ceil(V / 32)] int32 on the host: token t may if bit t % 32 of
# word t // 32 is set. None: all may.
Allowed = Sequence[Tensor | None]
# What has states in the place of attention.
Mixer = ShortConvolution | GatedDeltaNet | MambaMixer
Quantization = Literal["none", "int8", "int4"]


class Linear(Protocol):
    """x [T, in] -> [T, out]."""

    @property
    def nbytes(self) -> int:
        """Bytes that its weight takes."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return x * weight^T + bias."""
        ...


class Head(Protocol):
    """The last projection [V, H], and where it is tied the embedding as well."""

    nbytes: int
    # How many of the likeliest tokens `candidates` gives: one where more would cost much.
    num_candidates: int

    def logits(self, hidden: Tensor) -> Tensor:
        """Return hidden [R, H] -> [R, V], in float32 or the dtype of `hidden`."""
        ...

    def candidates(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return what `best` does for the C likeliest tokens, the likeliest first: [R, C] both.

        Of equal logits the first token comes first. Of a row of which not all are allowed only the likeliest is found,
        and the rest has logits of -inf.
        """
        ...

    def best(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's highest logit [R] float32 (NaN if any is), and the first token [R] int64 that has it.

        With `allowed` only the tokens that it names count; -inf if there is none.
        """
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Return the weight's rows for ids [T] int64: [T, H]."""
        ...


@dataclass(slots=True, frozen=True)
class KeyGroup:
    """Some sequences of a step, S of them in a row, with K tokens in their contexts.

    rows: their tokens in the step. query_start and key_start [S + 1] int32: where each one's tokens begin among those,
    and its context among all contexts. slots [K] int64: where in the cache each token of the contexts lies.
    """

    rows: slice
    query_start: Tensor
    key_start: Tensor
    slots: Tensor
    max_query_len: int
    max_context_len: int


@dataclass(slots=True)
class AttentionBatch:
    """Where the tokens of one step lie. S sequences, T tokens packed end to end with no padding.

    query_start [S + 1] int32: sequence i owns tokens query_start[i]:query_start[i + 1].
    context_len [S] int32: KV length of each sequence once this step's tokens are written.
    block_tables [S, max_blocks] int32: physical block of each logical block; entries past the context are undefined.
    slot_mapping [T] int64: physical slot (block * block_size + offset) of each token's K and V.
    positions [T] int64: position of each token in its sequence.
    max_query_len, max_context_len: the most tokens that a sequence has in this step, and the longest context; 0 without
    sequences. They are known without waiting for the device.
    known_on_host: what `on_host` returns, once it was asked for. known_groups: likewise what `key_groups` does.
    """

    query_start: Tensor
    context_len: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    positions: Tensor
    max_query_len: int
    max_context_len: int
    known_on_host: tuple[list[int], list[int]] | None = None
    known_groups: list[KeyGroup] | None = None

    def on_host(self) -> tuple[list[int], list[int]]:
        """Return query_start and context_len; elsewhere than on the CPU the first call waits for the device."""
        if self.known_on_host is None:
            self.known_on_host = self.query_start.tolist(), self.context_len.tolist()
        return self.known_on_host


@dataclass(slots=True, frozen=True)
class HeadShape:
    """Attention heads of one layer.

    `window`: a token sees itself and the window - 1 tokens before it (None: all). With `both_ways` it sees as many
    behind it, which are in the cache then. `cap`: scores, once scaled, become cap * tanh(score / cap) (None: they
    stay). `slopes`: what a score loses under each head for each token that the key's is before the query's (None:
    nothing); not with `both_ways`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    cap: float | None = None
    slopes: tuple[float, ...] | None = None
    both_ways: bool = False


@dataclass(slots=True)
class StateSpans:
    """Through which states the tokens of one step go. S sequences, as in `AttentionBatch`.

    rows [S]: the row of each one's state; first [S]: how many tokens it has seen, so that it is zeros where that is 0;
    starts [S + 1]: its tokens in the step. cuts: of sequence i, after how many of its tokens of this step its state is
    copied, and to which row, ascending.
    """

    rows: list[int]
    first: list[int]
    starts: list[int]
    cuts: dict[int, list[tuple[int, int]]]


@dataclass(slots=True)
class Inputs:
    """One step's tokens: `token_ids` [T] int64; `logit_rows` [R] int64, ascending: those whose logits are wanted.

    `states` are there where layers have any. `side_work` is something else: the calling thread does a part of it, which
    says whether there is more, as often as a pass has its other threads take over meanwhile; not all do.
    """

    token_ids: Tensor
    attention: AttentionBatch
    logit_rows: Tensor
    states: StateSpans | None = None
    side_work: Callable[[], bool] | None = None


class Mlp(Protocol):
    """What a layer does with each token by itself: x [T, H] -> [T, H]."""

    @property
    def nbytes(self) -> int:
        """Bytes that its weights take."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is added to the residual, before any norm of it."""
        ...


@dataclass(slots=True, frozen=True)
class DenseMlp:
    """down(gate_up(x)); `gate_up` is gated, or only activates where there is no gate. Implements `Mlp`."""

    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        """Bytes of both weights."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.down(self.gate_up(x))


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """One layer's weights. `qkv` is one fused projection; `sinks` are as in `Ops.attention`. In the place of attention
    there may be a `mixer` with states, for which `qkv` makes all that it takes. With `gated` attention `qkv` ends with
    as many gates [T, Hq * D] as there are queries, by whose logistic function what attention gives is multiplied.

    Norms are None where there is none: of what attention and the MLP are given (pre) and of what they give, before it
    is added to the residual (post). If it is `parallel` the MLP is given what attention is given, and what both give
    is added.
    """

    heads: HeadShape
    attention_pre_norm: Tensor | None
    qkv: Linear
    mixer: Mixer | None
    gated: bool
    sinks: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    attention_post_norm: Tensor | None
    mlp_pre_norm: Tensor | None
    mlp: Mlp
    mlp_post_norm: Tensor | None
    parallel: bool

    @property
    def norms(self) -> list[Tensor]:
        """Those that there are."""
        pre_and_post = (self.attention_pre_norm, self.attention_post_norm, self.mlp_pre_norm, self.mlp_post_norm)
        return [norm for norm in (*pre_and_post, self.q_norm, self.k_norm) if norm is not None]


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    """A decoder. `embedding` [V, H] is None where the head, which is tied to it, gives its rows.

    `norm_bias` [H] is added to what the last norm gives, not by the pass itself.
    `head` is None where only hidden states are wanted; then there is an embedding. Embeddings are multiplied by
    `embedding_scale`, a number of `dtype`, as they and all hidden states are; `positions` [positions, H] are added to
    them, if there are any.
    """

    layers: Sequence[DecoderLayer]
    norm: Tensor
    norm_bias: Tensor | None
    embedding: Tensor | None
    positions: Tensor | None
    head: Head | None
    eps: float
    embedding_scale: float
    dtype: torch.dtype


Forward = Callable[[Inputs], Tensor]
# added, residual [T, H]: adds the one to the other, and then what an MLP makes of that, normalized.
AddMlp = Callable[[Tensor, Tensor], None]


@dataclass(slots=True, frozen=True)
class Draws:
    """How to draw D tokens for each of R rows, each by a number in [0, 1) of `uniform` [R, D]; all others are [R].

    min_p 0, top_k 0 and top_p 1 are off.
    """

    temperature: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: Ints
    top_p: NDArray[np.float32]
    uniform: NDArray[np.float64]

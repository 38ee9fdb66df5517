"""The operations that models are made of; `reference.py` is their meaning, the others are faster."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from chairlift.ops.activation import Activation
from chairlift.ops.base import (
    AddMlp,
    Allowed,
    AttentionBatch,
    DecoderWeights,
    Draws,
    Forward,
    Head,
    HeadShape,
    KVCache,
    Linear,
    Mlp,
    Quantization,
    StateSpans,
)
from chairlift.ops.encoder import EncoderForward, EncoderWeights
from chairlift.ops.rotation import RotaryTable


class Recurrence(Protocol):
    """Layers with states, for the tokens of one step. `spans` are its sequences', as `prepare` makes them once a step.

    A layer's states have a first dimension of rows. A token is computed the same way in any company and in any part.
    """

    def prepare(self, spans: StateSpans) -> object:
        """What the others take for `spans`."""
        ...

    def causal_conv(
        self, spans: object, states: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
    ) -> Tensor:
        """Return each channel's convolution over the last K inputs, activated if asked: x [T, C] -> [T, C].

        weight [C, K], the newest input's last; bias [C]; states [rows, C, K]: the last inputs.
        """
        ...

    def gated_delta(
        self, spans: object, states: Tensor, qkv: tuple[Tensor, Tensor, Tensor], g: Tensor, beta: Tensor, unit: bool
    ) -> Tensor:
        """Return the outputs [T, Hv, Dv] of the gated delta rule (Yang et al., 2024).

        qkv: queries and keys [T, Hk, Dk], divided by their lengths if `unit`, and values [T, Hv, Dv]; g, the logarithm
        of the decay, and beta [T, Hv] float32; states [rows, Hv, Dk, Dv] float32.
        """
        ...

    def mamba2(
        self, spans: object, states: Tensor, xbc: tuple[Tensor, Tensor, Tensor], dt: Tensor, a: Tensor, d: Tensor | None
    ) -> Tensor:
        """Return the outputs [T, H, P] float32 of Mamba 2 (Dao and Gu, 2024).

        xbc: x [T, H, P], b and c [T, G, N]; dt [T, H], a and d [H] float32; states [rows, H, P, N] float32.
        """
        ...


class Ops(Protocol):
    """One implementation of every operation, for one device. Activations are [T, features], contiguous, in `dtype`.

    With `quantization` "int8" the linear weights are 8-bit numbers with a scale for each output, and what they multiply
    is 8-bit numbers with a scale for each token, found from its highest magnitude. With "int4" the weights are 4-bit
    numbers with a factor and an offset for each 32 of them besides: `quantize_int4` in int4_grid.py makes them.
    `pads_values` says that rows of V in the cache are padded as kv_layout.py counts them.
    """

    name: str
    quantization: Quantization
    pads_values: bool

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return x [T, in] -> [T, out] for weight [out, in]; may re-lay the weight once, here."""
        ...

    def gated_linear(self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu") -> Linear:
        """Return x [T, in] -> activation(gate) * up [T, I] for weight [2 * I, in], gate first."""
        ...

    def activated_linear(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> Linear:
        """Return x [T, in] -> activation(x * weight^T + bias) for weight [out, in]."""
        ...

    def head(self, weight: Tensor) -> Head:
        """Return the last projection of weight [V, H]."""
        ...

    def fuse(
        self,
        weights: DecoderWeights,
        caches: Sequence[KVCache],
        rotations: Sequence[RotaryTable],
        states: Sequence[Sequence[Tensor]],
    ) -> Forward | None:
        """Return the whole forward pass at once, as `Decoder.forward` describes it; None if there is no such thing.

        `caches`, `rotations` and `states` are those of each layer; of one with states the cache is empty.
        """
        ...

    def fuse_mlp(self, norm: Tensor, eps: float, mlp: Mlp) -> AddMlp | None:
        """Return an MLP with its norm [H] and both additions at once; None if there is no such thing."""
        ...

    def recurrence(self) -> "Recurrence | None":
        """Return kernels for layers with states; None where there are none."""
        ...

    def encoder(self, weights: EncoderWeights) -> EncoderForward:
        """Return an encoder's forward pass; what it needs of the weights is copied or kept."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32.

        The quotient is rounded to the weight's dtype: to that of x, as Llama does it, or not, if that is float32.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x into `residual` in place and return rms_norm(residual)."""
        ...

    def exclude(self, logits: Tensor, allowed: Allowed) -> None:
        """Make logits [R, V] float32 -inf in place, except those of the tokens that are allowed."""
        ...

    def highest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the highest of each row of logits [R, V] float32, [R], and the first token that has it, [R] int64.

        It is NaN for a row that has one, whose token is any.
        """
        ...

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw D token ids for each row of logits [R, V] float32: [R, D] int64, on their device, not waited for.

        A row whose highest logit is not finite gets any tokens.

        The logits are divided by the temperature. min_p keeps tokens with at least min_p times the best one's
        probability; top_k the k likeliest of those; top_p the fewest likeliest of those whose probabilities,
        renormalized, reach top_p. Ties with the last one kept are kept too, so the outcome depends neither on an order
        of sorting nor on the other rows. What is left is drawn from by inverting its CDF, in vocabulary order.
        """
        ...

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """K and V of one layer, in this implementation's own layout.

        `dtype` is that of the activations, or int8: then each token's K and V under each KV head are rounded to steps
        of a 127th of their largest value, and the steps, its scales, are kept in float32. The other operations tell
        from the cache which it is.
        """
        ...

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
        """Split qkv [T, (Hq + 2 Hkv) * D]; normalize, rotate and write K and V; return q [T, Hq * D].

        Each head of q and k is RMS-normalized if norms [D] are given (Qwen3), and all heads of q together and of k
        together with norms [Hq * D] and [Hkv * D] (OLMo 2). Then they are rotated by halves (Llama) at batch.positions,
        and q multiplied by its factors (Ministral 3); k and v go to the cache at batch.slot_mapping.
        """
        ...

    def attention(
        self, q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of every token over what it sees (`heads`) of its own sequence's cached K and V: [T, Hq * D].

        sinks [Hq] float32: for each head the score of one more key that all tokens see, whose value is zero.
        """
        ...

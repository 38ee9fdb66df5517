"""Reads what stands in the place of a layer's attention, with the product before it and the one behind it."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from chairlift.folders.decoder_family import Mixers
from chairlift.folders.delta_nets import DeltaNets
from chairlift.folders.mamba_mixers import MambaMixers
from chairlift.folders.short_convolutions import ShortConvolutions
from chairlift.ops.base import Linear, Mixer
from chairlift.ops.gated_delta_net import GatedDeltaNet
from chairlift.ops.mamba_mixer import MambaMixer
from chairlift.ops.short_convolution import ShortConvolution
from chairlift.runners.weights import Matrix, Weights


class MixerReader(NamedTuple):
    """Reads one layer's of a model of this hidden size H. Raises UnsupportedModel as `Weights.take`.

    `rows` reads the tensors of one product by names, outputs and inputs, which may have biases; `linear` packs them,
    and `added` does both for one whose result is added to the residual.
    """

    hidden: int
    weights: Weights
    rows: Callable[[list[str], list[int], int, bool], Matrix]
    linear: Callable[..., Linear]
    added: Callable[[str, int, bool], Linear]

    def read(self, mixers: Mixers, prefix: str) -> tuple[Mixer, Linear, Linear]:
        """The mixer, the product before it, and the one behind it, of tensors whose names begin so."""
        if isinstance(mixers, ShortConvolutions):
            return self._convolution(mixers, f"{prefix}conv.")
        if isinstance(mixers, MambaMixers):
            return self._mamba(mixers, f"{prefix}mamba.")
        return self._delta(mixers, f"{prefix}linear_attn.")

    def _convolution(self, mixers: ShortConvolutions, prefix: str) -> tuple[ShortConvolution, Linear, Linear]:
        hidden, take = self.hidden, self.weights.take
        gates = self.rows([f"{prefix}in_proj"], [3 * hidden], hidden, mixers.bias)
        weight = take([f"{prefix}conv.weight"], [(hidden, 1, mixers.taps)])[:, 0].contiguous()
        bias = take([f"{prefix}conv.bias"], [(hidden,)]) if mixers.bias else None
        return (
            ShortConvolution(weight, bias),
            self.linear(*gates),
            self.added(f"{prefix}out_proj", hidden, mixers.bias),
        )

    def _delta(self, mixers: DeltaNets, prefix: str) -> tuple[GatedDeltaNet, Linear, Linear]:
        take, heads, exact = self.weights.take, mixers.value_heads, torch.float32
        if mixers.by_key_heads:
            first = self._by_key_heads(mixers, prefix)
        else:
            names = [f"{prefix}in_proj_{part}" for part in ("qkv", "z", "b", "a")]
            first = self.rows(names, [mixers.channels, mixers.values, heads, heads], self.hidden, False)
        net = GatedDeltaNet(
            take([f"{prefix}conv1d.weight"], [(mixers.channels, 1, mixers.taps)])[:, 0].contiguous(),
            take([f"{prefix}A_log"], [(heads,)], exact).exp_().neg_(),
            take([f"{prefix}dt_bias"], [(heads,)], exact),
            take([f"{prefix}norm.weight"], [(mixers.value_dim,)]),
            mixers.key_heads,
            heads,
            mixers.key_dim,
            mixers.value_dim,
        )
        return net, self.linear(*first), self.added(f"{prefix}out_proj", mixers.values, False)

    def _by_key_heads(self, mixers: DeltaNets, prefix: str) -> Matrix:
        """The product's rows by its parts, of two tensors that have those of each head of keys one after the other."""
        groups, key, value = mixers.key_heads, mixers.key_dim, mixers.values // mixers.key_heads
        each = mixers.value_heads // groups
        both, few = (
            self.rows([f"{prefix}in_proj_{name}"], [groups * width], self.hidden, False).weight.view(groups, width, -1)
            for name, width in (("qkvz", 2 * key + 2 * value), ("ba", 2 * each))
        )
        parts = [*torch.split(both, [key, key, value, value], dim=1), *torch.split(few, each, dim=1)]
        return Matrix(torch.cat([part.flatten(0, 1) for part in parts]))

    def _mamba(self, mixers: MambaMixers, prefix: str) -> tuple[MambaMixer, Linear, Linear]:
        take, heads, exact, channels = self.weights.take, mixers.heads, torch.float32, mixers.channels
        first = self.rows([f"{prefix}in_proj"], [mixers.inner + channels + heads], self.hidden, mixers.bias)
        mixer = MambaMixer(
            take([f"{prefix}conv1d.weight"], [(channels, 1, mixers.taps)])[:, 0].contiguous(),
            take([f"{prefix}conv1d.bias"], [(channels,)]) if mixers.conv_bias else None,
            take([f"{prefix}A_log"], [(heads,)], exact).exp_().neg_(),
            take([f"{prefix}dt_bias"], [(heads,)], exact),
            take([f"{prefix}D"], [(heads,)], exact),
            take([f"{prefix}norm.weight"], [(mixers.inner,)], exact),
            heads,
            mixers.head_dim,
            mixers.state_dim,
            mixers.groups,
            mixers.least_step,
            mixers.most_step,
        )
        return mixer, self.linear(*first), self.added(f"{prefix}out_proj", mixers.inner, mixers.bias)

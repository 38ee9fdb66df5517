"""Our kernels in place of the functions by which transformers' modules compute convolutions and recurrences.

Families have these functions under the same names and with the same arguments. A module's `forward` is run as it is,
with others in place of theirs: they know where each sequence begins, so that all of them go through it at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chairlift.errors import UnsupportedModel
from chairlift.ops.base import StateSpans
from chairlift.ops.contract import Ops, Recurrence
from chairlift.runners.decoder.rebound import called_by, rebound

_MOST_TAPS = 16
_CONVOLUTIONS = {"causal_conv1d_fn"}
_RECURRENCES = {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}


class SpannedCache:
    """What a module takes for its cache: it asks for no state, and notes which one it would be."""

    def __init__(self) -> None:
        # The layer and the number of what is asked for next, by kind.
        self.asked: dict[str, tuple[int, int]] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that the module computes what it computes for a new text."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any) -> Tensor:
        """What the convolution is given."""
        self.asked["conv"] = layer_idx, state_idx
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, as above."""
        self.asked["recurrent"] = layer_idx, state_idx

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0) -> Any:
        """Nothing: the kernels write states where they lie."""
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """No."""
        return False


class SpannedFunctions:
    """The functions, for the spans of the pass under way, and the states that `state_of` gives by layer and name."""

    def __init__(self, ops: Ops, kernels: Recurrence, state_of: Callable[[int, str], Tensor]) -> None:
        self.ops, self.cache = ops, SpannedCache()
        self._spans: object = None
        self._kernels, self._state_of = kernels, state_of

    def prepare(self, spans: StateSpans) -> None:
        """A pass over these begins."""
        self._spans = self._kernels.prepare(spans)

    def forward_of(self, module: nn.Module, kinds: set[str]) -> Callable[..., Any] | None:
        """The module's forward with these functions, if they are all that it needs for states of these kinds."""
        wanted = {"conv": _CONVOLUTIONS, "recurrent": _RECURRENCES}
        if not all(called_by(module) & wanted[kind] for kind in kinds):
            return None
        ours: Mapping[str, Any] = {
            "causal_conv1d_fn": self.causal_conv,
            "torch_chunk_gated_delta_rule": self.gated_delta,
            "mamba2_chunk_scan": self.mamba2,
        }
        return rebound(module, ours)

    def _state(
        self, kind: str, place: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The states [rows, *shape] of a layer and number; the kernels look at memory, so it has to be these."""
        layer, index = place
        state = self._state_of(layer, f"{kind}/{index}")
        if state.dtype != dtype or state.shape[1:] != shape:
            raise UnsupportedModel(f"the {kind} state of layer {layer} is not of {shape} in {dtype}")
        return state

    def causal_conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Hidden states [1, C, T] -> [1, C, T]; weight [C, K], bias [C]."""
        if activation not in (None, "silu", "swish"):
            raise UnsupportedModel(f"a convolution with {activation!r} is not known")
        place = self.cache.asked.pop("conv")
        return self.convolve(place, hidden_states[0].T, weight, bias, activation is not None).T[None]

    def convolve(self, place: tuple[int, int], x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """x [T, C] -> [T, C] by the states of a layer and number; weight [C, K], bias [C]."""
        _refuse_unlike(x, weight, *([] if bias is None else [bias]))
        channels, taps = weight.shape
        state = self._state("conv", place, (channels, taps), x.dtype)
        if taps > _MOST_TAPS or x.shape[1] != channels or (bias is not None and len(bias) != channels):
            raise UnsupportedModel(f"a convolution of {channels} channels over {taps} inputs is not known")
        return self._kernels.causal_conv(self._spans, state, x, weight, bias, silu)

    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Queries and keys [1, T, Hk, Dk], values [1, T, Hv, Dv], g and beta [1, T, Hv] -> [1, T, Hv, Dv]."""
        place, qkv = self.cache.asked.pop("recurrent"), (query[0], key[0], value[0])
        return self.delta(place, qkv, g[0], beta[0], use_qk_l2norm_in_kernel)[None], None

    def delta(
        self, place: tuple[int, int], qkv: tuple[Tensor, Tensor, Tensor], g: Tensor, beta: Tensor, unit: bool
    ) -> Tensor:
        """Queries, keys [T, Hk, Dk], values [T, Hv, Dv], g, beta [T, Hv] -> [T, Hv, Dv] by the states of a layer."""
        query, key, value = qkv
        (tokens, key_heads, key_dim), (heads, dim) = key.shape, value.shape[1:]
        _refuse_unlike(query, key, value)
        if query.shape != key.shape or heads % key_heads or not g.shape == beta.shape == (tokens, heads):
            raise UnsupportedModel("a delta rule with a decay for each dimension, or uneven heads, is not known")
        state = self._state("recurrent", place, (heads, key_dim, dim))
        return self._kernels.gated_delta(self._spans, state, qkv, g, beta, unit)

    def mamba2(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: None = None,
        dt_bias: Tensor | None = None,
        initial_states: None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, None]:
        """x [1, T, H, P], dt [1, T, H], B and C [1, T, G, N], A and D [H] -> [1, T, H, P] float32."""
        if z is not None:
            raise UnsupportedModel("a Mamba with gates is not known")
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = functional.softplus(dt)
        place, xbc = self.cache.asked.pop("recurrent"), (hidden_states[0], B[0], C[0])
        found = self.scan(place, xbc, dt.clamp(*dt_limit)[0], A, D)[None]
        return (found, None) if return_final_states else found

    def scan(
        self, place: tuple[int, int], xbc: tuple[Tensor, Tensor, Tensor], dt: Tensor, a: Tensor, d: Tensor | None
    ) -> Tensor:
        """x [T, H, P], b and c [T, G, N], dt [T, H], a and d [H] -> [T, H, P] float32 by the states of a layer."""
        x, b, c = xbc
        (tokens, heads, dim), (groups, size) = x.shape, b.shape[1:]
        _refuse_unlike(x, b, c)
        known = a.shape == (heads,) and (d is None or d.shape == (heads,)) and b.shape == c.shape
        if not known or heads % groups or dt.shape != (tokens, heads):
            raise UnsupportedModel("a Mamba with decays for each dimension, or uneven groups, is not known")
        state = self._state("recurrent", place, (heads, dim, size))
        return self._kernels.mamba2(self._spans, state, xbc, dt, a, d)


def _refuse_unlike(first: Tensor, *others: Tensor) -> None:
    """Raise UnsupportedModel unless all are of one type that the kernels know."""
    if first.dtype not in (torch.float32, torch.bfloat16) or any(each.dtype != first.dtype for each in others):
        raise UnsupportedModel(f"numbers of {', '.join(str(each.dtype) for each in (first, *others))} are not known")

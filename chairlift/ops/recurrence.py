"""Layers with states by the native kernels: convolutions, the gated delta rule, Mamba 2."""

import ctypes
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from chairlift.ops import native
from chairlift.ops.base import Ints, StateSpans


class NativeSpans:
    """A step's spans as the kernels read them. A copy before a sequence's first token or behind its last is no cut."""

    def __init__(self, spans: StateSpans) -> None:
        cuts = [
            [
                (count, row)
                for count, row in spans.cuts.get(index, ())
                if 0 < count < spans.starts[index + 1] - spans.starts[index]
            ]
            for index in range(len(spans.rows))
        ]
        flat = [cut for each in cuts for cut in each]
        first_cut = [0, *accumulate(map(len, cuts))]
        counts, rows = zip(*flat, strict=True) if flat else ((), ())
        lists = (spans.rows, spans.starts, first_cut, counts, rows)
        self._arrays: list[Ints] = [np.array(each, np.int64) for each in lists]
        self.struct = native.StateSpansStruct(*(each.ctypes.data for each in self._arrays), len(spans.rows))


class NativeRecurrence:
    """Implements `Recurrence`; states and all else are on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def prepare(self, spans: StateSpans) -> NativeSpans:
        """What the others take for `spans`."""
        return NativeSpans(spans)

    def causal_conv(
        self, spans: object, states: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
    ) -> Tensor:
        """Return x [T, C] -> [T, C]; weight [C, K], bias [C], states [rows, C, K]."""
        assert isinstance(spans, NativeSpans)
        x, weight = _rows(x), weight.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        bias_at = None if bias is None else bias.data_ptr()
        addresses = x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr()
        conv = native.ConvolutionStruct(*addresses, states_struct(states), x.stride(0), *weight.shape, silu)
        self._call("chairlift_causal_conv", spans, conv, x.dtype)
        return out

    def gated_delta(
        self, spans: object, states: Tensor, qkv: tuple[Tensor, Tensor, Tensor], g: Tensor, beta: Tensor, unit: bool
    ) -> Tensor:
        """Return [T, Hv, Dv] for q, k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv]; states [rows, Hv, Dk, Dv]."""
        assert isinstance(spans, NativeSpans)
        q, k, v = map(_rows, qkv)
        g, beta = g.float().contiguous(), beta.float().contiguous()
        out = torch.empty(v.shape, dtype=v.dtype)
        addresses = (each.data_ptr() for each in (q, k, v, g, beta, out))
        strides = (each.stride(0) for each in (q, k, v))
        sizes = k.shape[1], v.shape[1], k.shape[2], v.shape[2]
        rule = native.DeltaRuleStruct(*addresses, states_struct(states), *strides, *sizes, unit)
        self._call("chairlift_gated_delta", spans, rule, q.dtype)
        return out

    def mamba2(
        self, spans: object, states: Tensor, xbc: tuple[Tensor, Tensor, Tensor], dt: Tensor, a: Tensor, d: Tensor | None
    ) -> Tensor:
        """Return [T, H, P] float32 for x [T, H, P], b, c [T, G, N], dt [T, H], a, d [H]; states [rows, H, P, N]."""
        assert isinstance(spans, NativeSpans)
        x, b, c = map(_rows, xbc)
        dt, a = dt.float().contiguous(), a.float().contiguous()
        d = None if d is None else d.float().contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        d_at = None if d is None else d.data_ptr()
        addresses = x.data_ptr(), b.data_ptr(), c.data_ptr(), dt.data_ptr(), a.data_ptr(), d_at, out.data_ptr()
        strides = (each.stride(0) for each in (x, b, c))
        sizes = x.shape[1], b.shape[1], x.shape[2], b.shape[2]
        mamba = native.Mamba2Struct(*addresses, states_struct(states), *strides, *sizes)
        self._call("chairlift_mamba2", spans, mamba, x.dtype)
        return out

    def _call(self, name: str, spans: NativeSpans, layer: ctypes.Structure, dtype: torch.dtype) -> None:
        getattr(self._library, name)(ctypes.byref(spans.struct), ctypes.byref(layer), native.DTYPES[dtype])


def _rows(x: Tensor) -> Tensor:
    """x [T, ...] with each row in one piece; rows may lie apart."""
    return x if x[:1].is_contiguous() else x.contiguous()


def states_struct(states: Tensor) -> native.StatesStruct:
    """Where states [rows, ...] lie."""
    return native.StatesStruct(states.data_ptr(), states.stride(0) * states.itemsize)

"""Weights packed once for the native products: see native/gemm.h."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.ops.activation import Activation
from chairlift.ops.base import Allowed
from chairlift.ops.formats import PANEL, WeightFormat
from chairlift.ops.huge_pages import zeros
from chairlift.ops.native import ACTIVATIONS, DTYPES, POINTER, WeightStruct


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Where their memory begins, which is kept only as long as they are; null for None."""
    return (POINTER * len(tensors))(*(None if each is None else each.data_ptr() for each in tensors))


class PackedWeight:
    """A weight [out, in] in one of `FORMATS`.

    Called with x [T, in] it gives x * weight^T + bias, activated if there is an activation, and of a gated weight the
    activation of the lower half * the upper half, [T, width]. Where the format wants bytes, each row of x is
    quantized by its own highest magnitude. Implements `Linear` and `Head`.
    """

    num_candidates = 8

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: WeightFormat,
        *,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        """Copy the weight; x is to have the same dtype."""
        self.dtype = weight.dtype
        out_features, in_features = weight.shape
        self.width = out_features // 2 if gated else out_features
        panels = -(-self.width // (PANEL // 2)) if gated else -(-out_features // PANEL)
        self._packed = zeros(weight_format.packed_bytes(panels, in_features), torch.int8)
        self._bias = None if bias is None else torch.zeros(panels * PANEL)
        self._scales = torch.zeros(panels * PANEL if weight_format.scaled else 0)
        self._compensation = torch.zeros(panels * PANEL if weight_format.compensated else 0, dtype=torch.int32)
        self.nbytes = self._packed.nbytes + self._scales.nbytes + self._compensation.nbytes
        self.struct = WeightStruct(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._scales.data_ptr(),
            self._compensation.data_ptr(),
            out_features,
            in_features,
            weight_format.id,
            gated,
            -1 if activation is None else ACTIVATIONS[activation],
        )
        self._address = ctypes.addressof(self.struct)
        self._code = DTYPES[weight.dtype]
        self._linear, self._best = library.chairlift_linear, library.chairlift_best
        self._embed = library.chairlift_embed
        given = weight.contiguous()
        given_bias = None if bias is None else bias.contiguous()
        library.chairlift_pack(
            given.data_ptr(), None if given_bias is None else given_bias.data_ptr(), self._address, self._code
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, width]."""
        out = torch.empty((x.shape[0], self.width), dtype=self.dtype)
        self._linear(x.data_ptr(), x.shape[0], self._address, out.data_ptr(), 0, self._code)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return hidden [R, in] -> [R, out] float32, not rounded."""
        out = torch.empty((hidden.shape[0], self.width), dtype=torch.float32)
        self._linear(hidden.data_ptr(), hidden.shape[0], self._address, out.data_ptr(), 1, self._code)
        return out

    def best(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return the highest logit of each row, [R] float32, and the first output that has it, [R], as `Head.best`."""
        values, indices = self._highest(hidden, allowed, 1)
        return values[:, 0], indices[:, 0]

    def candidates(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return the highest logits of each row, [R, C] float32, and whose they are, [R, C], as `Head.candidates`."""
        return self._highest(hidden, allowed, self.num_candidates)

    def _highest(self, hidden: Tensor, allowed: Allowed | None, count: int) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        values = torch.empty((rows, count), dtype=torch.float32)
        indices = torch.empty((rows, count), dtype=torch.int64)
        bits = None if allowed is None else addresses(allowed)
        out = count, indices.data_ptr(), values.data_ptr()
        self._best(hidden.data_ptr(), rows, self._address, bits, *out, self._code)
        return values, indices

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the weight, [T, in], for ids [T] int64."""
        out = torch.empty((ids.shape[0], self.struct.in_features), dtype=self.dtype)
        self._embed(ids.data_ptr(), ids.shape[0], self._address, out.data_ptr(), self._code)
        return out

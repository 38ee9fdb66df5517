"""A layer's MLP with its norm and both additions in one native call."""

import ctypes

from torch import Tensor

from chairlift.ops import native
from chairlift.ops.base import DenseMlp, Mlp
from chairlift.ops.packed import PackedWeight


class FusedMlp:
    """residual += added, and then residual += mlp(rms_norm(residual)). Callable: see `AddMlp`."""

    def __init__(
        self, library: ctypes.CDLL, norm: Tensor, eps: float, gate_up: PackedWeight, down: PackedWeight
    ) -> None:
        # The structures hold addresses only, so what they point to is kept here.
        self._held = norm, gate_up, down
        self._layer = native.DecoderLayerStruct(gate_up=gate_up.struct, down=down.struct)
        self._layer.mlp_pre_norm = native.NormStruct.of(norm)
        self._decoder = native.DecoderStruct(layers=ctypes.pointer(self._layer), num_layers=1)
        self._decoder.hidden_size, self._decoder.eps = norm.shape[0], eps
        self._decoder.dtype = native.DTYPES[down.dtype]
        self._address = ctypes.addressof(self._decoder)
        self._add_mlp = library.chairlift_add_mlp

    @classmethod
    def of(cls, library: ctypes.CDLL, norm: Tensor, eps: float, mlp: Mlp) -> "FusedMlp | None":
        """The same of an MLP whose weights the native products hold; None of others."""
        if not isinstance(mlp, DenseMlp):
            return None
        gate_up, down = mlp.gate_up, mlp.down
        if not isinstance(gate_up, PackedWeight) or not isinstance(down, PackedWeight):
            return None
        return cls(library, norm, eps, gate_up, down)

    def __call__(self, added: Tensor, residual: Tensor) -> None:
        """added and residual [T, H], contiguous."""
        self._add_mlp(self._address, added.data_ptr(), residual.data_ptr(), len(residual))

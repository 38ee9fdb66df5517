"""The formats in which the native products take their weights: each is a struct in native/format.h as well."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Outputs whose weights lie together.
PANEL = 32
# A step of a product takes so many bytes of each row.
_STEP_BYTES = 4
# Numbers of a weight that are looked at together: what they are turned into stays in a core's cache.
_LOOKED_AT = 1 << 18


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight [out, in] lies packed, in panels of `PANEL` outputs.

    bits: of one weight. block: inputs and bytes of what a panel is a whole number of. rows: what the activations are
    rounded to, floats or bytes with a zero point. scaled: each output has a float32 scale, and each row of bytes too.
    compensated: each output has an int32, its zero-point compensation: what its sums start from.
    """

    name: str
    id: int
    bits: int
    block: tuple[int, int]
    rows: torch.dtype
    scaled: bool
    compensated: bool

    @property
    def inputs(self) -> int:
        """Inputs of a step, to whose multiple rows are filled up."""
        return _STEP_BYTES // self.rows.itemsize

    def packed_bytes(self, panels: int, in_features: int) -> int:
        """What the weights of so many panels take, without scales of outputs."""
        inputs, size = self.block
        return panels * -(-in_features // inputs) * size

    def takes(self, dtype: torch.dtype, in_features: int) -> bool:
        """Whether it holds weights of this dtype: rows that are not rounded must be of theirs and fill their steps."""
        return self.scaled or (dtype == self.rows and in_features % self.inputs == 0)


_FORMATS = (
    WeightFormat("bfloat16", 0, bits=16, block=(2, 128), rows=torch.bfloat16, scaled=False, compensated=False),
    WeightFormat("int8", 1, bits=8, block=(4, 128), rows=torch.uint8, scaled=True, compensated=True),
    # Besides its 4 bits a weight has a 32nd part of two bytes: see native/int4.h.
    WeightFormat("int4", 2, bits=4, block=(64, 1152), rows=torch.uint8, scaled=True, compensated=True),
    WeightFormat("float32", 3, bits=32, block=(1, 128), rows=torch.float32, scaled=False, compensated=False),
    WeightFormat("float16", 4, bits=16, block=(1, 64), rows=torch.float32, scaled=False, compensated=False),
    WeightFormat("wide_bfloat16", 5, bits=16, block=(1, 64), rows=torch.float32, scaled=False, compensated=False),
)
FORMATS = {each.name: each for each in _FORMATS}
# What weights of float32 are kept in where it holds all their numbers, and the type that tells.
HALVES = {"float16": torch.float16, "wide_bfloat16": torch.bfloat16}


def narrowest(weight: Tensor) -> WeightFormat:
    """The format in which a weight [out, in] of float32 takes the least memory and keeps its numbers."""
    return FORMATS[next((name for name, dtype in HALVES.items() if _holds(dtype, weight)), "float32")]


def _holds(dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether numbers of a type are all those of a weight; what is no number none is."""
    parts = torch.split(weight, max(_LOOKED_AT // max(weight.shape[1], 1), 1))
    return all(torch.equal(part.to(dtype).to(weight.dtype), part) for part in parts)

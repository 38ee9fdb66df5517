"""Weights of quantized folders, unpacked as they are read. A projection NAME has, in place of NAME.weight [out, in]:

- **gptq** (AutoGPTQ, GPTQModel): NAME.qweight [in * bits / 32, out] int32, the numbers of 32 bits one below the other
  from the lowest bits on; NAME.qzeros [groups, out * bits / 32], side by side; NAME.scales [groups, out]; with a
  reordering NAME.g_idx [in], each input's group.
- **awq** (AutoAWQ's gemm): NAME.qweight [in, out / 8] and NAME.qzeros [groups, out / 8], eight numbers side by side in
  the order 0, 2, 4, 6, 1, 3, 5, 7; NAME.scales [groups, out].
- **fp8**: NAME.weight [out, in] float8_e4m3fn and NAME.weight_scale_inv, one for each block.
- **compressed** (compressed-tensors): NAME.weight_packed [out, in * bits / 32] int32, numbers less their lowest, with
  NAME.weight_shape [2]; or NAME.weight int8 or float8_e4m3fn; either with NAME.weight_scale [out, groups], or one for
  all, and, where there are any, NAME.weight_zero_point and NAME.weight_g_idx. Granite's experts are all in one
  NAME.weight [experts, out, in] of 8 bits, with NAME.weight_scale [experts, out, 1].

A number is (what is packed - zero point) * scale, computed in float32. What says how a model's inputs were rounded is
left: they are not.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.folders.quantization_config import UNPACKED_BY, QuantizationConfig

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD = 32
# All that a packed projection may have beside its bias.
_PARTS = ("qweight", "weight", "weight_packed", *UNPACKED_BY)
# [out, in].
MatrixShape = tuple[int, int]
# [experts, out, in].
ExpertsShape = tuple[int, int, int]
_FLOAT8 = torch.float8_e4m3fn


class QuantizedWeights:
    """Reads packed projections among the tensors of a folder. Raises UnsupportedModel naming the tensor at fault."""

    def __init__(self, packing: QuantizationConfig, names: Collection[str], get: Callable[[str], Tensor]) -> None:
        """`get` reads a tensor of these names."""
        self._packing, self._names, self._get = packing, names, get
        self._unpack: Callable[[str, MatrixShape], Tensor] = {
            "gptq": self._gptq,
            "awq": self._awq,
            "fp8": self._scaled,
            "compressed": self._compressed,
        }[packing.layout]

    def has(self, name: str) -> bool:
        """Whether a tensor, by the name that it would have unpacked, is one of these."""
        base, _, part = name.rpartition(".")
        if part != "weight":
            return False
        marks = {"gptq": ("qweight",), "awq": ("qweight",), "fp8": ("weight_scale_inv", "weight_scale")}
        return any(f"{base}.{mark}" in self._names for mark in marks.get(self._packing.layout, ("weight_scale",)))

    def parts_of(self, name: str) -> list[str]:
        """The tensors that hold one of these."""
        base = name.rpartition(".")[0]
        return [f"{base}.{part}" for part in _PARTS if f"{base}.{part}" in self._names]

    def read(self, name: str, shape: MatrixShape) -> Tensor:
        """Return [out, in] float32, which must be of that shape."""
        base = name.rpartition(".")[0]
        with _told(base):
            return self._unpack(base, shape)

    def read_experts(self, name: str, shape: ExpertsShape) -> Tensor:
        """Return [experts, out, in] float32, which must be of that shape."""
        base = name.rpartition(".")[0]
        with _told(base):
            beside = (f"{base}.{part}" for part in ("weight_packed", "weight_zero_point", "weight_g_idx"))
            if self._packing != QuantizationConfig("compressed", 8) or any(part in self._names for part in beside):
                raise UnsupportedModel(f"tensor {name!r} is packed, but no projection")
            numbers, scales = self._eight_bits(base, shape), self._floats(f"{base}.weight_scale", 3)
            self._same(f"{base}.weight_scale", scales.shape, (*shape[:2], 1))
            found = torch.empty(shape)
            for expert, own, scale in zip(found, numbers, scales, strict=True):
                torch.mul(own.float(), scale, out=expert)
            return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that one of these is said to have, by the part with its numbers: `read` looks at the others."""
        base = name.rpartition(".")[0]
        with _told(base):
            if self._packing.layout in ("gptq", "awq"):
                rows, columns = self._words(f"{base}.qweight").shape
                in_word = _WORD // self._packing.bits
                return (columns, rows * in_word) if self._packing.layout == "gptq" else (columns * in_word, rows)
            if f"{base}.weight_packed" not in self._names:
                return tuple(self._get_known(f"{base}.weight").shape)
            outs, ins = map(int, self._get_known(f"{base}.weight_shape").flatten().tolist())
            self._bits_of(base, (outs, ins))
            return outs, ins

    def _gptq(self, base: str, shape: MatrixShape) -> Tensor:
        (outs, ins), bits = shape, self._packing.bits
        scales, packed = self._floats(f"{base}.scales", 2), self._words(f"{base}.qweight")
        self._same(f"{base}.qweight", (packed.shape[1], packed.shape[0] * _WORD // bits), shape)
        numbers = _unpacked(packed.T, bits).T
        # Whoever made them less took as much from whole words: what was 0 has borrowed from the number above it.
        ones = sum(1 << shift for shift in range(0, _WORD, bits))
        zeros = _unpacked(self._words(f"{base}.qzeros") + self._packing.zero_offset * ones, bits)
        groups = self._groups(f"{base}.g_idx", ins, len(scales))
        self._same(f"{base}.scales", scales.shape, (len(scales), outs))
        self._same(f"{base}.qzeros", zeros.shape, (len(scales), outs))
        return ((numbers - zeros[groups]) * scales[groups]).T.contiguous()

    def _awq(self, base: str, shape: MatrixShape) -> Tensor:
        outs, ins = shape
        scales = self._floats(f"{base}.scales", 2)
        order = torch.tensor(_AWQ_ORDER).argsort()

        def numbers_of(name: str) -> Tensor:
            found = _unpacked(self._words(name), 4)
            return found.view(len(found), -1, len(order))[:, :, order].flatten(1)

        packed = self._words(f"{base}.qweight")
        self._same(f"{base}.qweight", (packed.shape[1] * len(order), packed.shape[0]), shape)
        numbers, zeros = numbers_of(f"{base}.qweight"), numbers_of(f"{base}.qzeros")
        self._same(f"{base}.scales", scales.shape, (len(scales), outs))
        self._same(f"{base}.qzeros", zeros.shape, (len(scales), outs))
        groups = self._groups(None, ins, len(scales))
        return ((numbers - zeros[groups]) * scales[groups]).T.contiguous()

    def _compressed(self, base: str, shape: MatrixShape) -> Tensor:
        if f"{base}.weight_packed" not in self._names:
            return self._scaled(base, shape)
        outs, ins = shape
        packed = self._words(f"{base}.weight_packed")
        self._same(f"{base}.weight_shape", self._get_known(f"{base}.weight_shape").flatten().tolist(), shape)
        bits = self._bits_of(base, shape)
        lowest = 1 << (bits - 1)
        numbers = (_unpacked(packed, bits)[:, :ins] - lowest).float()
        name = f"{base}.weight_zero_point"
        zeros = None
        if name in self._names:
            zeros = _unpacked(self._words(name).T, bits).T[:outs] - lowest
        return self._multiplied(base, numbers, zeros)

    def _bits_of(self, base: str, shape: MatrixShape) -> int:
        """How many bits numbers of that shape have in words."""
        packed, (outs, ins) = self._words(f"{base}.weight_packed"), shape
        bits = next((each for each in (4, 8) if packed.shape[1] == -(-ins * each // _WORD)), 4)
        self._same(f"{base}.weight_packed", packed.shape, (outs, -(-ins * bits // _WORD)))
        return bits

    def _scaled(self, base: str, shape: MatrixShape) -> Tensor:
        numbers = self._eight_bits(base, shape)
        name = f"{base}.weight_zero_point"
        zeros = self._get(name).float() if name in self._names else None
        return self._multiplied(base, numbers.float(), zeros)

    def _eight_bits(self, base: str, shape: Sequence[int]) -> Tensor:
        numbers = self._get_known(f"{base}.weight")
        self._same(f"{base}.weight", numbers.shape, shape)
        if numbers.dtype not in (torch.int8, _FLOAT8):
            raise UnsupportedModel(f"tensor '{base}.weight' is {numbers.dtype}, which is none of the packed types")
        return numbers

    def _multiplied(self, base: str, numbers: Tensor, zeros: Tensor | None) -> Tensor:
        """Numbers [out, in] less their zero points, times their scales, [out, groups], [blocks, blocks] or one."""
        inverse = f"{base}.weight_scale_inv"
        scales = self._floats(inverse if inverse in self._names else f"{base}.weight_scale")
        scales = scales.reshape(len(scales) if scales.ndim else 1, -1)
        outs, ins = numbers.shape
        if scales.numel() == 1:
            rows, columns = torch.zeros(outs, dtype=torch.int64), torch.zeros(ins, dtype=torch.int64)
        elif self._packing.block is None:
            self._same(f"{base}.weight_scale", scales.shape, (outs, scales.shape[1]))
            rows, columns = torch.arange(outs), self._groups(f"{base}.weight_g_idx", ins, scales.shape[1])
        else:
            high, wide = self._packing.block
            self._same(inverse, scales.shape, (-(-outs // high), -(-ins // wide)))
            rows, columns = torch.arange(outs) // high, torch.arange(ins) // wide
        if zeros is not None:
            zeros = zeros.reshape(scales.shape) if zeros.numel() == scales.numel() else zeros
            self._same(f"{base}.weight_zero_point", zeros.shape, scales.shape)
            numbers = numbers - zeros.float()[rows][:, columns]
        return numbers * scales[rows][:, columns]

    def _groups(self, name: str | None, ins: int, count: int) -> Tensor:
        """The group of each of `ins` inputs, of which there are `count`: by a tensor if there is one."""
        if name is not None and name in self._names:
            found = self._get(name).flatten().long()
            if len(found) != ins or (found < 0).any() or (found >= count).any():
                raise UnsupportedModel(f"tensor {name!r} must name one of {count} groups for each of {ins} inputs")
            return found
        if self._packing.layout == "compressed" and ins % count:
            raise UnsupportedModel(f"tensor {name!r} is missing, and {ins} inputs are not {count} equal groups")
        size = self._packing.group or -(-ins // count)
        if size * count < ins or size * (count - 1) >= ins:
            raise UnsupportedModel(f"{count} groups of {size} are not {ins} inputs: group_size in config.json is wrong")
        return torch.arange(ins) // size

    def _words(self, name: str) -> Tensor:
        found = self._get_known(name)
        if found.dtype != torch.int32 or found.ndim != 2:
            raise UnsupportedModel(f"tensor {name!r} is {found.dtype} with {found.ndim} dimensions, not int32 with 2")
        return found

    def _floats(self, name: str, dims: int | None = None) -> Tensor:
        found = self._get_known(name)
        if not found.is_floating_point() or (dims is not None and found.ndim != dims) or not found.numel():
            raise UnsupportedModel(f"tensor {name!r} is {found.dtype} of shape {list(found.shape)}, not scales")
        return found.float()

    def _get_known(self, name: str) -> Tensor:
        if name not in self._names:
            raise UnsupportedModel(f"tensor {name!r} is missing from the model's safetensors files")
        return self._get(name)

    @staticmethod
    def _same(name: str, found: Sequence[int], shape: Sequence[int]) -> None:
        if tuple(found) != tuple(shape):
            raise UnsupportedModel(f"tensor {name!r} is for {list(found)} numbers, but {list(shape)} are asked for")


@contextlib.contextmanager
def _told(base: str) -> Iterator[None]:
    """Around reading tensors that may be anything."""
    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"what {base!r} is packed in can't be read: {error}") from error


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Words [R, C] int32 as numbers [R, C * 32 / bits], from the lowest bits on."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)

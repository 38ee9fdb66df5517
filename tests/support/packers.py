"""Projections packed as the tools of each layout do it, number by number, and what they then are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.model_factory import edited_folder
from torch import Tensor

Numbers = NDArray[np.int64]


class PackedProjection(NamedTuple):
    """Tensors by the ends of their names, and the weight [out, in] float32 that they are."""

    tensors: dict[str, Tensor]
    weight: Tensor


def words(numbers: Numbers, bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Numbers [R, C] side by side in words of 32 bits; with an order the i-th place of a word has its order[i]-th."""
    count = 32 // bits
    padded = np.zeros((len(numbers), -(-numbers.shape[1] // count) * count), np.int64)
    padded[:, : numbers.shape[1]] = numbers
    found = np.zeros((len(numbers), padded.shape[1] // count), np.uint32)
    for row, column in np.ndindex(found.shape):
        for place in range(count):
            number = int(padded[row, column * count + (place if order is None else order[place])])
            found[row, column] |= np.uint32(number << (bits * place))
    return found.view(np.int32)


def _drawn(rng: np.random.Generator, outs: int, ins: int, bits: int, group: int) -> tuple[Numbers, Numbers, Any]:
    """Numbers [in, out], zero points [groups, out], and scales [groups, out]."""
    groups = ins // group
    numbers = rng.integers(0, 2**bits, (ins, outs))
    zeros = rng.integers(0, 2**bits, (groups, outs))
    return numbers, zeros, rng.uniform(0.01, 0.1, (groups, outs)).astype(np.float16)


def _weight(numbers: Numbers, zeros: Numbers, scales: Any, of_group: Numbers) -> Tensor:
    exact = (numbers - zeros[of_group]).astype(np.float32) * scales.astype(np.float32)[of_group]
    return torch.from_numpy(np.ascontiguousarray(exact.T))


def _ints(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def gptq(
    rng: np.random.Generator, outs: int, ins: int, bits: int = 4, group: int = 32, less: int = 1, ordered: bool = False
) -> PackedProjection:
    """As GPTQModel: words of zero points less one each in its first version, inputs in any order with `ordered`."""
    numbers, zeros, scales = _drawn(rng, outs, ins, bits, group)
    of_group = np.arange(ins) // group
    if ordered:
        of_group = rng.permutation(of_group)
    tensors = {
        "qweight": _ints(words(numbers.T, bits).T),
        "qzeros": _ints(words(zeros, bits) - np.int32(less * sum(1 << place for place in range(0, 32, bits)))),
        "scales": _ints(scales),
        "g_idx": _ints(of_group.astype(np.int32)),
    }
    return PackedProjection(tensors, _weight(numbers, zeros, scales, of_group))


def awq(rng: np.random.Generator, outs: int, ins: int, *, group: int = 32) -> PackedProjection:
    """As AutoAWQ's WQLinear_GEMM."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    numbers, zeros, scales = _drawn(rng, outs, ins, 4, group)
    packed = {"qweight": _ints(words(numbers, 4, order)), "qzeros": _ints(words(zeros, 4, order))}
    weight = _weight(numbers, zeros, scales, np.arange(ins) // group)
    return PackedProjection({**packed, "scales": _ints(scales)}, weight)


def compressed(
    rng: np.random.Generator, outs: int, ins: int, bits: int = 4, zero: bool = False, ordered: bool = False
) -> PackedProjection:
    """As compressed-tensors' pack-quantized."""
    group = 32
    numbers, zeros, scales = _drawn(rng, outs, ins, bits, group)
    if not zero:
        zeros[:] = 2 ** (bits - 1)
    of_group = np.arange(ins) // group
    if ordered:
        of_group = rng.permutation(of_group)
    tensors = {
        "weight_packed": _ints(words(numbers.T, bits)),
        "weight_shape": torch.tensor([outs, ins]),
        "weight_scale": _ints(scales.T),
    }
    if zero:
        tensors["weight_zero_point"] = _ints(words(zeros, bits).T)
    if ordered:
        tensors["weight_g_idx"] = _ints(of_group.astype(np.int32))
    return PackedProjection(tensors, _weight(numbers, zeros, scales, of_group))


def eight_bits(
    rng: np.random.Generator, outs: int, ins: int, *, zero: bool = False, rows: bool = True
) -> PackedProjection:
    """As compressed-tensors' int-quantized, a scale for each output or one."""
    numbers = torch.from_numpy(rng.integers(-128, 128, (outs, ins))).to(torch.int8)
    scales = torch.from_numpy(rng.uniform(0.001, 0.01, (outs if rows else 1, 1))).to(torch.bfloat16)
    tensors = {"weight": numbers, "weight_scale": scales if rows else scales.flatten()}
    shift = torch.zeros(1)
    if zero:
        shift = torch.from_numpy(rng.integers(-9, 9, (outs, 1))).to(torch.int8)
        tensors["weight_zero_point"] = shift
    return PackedProjection(tensors, (numbers.float() - shift.float()) * scales.float())


def fp8(
    rng: np.random.Generator, outs: int, ins: int, *, block: tuple[int, int] | None = None, inverse: bool = True
) -> PackedProjection:
    """As DeepSeek's folders, a scale for each block, or one for all."""
    numbers = torch.from_numpy(rng.normal(0, 1, (outs, ins))).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if inverse else "weight_scale"
    if block is None:
        scale = torch.tensor(0.03125)
        tensors = {"weight": numbers, name: scale, "input_scale": torch.tensor(1.5)}
        return PackedProjection(tensors, numbers.float() * scale)
    blocks = -(-outs // block[0]), -(-ins // block[1])
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, blocks)).float()
    wide = scales.repeat_interleave(block[0], 0)[:outs].repeat_interleave(block[1], 1)[:, :ins]
    return PackedProjection({"weight": numbers, name: scales}, numbers.float() * wide)


_COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}


def _group_of(bits: int, kind: str = "int") -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits, "type": kind}, "targets": ["Linear"]}}}


Packer = Callable[[np.random.Generator, int, int], PackedProjection]
# name: what config.json says, and how a projection [out, in] is packed.
LAYOUTS: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
    "gptq, ordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda *a: gptq(*a, ordered=True),
    ),
    "gptq v2, 8 bits, one group": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        lambda rng, outs, ins: gptq(rng, outs, ins, bits=8, group=ins, less=0),
    ),
    "gptq, 2 bits": (
        {"quant_method": "gptq", "bits": 2, "group_size": 16},
        lambda *a: gptq(*a, bits=2, group=16),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "compressed": (_COMPRESSED | {"format": "pack-quantized"} | _group_of(4), compressed),
    "compressed, zero points": (
        _COMPRESSED | {"format": "pack-quantized"} | _group_of(4),
        lambda *a: compressed(*a, zero=True),
    ),
    "compressed, 8 bits, ordered": (
        _COMPRESSED | {"format": "pack-quantized"} | _group_of(8),
        lambda *a: compressed(*a, bits=8, ordered=True),
    ),
    "compressed, int8": (_COMPRESSED | {"format": "int-quantized"} | _group_of(8), eight_bits),
    "compressed, int8, zero points": (
        _COMPRESSED | {"format": "int-quantized"} | _group_of(8),
        lambda *a: eight_bits(*a, zero=True),
    ),
    "compressed, int8, one scale": (
        _COMPRESSED | {"format": "int-quantized"} | _group_of(8),
        lambda *a: eight_bits(*a, rows=False),
    ),
    "compressed, fp8": (
        _COMPRESSED | {"format": "float-quantized"} | _group_of(8, "float"),
        lambda *a: fp8(*a, inverse=False),
    ),
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"}, fp8),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]},
        lambda *a: fp8(*a, block=(48, 40)),
    ),
}


def packed_pair(root: Path, source: Path, layout: str, is_packed: Callable[[str, Tensor], bool]) -> tuple[Path, Path]:
    """Two folders below `root`, which are that of a model but for the weights that `is_packed` names: one with these
    packed, and one with the numbers that they then are."""
    about, pack = LAYOUTS[layout]
    plain = load_file(source / "model.safetensors")
    packed, rng = dict(plain), np.random.default_rng(0)
    for name in [name for name, tensor in plain.items() if is_packed(name, tensor)]:
        outs, ins = plain[name].shape
        made = pack(rng, outs, ins)
        base = name.removesuffix("weight")
        del packed[name]
        packed |= {base + part: tensor for part, tensor in made.tensors.items()}
        plain[name] = made.weight
    found = []
    for kind, tensors in (("packed", packed), ("plain", plain)):
        fields = {"quantization_config": about} if kind == "packed" else {}
        folder = edited_folder(root / kind, source, **fields)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        found.append(folder)
    return found[0], found[1]

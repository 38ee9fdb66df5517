"""How the weights of a quantized folder are packed, by its config.json."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chairlift.errors import UnsupportedModel

Layout = Literal["gptq", "awq", "fp8", "compressed"]
# Of compressed-tensors, the formats whose tensors say by themselves what is in them.
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
# What a packed projection may have beside its numbers, which says how these are unpacked, or how inputs were rounded.
UNPACKED_BY = (
    *("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"),
    *("weight_shape", "input_scale", "input_zero_point", "activation_scale"),
)
# Two names of one type.
_E4M3 = ("e4m3", "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The layout of packed projections, whose tensors are described in `runners/quantized_weights.py`.

    `bits` of a number, and how many of one output share a scale: `group` (None: all). `zero_offset` is added to zero
    points. `block` is the shape of what shares a scale in fp8. Of the last three what a layout does not need is unset.
    """

    layout: Layout
    bits: int = 4
    group: int | None = None
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def parse_quantization(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """Read `quantization_config` of a parsed config.json, None if there is none.

    Raises UnsupportedModel naming the field that asks for something that is not read.
    """
    given = raw.get("quantization_config") or raw.get("compression_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "gptq":
        return _gptq(given)
    if method == "awq":
        return _awq(given)
    if method == "fp8":
        return _fp8(given)
    if method == "compressed-tensors":
        return _compressed(given)
    raise UnsupportedModel(f"quantization_config: quant_method {method!r} is not read; these are: {', '.join(READ)}")


READ = ("awq", "compressed-tensors", "fp8", "gptq")


def _refuse(given: Mapping[str, Any], **neutral: Any) -> None:
    for name, value in neutral.items():
        if given.get(name) not in (None, value):
            raise UnsupportedModel(f"quantization_config: {name}={given[name]!r} is not read")


def _object(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = given.get(name)
    if not isinstance(found, dict | None):
        raise UnsupportedModel(f"quantization_config: {name} must be an object, got {reprlib.repr(found)}")
    return found or {}


def _bits(given: Mapping[str, Any], *known: int) -> int:
    bits = given.get("bits", given.get("w_bit", 4))
    if isinstance(bits, bool) or bits not in known:
        raise UnsupportedModel(f"quantization_config: bits={bits!r} is not read; {' and '.join(map(str, known))} are")
    return int(bits)


def _group(given: Mapping[str, Any]) -> int | None:
    size = given.get("group_size", given.get("q_group_size", 128))
    if size in (-1, None):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= 2**20:
        raise UnsupportedModel(f"quantization_config: group_size must be a whole number above zero or -1, got {size!r}")
    return size


def _gptq(given: Mapping[str, Any]) -> QuantizationConfig:
    _refuse(given, dynamic={})
    form = given.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(f"quantization_config: checkpoint_format {form!r} is not read; gptq and gptq_v2 are")
    # The first version holds zero points less one.
    return QuantizationConfig("gptq", _bits(given, 2, 4, 8), _group(given), 1 if form == "gptq" else 0)


def _awq(given: Mapping[str, Any]) -> QuantizationConfig:
    version = given.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise UnsupportedModel(f"quantization_config: version {version!r} of awq is not read; gemm is")
    return QuantizationConfig("awq", _bits(given, 4), _group(given))


def _fp8(given: Mapping[str, Any]) -> QuantizationConfig:
    if given.get("fmt") not in (None, *_E4M3):
        raise UnsupportedModel(f"quantization_config: fmt={given['fmt']!r} is not read")
    return QuantizationConfig("fp8", 8, block=_block(given, "weight_block_size"))


def _block(given: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    block = given.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise UnsupportedModel(f"quantization_config: {name} must be two whole numbers, got {block!r}")
    return block[0], block[1]


def _compressed(given: Mapping[str, Any]) -> QuantizationConfig:
    _refuse(given, kv_cache_scheme={}, transform_config={})
    form, sparsity = given.get("format", "dense"), _object(given, "sparsity_config")
    if form not in _COMPRESSED:
        raise UnsupportedModel(f"quantization_config: format {form!r} is not read; these are: {', '.join(_COMPRESSED)}")
    if sparsity.get("format", "dense") != "dense":
        raise UnsupportedModel(f"quantization_config: sparsity_config's format {sparsity['format']!r} is not read")
    bits, blocks = set(), set()
    groups = _object(given, "config_groups")
    for name in groups:
        weights = _object(_object(groups, name), "weights")
        kind, count = weights.get("type", "int"), weights.get("num_bits", 8)
        if (kind, count) not in (("int", 4), ("int", 8), ("float", 8)):
            raise UnsupportedModel(f"quantization_config: weights of {count!r} bits of type {kind!r} are not read")
        bits.add(count)
        blocks.add(_block(weights, "block_structure"))
    if len(blocks) > 1:
        raise UnsupportedModel("quantization_config: more than one block_structure is not read")
    return QuantizationConfig("compressed", min(bits, default=8), block=blocks.pop() if blocks else None)

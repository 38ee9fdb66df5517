"""The library of native kernels, and its structures as ctypes sees them (native/kernels.h)."""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import ConfigError, StaleLibrary
from chairlift.ops.activation import Activation
from chairlift.ops.base import HeadShape
from chairlift.ops.formats import FORMATS, WeightFormat
from chairlift.ops.rotation import RotaryTable

LIBRARY = Path(__file__).with_name("_native.so")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ACTIVATIONS: dict[Activation, int] = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3, "swiglu_clamped": 4}
_REBUILD = "rebuild it: pip install -e . (in a checkout: python setup.py build_ext --inplace)"

POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
SIDE_WORK = ctypes.CFUNCTYPE(INT32)


class FieldStruct(ctypes.Structure):
    """One field of a structure as the library has it; without a name, the structure as a whole."""

    _fields_ = [
        *[(name, ctypes.c_char_p) for name in ("structure", "name")],
        *[(name, INT64) for name in ("offset", "size", "alignment")],
    ]


class HeadsStruct(ctypes.Structure):
    """Attention heads of one layer."""

    _fields_ = [
        *[(name, INT32) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "window", "both_ways")],
        ("scale", FLOAT),
        ("cap", FLOAT),
        ("cache_dtype", INT32),
        ("slopes", ctypes.POINTER(FLOAT)),
    ]


class FormatInfoStruct(ctypes.Structure):
    """What the kernels know of a format; `path` is null where they do not multiply it."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        *[(name, INT32) for name in ("bits", "inputs", "block_inputs", "block_bytes", "scaled", "compensated")],
        ("path", ctypes.c_char_p),
    ]


class WeightStruct(ctypes.Structure):
    """A packed weight."""

    _fields_ = [
        *[(name, POINTER) for name in ("packed", "bias", "scales", "compensation")],
        *[(name, INT64) for name in ("out_features", "in_features")],
        *[(name, INT32) for name in ("format", "gated", "activation")],
    ]


class StateSpansStruct(ctypes.Structure):
    """Through which states a step's tokens go."""

    _fields_ = [
        *((name, POINTER) for name in ("rows", "starts", "first_cut", "cut_after", "cut_rows")),
        ("count", INT64),
    ]


class StatesStruct(ctypes.Structure):
    """Where one layer's states lie."""

    _fields_ = [("base", POINTER), ("stride", INT64)]


class ConvolutionStruct(ctypes.Structure):
    """A causal convolution of each channel by itself."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "weight", "bias", "out")),
        ("state", StatesStruct),
        *((name, INT64) for name in ("x_stride", "channels", "taps")),
        ("silu", INT32),
    ]


class DeltaRuleStruct(ctypes.Structure):
    """The gated delta rule."""

    _fields_ = [
        *((name, POINTER) for name in ("q", "k", "v", "decay", "beta", "out")),
        ("state", StatesStruct),
        *((name, INT64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, INT64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        ("unit", INT32),
    ]


class Mamba2Struct(ctypes.Structure):
    """Mamba 2."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "b", "c", "dt", "a", "d", "out")),
        ("state", StatesStruct),
        *((name, INT64) for name in ("x_stride", "b_stride", "c_stride")),
        *((name, INT64) for name in ("heads", "groups", "head_dim", "state_dim")),
    ]


class NormStruct(ctypes.Structure):
    """A norm's weight."""

    _fields_ = [("weight", POINTER), ("dtype", INT32)]

    @classmethod
    def of(cls, weight: Tensor | None) -> "NormStruct":
        """Point to a weight, which the caller keeps, or to none."""
        return cls() if weight is None else cls(weight.data_ptr(), DTYPES[weight.dtype])


class DeltaNetStruct(ctypes.Structure):
    """A layer with the gated delta rule."""

    _fields_ = [
        ("convolution", ConvolutionStruct),
        ("rule", DeltaRuleStruct),
        *((name, POINTER) for name in ("decay", "step_bias")),
        ("norm", NormStruct),
    ]


class MambaMixerStruct(ctypes.Structure):
    """A layer with Mamba 2."""

    _fields_ = [
        ("convolution", ConvolutionStruct),
        ("scan", Mamba2Struct),
        ("step_bias", POINTER),
        ("norm", NormStruct),
        ("least_step", FLOAT),
        ("most_step", FLOAT),
    ]


class HeadNormsStruct(ctypes.Structure):
    """Norms of queries and keys."""

    _fields_ = [("q", NormStruct), ("k", NormStruct), ("together", INT32), ("eps", FLOAT)]

    @classmethod
    def of(cls, q_norm: Tensor | None, k_norm: Tensor | None, heads: HeadShape, eps: float) -> "HeadNormsStruct":
        """Describe what `Ops.rope_and_write` takes."""
        sizes = {norm.shape[0] for norm in (q_norm, k_norm) if norm is not None}
        return cls(NormStruct.of(q_norm), NormStruct.of(k_norm), sizes != {heads.head_dim}, eps)


class ExpertsStruct(ctypes.Structure):
    """An MLP of which each token uses a part."""

    _fields_ = [
        *[(name, POINTER) for name in ("router", "router_bias", "choice_bias")],
        ("gate_up", ctypes.POINTER(WeightStruct)),
        ("down", ctypes.POINTER(WeightStruct)),
        ("shared_gate_up", WeightStruct),
        ("shared_down", WeightStruct),
        *[(name, INT32) for name in ("count", "chosen", "sigmoid", "renormalized", "shared_gated")],
        *[(name, INT32) for name in ("groups", "groups_chosen", "group_best")],
        ("least_sum", FLOAT),
        ("scale", FLOAT),
    ]


class LatentStruct(ctypes.Structure):
    """Attention over one head of keys and values that those of all heads are made of."""

    _fields_ = [
        ("first", WeightStruct),
        ("query", WeightStruct),
        ("query_norm", NormStruct),
        ("norm", NormStruct),
        ("key_up", ctypes.POINTER(WeightStruct)),
        ("value_up", ctypes.POINTER(WeightStruct)),
        *[(name, INT32) for name in ("rank", "plain", "rotated", "value")],
        ("eps", FLOAT),
    ]


class RotaryTableStruct(ctypes.Structure):
    """How queries and keys are turned at each position."""

    _fields_ = [("cos_sin", POINTER), ("query_factors", POINTER)]

    @classmethod
    def of(cls, rotation: RotaryTable) -> "RotaryTableStruct":
        """Point to tables, which the caller keeps."""
        factors = rotation.query_factors
        return cls(rotation.cos_sin.data_ptr(), None if factors is None else factors.data_ptr())


class DecoderLayerStruct(ctypes.Structure):
    """One layer's norms, weights and cache."""

    _fields_ = [
        *[
            (name, NormStruct)
            for name in ("attention_pre_norm", "attention_post_norm", "mlp_pre_norm", "mlp_post_norm")
        ],
        ("head_norms", HeadNormsStruct),
        *[(name, WeightStruct) for name in ("qkv", "out", "gate_up", "down")],
        ("experts", ctypes.POINTER(ExpertsStruct)),
        ("latent", ctypes.POINTER(LatentStruct)),
        ("convolution", ctypes.POINTER(ConvolutionStruct)),
        ("delta", ctypes.POINTER(DeltaNetStruct)),
        ("mamba", ctypes.POINTER(MambaMixerStruct)),
        *[(name, POINTER) for name in ("sinks", "k_cache", "v_cache")],
        ("rotation", RotaryTableStruct),
        ("window", INT32),
        ("gated", INT32),
        ("parallel", INT32),
    ]


class DecoderStruct(ctypes.Structure):
    """A whole decoder."""

    _fields_ = [
        ("layers", ctypes.POINTER(DecoderLayerStruct)),
        ("num_layers", INT64),
        ("hidden_size", INT64),
        ("norm", NormStruct),
        ("embedding", POINTER),
        ("positions", POINTER),
        ("head", WeightStruct),
        ("heads", HeadsStruct),
        ("eps", FLOAT),
        ("embedding_scale", FLOAT),
        ("dtype", INT32),
    ]


class BatchStruct(ctypes.Structure):
    """Where the sequences of a step lie."""

    _fields_ = [
        *[(name, POINTER) for name in ("query_start", "context_len", "block_tables")],
        ("table_stride", INT64),
        ("num_seqs", INT32),
    ]


class PassStruct(ctypes.Structure):
    """The tokens of a step."""

    _fields_ = [
        *[(name, POINTER) for name in ("token_ids", "positions", "slots", "logit_rows")],
        *[(name, INT64) for name in ("num_tokens", "num_logits")],
        ("batch", BatchStruct),
        ("states", ctypes.POINTER(StateSpansStruct)),
        ("side_work", SIDE_WORK),
    ]


class LayerNormStruct(ctypes.Structure):
    """Weight and bias of a layer norm."""

    _fields_ = [("weight", POINTER), ("bias", POINTER)]


class EncoderLayerStruct(ctypes.Structure):
    """One layer's norms and weights."""

    _fields_ = [
        *[(name, LayerNormStruct) for name in ("attention_norm", "mlp_norm")],
        *[(name, WeightStruct) for name in ("qkv", "out", "up", "down")],
        ("cos_sin", POINTER),
        ("window", INT32),
    ]


class EncoderStruct(ctypes.Structure):
    """A whole encoder."""

    _fields_ = [
        ("layers", ctypes.POINTER(EncoderLayerStruct)),
        ("num_layers", INT64),
        ("hidden_size", INT64),
        *[(name, POINTER) for name in ("words", "positions", "types")],
        ("first_position", INT64),
        *[(name, LayerNormStruct) for name in ("embedding_norm", "final_norm")],
        ("bias", POINTER),
        ("bias_span", INT64),
        *[(name, INT32) for name in ("num_heads", "activation", "pre_norm", "rms", "dtype")],
        ("eps", FLOAT),
    ]


class TextsStruct(ctypes.Structure):
    """The texts of a batch, and what is wanted of them."""

    _fields_ = [*[(name, POINTER) for name in ("token_ids", "type_ids", "starts")], ("count", INT64), ("output", INT32)]


class DrawsStruct(ctypes.Structure):
    """How tokens are to be drawn."""

    _fields_ = [*[(name, POINTER) for name in ("temperature", "min_p", "top_p", "top_k", "uniform")], ("count", INT64)]


class StatusStruct(ctypes.Structure):
    """What a call comes to."""

    _fields_ = [("out_of_memory", INT32)]


# All that both sides read and write.
STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    HeadsStruct,
    BatchStruct,
    FormatInfoStruct,
    WeightStruct,
    NormStruct,
    HeadNormsStruct,
    ExpertsStruct,
    LatentStruct,
    RotaryTableStruct,
    DecoderLayerStruct,
    DecoderStruct,
    PassStruct,
    LayerNormStruct,
    EncoderLayerStruct,
    EncoderStruct,
    TextsStruct,
    DrawsStruct,
    StatusStruct,
    StateSpansStruct,
    StatesStruct,
    ConvolutionStruct,
    DeltaRuleStruct,
    Mamba2Struct,
    DeltaNetStruct,
    MambaMixerStruct,
)

# What functions take that return a status.
_SIGNATURES = {
    "chairlift_rms_norm": [*[POINTER] * 3, INT32, POINTER, INT64, INT64, FLOAT, INT32],
    "chairlift_gate": [POINTER, POINTER, INT64, INT64, INT32, INT32],
    "chairlift_rope_and_write": [*[POINTER] * 8, INT64, POINTER, INT32],
    "chairlift_attention": [*[POINTER] * 7, INT64, INT32, POINTER, POINTER, INT32],
    "chairlift_pack": [POINTER, POINTER, POINTER, INT32],
    "chairlift_linear": [POINTER, INT64, POINTER, POINTER, INT32, INT32],
    "chairlift_best": [POINTER, INT64, POINTER, POINTER, INT64, POINTER, POINTER, INT32],
    "chairlift_embed": [POINTER, INT64, POINTER, POINTER, INT32],
    "chairlift_decode": [POINTER, POINTER, POINTER],
    "chairlift_add_mlp": [POINTER, POINTER, POINTER, INT64],
    "chairlift_encode": [POINTER, POINTER, POINTER],
    "chairlift_draw": [POINTER, INT64, INT64, POINTER, POINTER],
    "chairlift_highest": [POINTER, INT64, INT64, POINTER, POINTER],
    **{f"chairlift_{name}": [POINTER, POINTER, INT32] for name in ("causal_conv", "gated_delta", "mamba2")},
    "chairlift_exclude_tokens": [POINTER, INT64, INT64, POINTER],
}
# What others return, and take.
_RETURNING: dict[str, tuple[Any, list[Any]]] = {
    "chairlift_add_pauses": (INT32, [INT32, POINTER, POINTER, POINTER]),
    "chairlift_count_pauses": (INT64, []),
    **{f"chairlift_{name}": (None, [INT32]) for name in ("remove_pauses", "begin_pauses", "end_work")},
    "chairlift_begin_work": (None, [INT32, INT64]),
    "chairlift_end_supply": (None, [POINTER]),
    "chairlift_begin_supply": (POINTER, [POINTER, POINTER, INT64, INT64, INT64, INT64, POINTER]),
    "chairlift_supply": (INT64, [POINTER, INT64]),
    "chairlift_unpack_blocks": (INT32, [INT32, POINTER, INT64, POINTER]),
    "chairlift_faster": (ctypes.c_char_p, [ctypes.c_char_p, ctypes.c_char_p]),
    "chairlift_select": (ctypes.c_char_p, [ctypes.c_char_p]),
    "chairlift_format": (ctypes.POINTER(FormatInfoStruct), [INT32]),
    "chairlift_layout": (INT64, [ctypes.POINTER(ctypes.POINTER(FieldStruct))]),
}


def load_library(path: Path = LIBRARY) -> tuple[ctypes.CDLL, str]:
    """Load the kernels; return them and the name of the instruction set that they will use.

    Where a processor multiplies bfloat16 by AVX-512, that or float32 arithmetic is taken, whichever is faster here.
    CHAIRLIFT_ISA (amx, avx512bf16, avx512vnni, avx512, avxvnni, avx2 or baseline) overrides the choice. Raises OSError
    if there is no library, ConfigError if CHAIRLIFT_ISA names kernels that were not built or cannot run on this
    processor, and StaleLibrary if the library was built from other sources than this code.
    """
    library = ctypes.CDLL(str(path))
    try:
        _declare(library)
    except AttributeError as error:
        raise StaleLibrary(f"{path} was built from other sources: {error}; {_REBUILD}") from error
    check_layout(library, STRUCTURES)
    wanted = os.environ.get("CHAIRLIFT_ISA")
    isa = library.chairlift_select(wanted.encode() if wanted else None)
    if isa == b"avx512bf16" and not wanted:
        isa = library.chairlift_select(_faster(library, b"avx512bf16", b"avx512vnni"))
    if isa is None:
        raise ConfigError(f"CHAIRLIFT_ISA={wanted!r}: no such kernels on this machine; unset it to take the fastest")
    check_formats(library)
    return library, isa.decode()


@cache
def find_library() -> ctypes.CDLL | None:
    """Return the library, for what can do without it where it is not built or does not fit."""
    try:
        return load_library()[0]
    except (OSError, ConfigError, StaleLibrary):
        return None


# What was measured, by the names of both: once for a process.
_measured: dict[tuple[bytes, bytes], bytes] = {}


def _faster(library: ctypes.CDLL, first: bytes, second: bytes) -> bytes:
    """Which of two sets of kernels multiplies bfloat16 faster on this processor; takes some milliseconds."""
    if (first, second) not in _measured:
        _measured[first, second] = library.chairlift_faster(first, second) or first
    return _measured[first, second]


def _declare(library: ctypes.CDLL) -> None:
    """Say what the functions take and return. Raises AttributeError if the library lacks one."""
    functions = {name: (StatusStruct, arguments) for name, arguments in _SIGNATURES.items()} | _RETURNING
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
        if result is StatusStruct:
            function.errcheck = _check_status


def _check_status(status: StatusStruct, *_: Any) -> None:
    """Raise MemoryError where memory was refused to a call, which then has made nothing."""
    if status.out_of_memory:
        raise MemoryError("the native kernels were refused memory")


def check_layout(library: ctypes.CDLL, structures: Sequence[type[ctypes.Structure]]) -> None:
    """Raise StaleLibrary unless these have the sizes, and fields at the offsets, that the library was built with."""
    fields = ctypes.POINTER(FieldStruct)()
    count = library.chairlift_layout(ctypes.byref(fields))
    sizes: dict[str, int] = {}
    built: dict[str, dict[str, tuple[int, int]]] = {}
    for field in fields[:count]:
        structure = field.structure.decode()
        if field.name is None:
            sizes[structure], built[structure] = field.size, {}
        else:
            built[structure][field.name.decode()] = field.offset, field.size
    for mirror in structures:
        name = mirror.__name__.removesuffix("Struct")
        expected = {field: _place(mirror, field) for field, *_ in mirror._fields_}
        for field in expected | built.get(name, {}):
            found = built.get(name, {}).get(field)
            if found != expected.get(field):
                raise StaleLibrary(f"structure {name}: {field} {_differs(expected.get(field), found)}; {_REBUILD}")
        if sizes[name] != ctypes.sizeof(mirror):
            raise StaleLibrary(f"structure {name}: {sizes[name]} bytes, not {ctypes.sizeof(mirror)}; {_REBUILD}")


def _place(mirror: type[ctypes.Structure], field: str) -> tuple[int, int]:
    descriptor = getattr(mirror, field)
    return descriptor.offset, descriptor.size


def _differs(expected: tuple[int, int] | None, found: tuple[int, int] | None) -> str:
    if found is None:
        return "is missing from the native library"
    if expected is None:
        return "is in the native library alone"
    return f"is {found[1]} bytes at offset {found[0]} in the native library, not {expected[1]} at {expected[0]}"


def check_formats(library: ctypes.CDLL) -> None:
    """Raise StaleLibrary unless the library has the weight formats of the table, each as it is there."""
    for each in FORMATS.values():
        found = library.chairlift_format(each.id)
        info = found.contents if found else FormatInfoStruct()
        block = info.block_inputs, info.block_bytes
        has = (info.name, info.bits, info.inputs, block, bool(info.scaled), bool(info.compensated))
        if has != (each.name.encode(), each.bits, each.inputs, each.block, each.scaled, each.compensated):
            raise StaleLibrary(f"weight format {each.name} is another one in the native library; {_REBUILD}")


def product_path(library: ctypes.CDLL, weight_format: WeightFormat) -> str | None:
    """Name the instructions that the selected kernels multiply a format with; None where they leave it to others."""
    path: bytes | None = library.chairlift_format(weight_format.id).contents.path
    return None if path is None else path.decode()

"""The library of native kernels, and its structures as ctypes sees them (native/kernels.h)."""

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.ops.activation import Activation
from chairlift.ops.base import HeadShape

LIBRARY = Path(__file__).with_name("_native.so")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ACTIVATIONS: dict[Activation, int] = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}

POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Heads(ctypes.Structure):
    """Attention heads of one layer."""

    _fields_ = [
        ("num_heads", INT32),
        ("num_kv_heads", INT32),
        ("head_dim", INT32),
        ("block_size", INT32),
        ("window", INT32),
        ("scale", FLOAT),
        ("cache_dtype", INT32),
    ]


class Weight(ctypes.Structure):
    """A packed weight."""

    _fields_ = [
        ("packed", POINTER),
        ("bias", POINTER),
        ("scales", POINTER),
        ("starts", POINTER),
        ("outs", INT64),
        ("ins", INT64),
        ("int8", INT32),
        ("gated", INT32),
        ("activation", INT32),
    ]


class Norm(ctypes.Structure):
    """A norm's weight."""

    _fields_ = [("weight", POINTER), ("dtype", INT32)]

    @classmethod
    def of(cls, weight: Tensor | None) -> "Norm":
        """Point to a weight, which the caller keeps, or to none."""
        return cls() if weight is None else cls(weight.data_ptr(), DTYPES[weight.dtype])


class HeadNorms(ctypes.Structure):
    """Norms of queries and keys."""

    _fields_ = [("q", Norm), ("k", Norm), ("together", INT32), ("eps", FLOAT)]

    @classmethod
    def of(cls, q_norm: Tensor | None, k_norm: Tensor | None, heads: HeadShape, eps: float) -> "HeadNorms":
        """Describe what `Ops.rope_and_write` takes."""
        sizes = {norm.shape[0] for norm in (q_norm, k_norm) if norm is not None}
        return cls(Norm.of(q_norm), Norm.of(k_norm), sizes != {heads.head_dim}, eps)


class DecoderLayer(ctypes.Structure):
    """One layer's norms, weights and cache."""

    _fields_ = [
        *[(name, Norm) for name in ("attention_pre_norm", "attention_post_norm", "mlp_pre_norm", "mlp_post_norm")],
        ("head_norms", HeadNorms),
        *[(name, Weight) for name in ("qkv", "out", "gate_up", "down")],
        ("k_cache", POINTER),
        ("v_cache", POINTER),
        ("cos_sin", POINTER),
        ("window", INT32),
    ]


class Decoder(ctypes.Structure):
    """A whole decoder."""

    _fields_ = [
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("num_layers", INT64),
        ("hidden_size", INT64),
        ("norm", Norm),
        ("embedding", POINTER),
        ("head", Weight),
        ("heads", Heads),
        ("eps", FLOAT),
        ("embedding_scale", FLOAT),
        ("dtype", INT32),
    ]


class Batch(ctypes.Structure):
    """Where the sequences of a step lie."""

    _fields_ = [
        *[(name, POINTER) for name in ("query_start", "context_len", "block_tables")],
        ("table_stride", INT64),
        ("num_seqs", INT32),
    ]


class Pass(ctypes.Structure):
    """The tokens of a step."""

    _fields_ = [
        *[(name, POINTER) for name in ("token_ids", "positions", "slots", "logit_rows")],
        ("num_tokens", INT64),
        ("num_logits", INT64),
        ("batch", Batch),
    ]


class LayerNorm(ctypes.Structure):
    """Weight and bias of a layer norm."""

    _fields_ = [("weight", POINTER), ("bias", POINTER)]


class EncoderLayer(ctypes.Structure):
    """One layer's norms and weights."""

    _fields_ = [
        *[(name, LayerNorm) for name in ("attention_norm", "mlp_norm")],
        *[(name, Weight) for name in ("qkv", "out", "up", "down")],
        ("cos_sin", POINTER),
        ("window", INT32),
    ]


class Encoder(ctypes.Structure):
    """A whole encoder."""

    _fields_ = [
        ("layers", ctypes.POINTER(EncoderLayer)),
        ("num_layers", INT64),
        ("hidden_size", INT64),
        *[(name, POINTER) for name in ("words", "positions", "types")],
        ("first_position", INT64),
        *[(name, LayerNorm) for name in ("embedding_norm", "final_norm")],
        ("bias", POINTER),
        ("bias_span", INT64),
        *[(name, INT32) for name in ("num_heads", "activation", "pre_norm", "dtype")],
        ("eps", FLOAT),
    ]


class Texts(ctypes.Structure):
    """The texts of a batch, and what is wanted of them."""

    _fields_ = [*[(name, POINTER) for name in ("token_ids", "type_ids", "starts")], ("count", INT64), ("output", INT32)]


class Draws(ctypes.Structure):
    """How tokens are to be drawn."""

    _fields_ = [(name, POINTER) for name in ("temperature", "min_p", "top_p", "top_k", "uniform")]


_SIGNATURES = {
    "chairlift_rms_norm": [*[POINTER] * 3, INT32, POINTER, INT64, INT64, FLOAT, INT32],
    "chairlift_gate": [POINTER, POINTER, INT64, INT64, INT32, INT32],
    "chairlift_rope_and_write": [*[POINTER] * 8, INT64, POINTER, INT32],
    "chairlift_attention": [*[POINTER] * 7, INT64, INT32, POINTER, INT32],
    "chairlift_pack": [POINTER, POINTER, POINTER, INT32],
    "chairlift_linear": [POINTER, INT64, POINTER, POINTER, INT32, INT32],
    "chairlift_best": [POINTER, INT64, POINTER, POINTER, POINTER, INT32],
    "chairlift_embed": [POINTER, INT64, POINTER, POINTER, INT32],
    "chairlift_decode": [POINTER, POINTER, POINTER],
    "chairlift_encode": [POINTER, POINTER, POINTER],
    "chairlift_draw": [POINTER, INT64, INT64, POINTER, POINTER],
}


def load_library(path: Path = LIBRARY) -> tuple[ctypes.CDLL, str]:
    """Load the kernels; return them and the name of the instruction set that they will use.

    CHAIRLIFT_ISA (avx512bf16, avx512vnni, avx512, avx2 or baseline) overrides the choice. Raises OSError if there is no
    library and ConfigError if CHAIRLIFT_ISA names kernels that were not built or cannot run on this processor.
    """
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.chairlift_select.argtypes = [ctypes.c_char_p]
    library.chairlift_select.restype = ctypes.c_char_p
    library.chairlift_int8_path.restype = ctypes.c_char_p
    wanted = os.environ.get("CHAIRLIFT_ISA")
    isa = library.chairlift_select(wanted.encode() if wanted else None)
    if isa is None:
        raise ConfigError(f"CHAIRLIFT_ISA={wanted!r}: no such kernels on this machine; unset it to take the fastest")
    return library, isa.decode()


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take up memory once touched, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype)
    return torch.frombuffer(_arena.take(size * dtype.itemsize), dtype=dtype)


class _Arena:
    """Huge pages, shared by whoever asks one after the other: most weights of a small model are smaller than a page.

    With small pages nearly every jump of attention from block to block misses the TLB, and a product's stream of
    weights misses it at every page. A piece of memory lives as long as anything in it does.
    """

    PAGE = 2 * 2**20
    PIECE = 16 * PAGE

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """Return `size` zero bytes, aligned to 64."""
        with self._lock:
            if size > len(self._rest):
                if size > self.PIECE // 4:
                    return self._map(size)[:size]
                self._rest = self._map(self.PIECE)
            taken, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
            return taken

    def _map(self, size: int) -> memoryview:
        """At least `size` bytes that begin with a huge page."""
        whole = -(-size // self.PAGE) * self.PAGE
        memory = mmap.mmap(-1, whole + self.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % self.PAGE
        return memoryview(memory)[start : start + whole]


_arena = _Arena()

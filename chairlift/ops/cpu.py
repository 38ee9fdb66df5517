"""The fast operations of the CPU: oneDNN on weights packed once, and native kernels for everything around them.

The kernels are a C library, built from native/ for several instruction sets and loaded with ctypes; see
docs/decisions/001-native-kernels.md.
"""

import contextlib
import ctypes
import math
import mmap
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.ops.base import AttentionBatch, HeadShape, KVCache, Linear

LIBRARY = Path(__file__).with_name("_native.so")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256
# Loads of K and V may run this many bytes past their end.
_SLACK = 64
_INT8 = 2

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Heads(ctypes.Structure):
    _fields_ = [
        ("num_heads", _INT32),
        ("num_kv_heads", _INT32),
        ("head_dim", _INT32),
        ("block_size", _INT32),
        ("window", _INT32),
        ("scale", _FLOAT),
        ("cache_dtype", _INT32),
    ]


_SIGNATURES = {
    "chairlift_rms_norm": [*[_POINTER] * 4, _INT64, _INT64, _FLOAT, _INT32],
    "chairlift_silu_mul": [_POINTER, _POINTER, _INT64, _INT64, _INT32],
    "chairlift_rope_and_write": [*[_POINTER] * 9, _FLOAT, _INT64, _POINTER, _INT32],
    "chairlift_attention": [*[_POINTER] * 7, _INT64, _INT32, _POINTER, _INT32],
    "chairlift_pack": [_POINTER, _POINTER, _INT64, _INT64],
    "chairlift_linear": [*[_POINTER] * 4, _INT64, _INT64, _INT64],
}
# Outputs whose weights lie together when packed: see native/gemm.h.
_PANEL = 32


def load_library(path: Path = LIBRARY) -> tuple[ctypes.CDLL, str]:
    """Load the kernels; return them and the name of the instruction set that they will use.

    CHAIRLIFT_ISA (avx512bf16, avx512, avx2 or baseline) overrides the choice. Raises OSError if there is no library and
    ConfigError if CHAIRLIFT_ISA names kernels that were not built or cannot run on this processor.
    """
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.chairlift_select.argtypes = [ctypes.c_char_p]
    library.chairlift_select.restype = ctypes.c_char_p
    wanted = os.environ.get("CHAIRLIFT_ISA")
    isa = library.chairlift_select(wanted.encode() if wanted else None)
    if isa is None:
        raise ConfigError(f"CHAIRLIFT_ISA={wanted!r}: no such kernels on this machine; unset it to take the fastest")
    return library, isa.decode()


class CpuOps:
    """`Ops` on the CPU for one dtype, float32 or bfloat16. Tensors must be contiguous, on the CPU and of that dtype.

    One layer's K and V are [num_blocks, num_kv_heads, ...] each; native/kernels.h has the rest of the layout. Those of
    an int8 cache are followed by views of their scales, [num_blocks, num_kv_heads, block_size], in the same memory.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Load the kernels. Raises OSError and ConfigError as `load_library` does."""
        library, isa = load_library()
        self.name = f"native-{isa}"
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._rms_norm = library.chairlift_rms_norm
        self._silu_mul = library.chairlift_silu_mul
        self._rope_and_write = library.chairlift_rope_and_write
        self._attention = library.chairlift_attention
        self._pack = library.chairlift_pack
        self._linear = library.chairlift_linear
        self._has_linear = bool(library.chairlift_has_linear())
        self._heads: dict[tuple[HeadShape, int, torch.dtype], tuple[_Heads, int]] = {}

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return x [T, in] -> [T, out] for weight [out, in] and bias [out].

        The weight is copied: packed for our own products where the processor has them (bfloat16 on AVX-512 BF16), else
        for oneDNN.
        """
        if self._has_linear and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
            return self._native_linear(weight.contiguous(), bias)
        if not _can_pack(weight.dtype):
            return lambda x: F.linear(x, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        run = torch.ops.mkldnn._linear_pointwise.default
        no_scalars: list[float] = []

        def apply(x: Tensor) -> Tensor:
            out: Tensor = run(x, packed, bias, "none", no_scalars, "")
            return out

        return apply

    def _native_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        outs, ins = weight.shape
        padded = -(-outs // _PANEL) * _PANEL
        packed = _zeros(padded * ins, torch.bfloat16)
        self._pack(weight.data_ptr(), packed.data_ptr(), outs, ins)
        padded_bias = None if bias is None else F.pad(bias.float(), (0, padded - outs))
        multiply, address = self._linear, packed.data_ptr()
        bias_address = None if padded_bias is None else padded_bias.data_ptr()

        # The defaults keep alive what the addresses point to.
        def apply(x: Tensor, _weight: Tensor = packed, _bias: Tensor | None = padded_bias) -> Tensor:
            rows = x.shape[0]
            out = torch.empty((rows, outs), dtype=torch.bfloat16)
            multiply(x.data_ptr(), address, bias_address, out.data_ptr(), rows, outs, ins)
            return out

        return apply

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] / rms(x) rounded to x's dtype, times weight [D]."""
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._rms_norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, eps, self._code)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x [T, D] into `residual` [T, D] in place and return rms_norm(residual) [T, D]."""
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps, self._code)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up [T, I]."""
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=self._dtype)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, self._code)
        return out

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """K and V of one layer. Raises ConfigError if the dtype or the head size is not one that the kernels know."""
        if dtype not in (self._dtype, torch.int8) or heads.head_dim % 8 or heads.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"ops = 'native' has no kernels for head_dim {heads.head_dim} in {dtype}; set ops = 'reference'"
            )
        dim, padded = heads.head_dim, -(-heads.head_dim // 16) * 16
        pair = 1 if dtype == torch.float32 else 2
        even = -(-block_size // pair) * pair
        lead = (num_blocks, heads.num_kv_heads)
        if dtype == torch.int8:
            k, k_scales = _scaled_pages((*lead, dim // pair, even, pair), block_size)
            v, v_scales = _scaled_pages((*lead, even // pair, padded, pair), block_size)
            return k[:, :, :, :block_size], v, k_scales, v_scales
        k_size, v_size = (num_blocks * heads.num_kv_heads * each * even for each in (dim, padded))
        k = _zeros(k_size + _SLACK // dtype.itemsize, dtype)[:k_size].view(*lead, dim // pair, even, pair)
        v = _zeros(v_size, dtype).view(*lead, even // pair, padded, pair)
        # The narrowed view tells the other operations the block size.
        return k[:, :, :, :block_size], v

    def rope_and_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        heads: HeadShape,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalize (if asked), rotate, write K and V to their slots; return q [T, Hq * D]."""
        k, v = cache[:2]
        tokens = qkv.shape[0]
        out = torch.empty((tokens, heads.num_heads * heads.head_dim), dtype=self._dtype)
        self._rope_and_write(
            qkv.data_ptr(),
            out.data_ptr(),
            cos_sin.data_ptr(),
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            tokens,
            self._heads_address(heads, k),
            self._code,
        )
        return out

    def attention(self, q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape) -> Tensor:
        """Attention of each token of q [T, Hq * D] over its sequence's cached tokens, up to itself: [T, Hq * D]."""
        k, v = cache[:2]
        out = torch.empty_like(q)
        tables = batch.block_tables
        self._attention(
            q.data_ptr(),
            out.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            batch.query_start.data_ptr(),
            batch.context_len.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            tables.shape[0],
            self._heads_address(heads, k),
            self._code,
        )
        return out

    def _heads_address(self, heads: HeadShape, k: Tensor) -> int:
        """Address of the C struct that describes `heads` over the cache `k`."""
        key = (heads, k.shape[3], k.dtype)
        found = self._heads.get(key)
        if found is None:
            sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, k.shape[3], heads.window or 0)
            struct = _Heads(*sizes, heads.scale, _INT8 if k.dtype == torch.int8 else self._code)
            found = self._heads[key] = struct, ctypes.addressof(struct)
        return found[1]


def _scaled_pages(shape: tuple[int, ...], block_size: int) -> tuple[Tensor, Tensor]:
    """Int8 pages of `shape` [num_blocks, num_kv_heads, ...], each followed by the float32 scales of its tokens."""
    blocks, heads, *rest = shape
    data = math.prod(rest)
    each = data + 4 * block_size
    memory = _zeros(blocks * heads * each + _SLACK, torch.int8)
    inner = [math.prod(rest[axis + 1 :]) for axis in range(len(rest))]
    pages = memory.as_strided(shape, (heads * each, each, *inner))
    scales = memory.view(torch.float32).as_strided(
        (blocks, heads, block_size), (heads * each // 4, each // 4, 1), data // 4
    )
    return pages, scales


def _zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take up memory once touched, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype)
    # Attention jumps from block to block, and with small pages nearly every jump misses the TLB.
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

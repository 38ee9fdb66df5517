"""The fast operations of the CPU: native kernels, and oneDNN for the products that those leave to it.

The kernels are a C library, built from native/ for several instruction sets and loaded with ctypes; see
docs/decisions/001-native-kernels.md.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.errors import ConfigError
from chairlift.ops import native
from chairlift.ops.activation import Activation, activate
from chairlift.ops.base import (
    AddMlp,
    Allowed,
    AttentionBatch,
    DecoderWeights,
    Draws,
    Forward,
    Head,
    HeadShape,
    KVCache,
    Linear,
    Mlp,
    Quantization,
)
from chairlift.ops.drawing import best_allowed
from chairlift.ops.encoder import EncoderForward, EncoderWeights, PlainEncoder
from chairlift.ops.formats import FORMATS, WeightFormat, narrowest
from chairlift.ops.fused import FusedDecoder, can_fuse
from chairlift.ops.fused_encoder import FusedEncoder, can_fuse_encoder
from chairlift.ops.fused_mlp import FusedMlp
from chairlift.ops.huge_pages import zeros
from chairlift.ops.kv_layout import has_kernels, padded_dim
from chairlift.ops.native import DTYPES, load_library, product_path
from chairlift.ops.native_heads import heads_struct
from chairlift.ops.packed import PackedWeight, addresses
from chairlift.ops.recurrence import NativeRecurrence
from chairlift.ops.reference import FollowedLinear, ReferenceLinear
from chairlift.ops.rotation import RotaryTable

# Loads of K and V may run this many bytes past their end.
_SLACK = 64
_NO_NORMS = native.HeadNormsStruct()


class PlainHead:
    """A last projection that is used as it is given: oneDNN would have to copy it. Implements `Head`."""

    num_candidates = 1

    def __init__(self, weight: Tensor) -> None:
        self.nbytes = weight.nbytes
        self._weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return hidden [R, in] -> [R, out]."""
        return functional.linear(hidden, self._weight)

    def best(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return the highest logit of each row, [R] float32, and its first token, [R], as `Head.best`."""
        # At once, since bfloat16 reductions are many times slower on a CPU than this conversion.
        return best_allowed(self.logits(hidden).float(), allowed)

    def candidates(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return what `best` does, [R, 1] both, as `Head.candidates`."""
        values, tokens = self.best(hidden, allowed)
        return values[:, None], tokens[:, None]

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the weight, [T, in], for ids [T]."""
        return functional.embedding(ids, self._weight)


def product_rows(rows: int) -> int:
    """How many rows a product of so many is computed with: at most a quarter more, and four numbers an octave.

    For every number of rows oneDNN makes a program of about half a megabyte, and keeps the last 1,024 of them.
    """
    step = 1 << max(rows.bit_length() - 3, 0)
    return -(-rows // step) * step


class OneDnnLinear:
    """A weight that oneDNN has packed. Implements `Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._no_scalars: list[float] = []
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        rows = len(x)
        added = product_rows(rows) - rows
        if added:
            x = functional.pad(x, (0, 0, 0, added))
        out: Tensor = self._run(x, self._packed, self._bias, "none", self._no_scalars, "")
        return out[:rows] if added else out


class CpuOps:
    """`Ops` on the CPU for one dtype, float32 or bfloat16. Tensors must be contiguous, on the CPU and of that dtype.

    One layer's K and V are [num_blocks, num_kv_heads, ...] each; native/kernels.h has the rest of the layout. Those of
    an int8 cache are followed by views of their scales, [num_blocks, num_kv_heads, block_size], in the same memory.
    """

    pads_values = True

    def __init__(self, dtype: torch.dtype, quantization: Quantization = "none") -> None:
        """Load the kernels. Raises OSError and ConfigError as `load_library` does."""
        library, isa = load_library()
        self.quantization = quantization
        self.name = f"native-{isa}"
        self._library = library
        self._dtype = dtype
        # None where products are left to oneDNN.
        self._format = FORMATS.get(str(dtype).removeprefix("torch.") if quantization == "none" else quantization)
        path = self._format and product_path(library, self._format)
        if path is None:
            self._format = None
        elif quantization != "none":
            self.name += f", {quantization} by {path}"
        self._code = DTYPES[dtype]
        self._rms_norm = library.chairlift_rms_norm
        self._gate = library.chairlift_gate
        self._rope_and_write = library.chairlift_rope_and_write
        self._attention = library.chairlift_attention
        self._heads: dict[tuple[HeadShape, int, torch.dtype], tuple[native.HeadsStruct, int]] = {}

    def _format_of(self, weight: Tensor) -> WeightFormat | None:
        """The format in which the native products take this weight; None where they do not."""
        found = self._format
        if found is None or not found.takes(weight.dtype, weight.shape[1]):
            return None
        return narrowest(weight) if found.name == "float32" else found

    def _pack(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None, gated: bool = False
    ) -> PackedWeight | None:
        """The weight packed for the native products; None where they do not take it."""
        found = self._format_of(weight)
        if found is None:
            return None
        return PackedWeight(self._library, weight, bias, found, activation=activation, gated=gated)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return x [T, in] -> [T, out] for weight [out, in] and bias [out].

        The weight is copied: packed for our own products where the processor has them (float32 and bfloat16 from AVX2
        on, int8 and int4), else for oneDNN.
        """
        packed = self._pack(weight, bias)
        if packed is not None:
            return packed
        if _can_pack(weight.dtype):
            return OneDnnLinear(weight, bias)
        return ReferenceLinear(weight, bias, "none")

    def gated_linear(self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu") -> Linear:
        """Return x [T, in] -> activation(gate) * up [T, I] for weight [2 * I, in]."""
        packed = self._pack(weight, bias, activation, gated=True)
        return packed or FollowedLinear(self.linear(weight, bias), partial(self.gate, activation=activation))

    def activated_linear(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> Linear:
        """Return x [T, in] -> activation(x * weight^T + bias) for weight [out, in] and bias [out]."""
        packed = self._pack(weight, bias, activation)
        return packed or FollowedLinear(self.linear(weight, bias), partial(activate, activation=activation))

    def head(self, weight: Tensor) -> Head:
        """Return the last projection of weight [V, H]."""
        return self._pack(weight, None) or PlainHead(weight)

    def fuse(
        self,
        weights: DecoderWeights,
        caches: Sequence[KVCache],
        rotations: Sequence[RotaryTable],
        states: Sequence[Sequence[Tensor]],
    ) -> Forward | None:
        """Return the pass in one native call, if the native products hold all weights."""
        return FusedDecoder(self._library, weights, caches, rotations, states) if can_fuse(weights) else None

    def fuse_mlp(self, norm: Tensor, eps: float, mlp: Mlp) -> AddMlp | None:
        """Return an MLP with its norm and both additions in one native call, if it has native products."""
        return FusedMlp.of(self._library, norm, eps, mlp)

    def encoder(self, weights: EncoderWeights) -> EncoderForward:
        """Return an encoder's pass: one native call where the native products take its weights."""
        found = [self._format_of(part.weight) for part in (weights.layers[0].up, weights.layers[0].down)]
        if found[0] is not None and found[1] is not None and can_fuse_encoder(weights):
            return FusedEncoder(self._library, weights, self._format_of)
        return PlainEncoder(weights, self.linear)

    def recurrence(self) -> NativeRecurrence:
        """Return the native kernels for layers with states."""
        return NativeRecurrence(self._library)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] / rms(x) rounded to the weight's dtype, times weight [D]."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x [T, D] into `residual` [T, D] in place and return rms_norm(residual) [T, D]."""
        return self._norm(x, residual.data_ptr(), weight, eps)

    def _norm(self, x: Tensor, residual: int | None, weight: Tensor, eps: float) -> Tensor:
        out, dim = torch.empty_like(x), x.shape[-1]
        norm = weight.data_ptr(), DTYPES[weight.dtype]
        self._rms_norm(x.data_ptr(), residual, *norm, out.data_ptr(), x.numel() // dim, dim, eps, self._code)
        return out

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [T, 2 * I] -> activation(gate) * up [T, I]."""
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=self._dtype)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, native.ACTIVATIONS[activation], self._code)
        return out

    def exclude(self, logits: Tensor, allowed: Allowed) -> None:
        """Make logits [R, V] float32 -inf in place except those of the tokens that are allowed."""
        self._library.chairlift_exclude_tokens(logits.data_ptr(), *logits.shape, addresses(allowed))

    def highest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the highest of logits [R, V] float32, [R], and the first token that has it, [R] int64."""
        logits = logits.contiguous()
        values, ids = torch.empty(len(logits), dtype=torch.float32), torch.empty(len(logits), dtype=torch.int64)
        self._library.chairlift_highest(logits.data_ptr(), *logits.shape, ids.data_ptr(), values.data_ptr())
        return values, ids

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw token ids for each row of logits [R, V] float32: [R, D] int64."""
        ids = torch.empty(draws.uniform.shape, dtype=torch.int64)
        logits = logits.contiguous()
        # In the order of the structure's fields.
        fields = (draws.temperature, draws.min_p, draws.top_p, draws.top_k, draws.uniform)
        struct = native.DrawsStruct(*(values.ctypes.data for values in fields), draws.uniform.shape[1])
        self._library.chairlift_draw(logits.data_ptr(), *logits.shape, ctypes.byref(struct), ids.data_ptr())
        return ids

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """K and V of one layer. Raises ConfigError if the dtype or the head size is not one that the kernels know."""
        if dtype not in (self._dtype, torch.int8) or not has_kernels(heads.head_dim):
            raise ConfigError(
                f"ops = 'native' has no kernels for head_dim {heads.head_dim} in {dtype}; set ops = 'reference'"
            )
        dim, padded = heads.head_dim, padded_dim(heads.head_dim)
        pair = 1 if dtype == torch.float32 else 2
        even = -(-block_size // pair) * pair
        lead = (num_blocks, heads.num_kv_heads)
        if dtype == torch.int8:
            k, k_scales = _scaled_pages((*lead, dim // pair, even, pair), block_size)
            v, v_scales = _scaled_pages((*lead, even // pair, padded, pair), block_size)
            return k[:, :, :, :block_size], v, k_scales, v_scales
        k_size, v_size = (num_blocks * heads.num_kv_heads * each * even for each in (dim, padded))
        k = zeros(k_size + _SLACK // dtype.itemsize, dtype)[:k_size].view(*lead, dim // pair, even, pair)
        v = zeros(v_size, dtype).view(*lead, even // pair, padded, pair)
        # The narrowed view tells the other operations the block size.
        return k[:, :, :, :block_size], v

    def rope_and_write(
        self,
        qkv: Tensor,
        rotation: RotaryTable,
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
        has_norms = q_norm is not None or k_norm is not None
        norms = native.HeadNormsStruct.of(q_norm, k_norm, heads, eps) if has_norms else _NO_NORMS
        turns = native.RotaryTableStruct.of(rotation)
        out = torch.empty((tokens, heads.num_heads * heads.head_dim), dtype=self._dtype)
        self._rope_and_write(
            qkv.data_ptr(),
            out.data_ptr(),
            ctypes.addressof(turns),
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            ctypes.addressof(norms),
            tokens,
            self._heads_address(heads, k),
            self._code,
        )
        return out

    def attention(
        self, q: Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape, sinks: Tensor | None = None
    ) -> Tensor:
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
            None if sinks is None else sinks.data_ptr(),
            self._code,
        )
        return out

    def _heads_address(self, heads: HeadShape, k: Tensor) -> int:
        """Address of the C struct that describes `heads` over the cache `k`."""
        key = (heads, k.shape[3], k.dtype)
        found = self._heads.get(key)
        if found is None:
            struct = heads_struct(heads, k)
            found = self._heads[key] = struct, ctypes.addressof(struct)
        return found[1]


def _scaled_pages(shape: tuple[int, ...], block_size: int) -> tuple[Tensor, Tensor]:
    """Int8 pages of `shape` [num_blocks, num_kv_heads, ...], each followed by the float32 scales of its tokens."""
    blocks, heads, *rest = shape
    data = math.prod(rest)
    each = data + 4 * block_size
    memory = zeros(blocks * heads * each + _SLACK, torch.int8)
    inner = [math.prod(rest[axis + 1 :]) for axis in range(len(rest))]
    pages = memory.as_strided(shape, (heads * each, each, *inner))
    scales = memory.view(torch.float32).as_strided(
        (blocks, heads, block_size), (heads * each // 4, each // 4, 1), data // 4
    )
    return pages, scales


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

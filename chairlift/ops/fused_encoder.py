"""An encoder's whole forward pass in one native call."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from chairlift.ops import native
from chairlift.ops.activation import Activation
from chairlift.ops.encoder import EncoderLayer, EncoderWeights, Norm, Output, Projection, Texts
from chairlift.ops.formats import WeightFormat
from chairlift.ops.packed import PackedWeight

_OUTPUTS = {"tokens": 0, "mean": 1, "first": 2, "last": 3}
# Rows are walked in whole vectors, the widest being of 16 numbers.
_LANES = 16
_MOST_HIDDEN, _MOST_HEAD = 8192, 256


def can_fuse_encoder(weights: EncoderWeights) -> bool:
    """Whether the native pass takes them, by their sizes, and as there are no experts."""
    if any(layer.router is not None for layer in weights.layers):
        return False
    hidden, head = weights.hidden_size, weights.head_dim
    down = weights.layers[0].down.weight.shape[1]
    return not (hidden % _LANES or head % _LANES or down % 2) and hidden <= _MOST_HIDDEN and head <= _MOST_HEAD


class FusedEncoder:
    """`EncoderForward` over weights packed for the native products.

    Rows that are rounded to bytes are so from their lowest to their highest number, nearer to float32 than the plain
    operations.
    """

    def __init__(
        self, library: ctypes.CDLL, weights: EncoderWeights, format_of: Callable[[Tensor], WeightFormat | None]
    ) -> None:
        # The structures hold addresses only, so what they point to is kept here.
        self._held: list[object] = [weights.words, weights.positions, weights.types]
        self._library, self._format_of = library, format_of
        self.nbytes = sum(
            table.nbytes for table in (weights.words, weights.positions, weights.types) if table is not None
        )
        layers = (native.EncoderLayerStruct * len(weights.layers))()
        for struct, layer in zip(layers, weights.layers, strict=True):
            self._fill(struct, layer, weights.activation if weights.gated else None)
        self._hidden_size, self._most_tokens = weights.hidden_size, weights.most_tokens
        self._encoder = native.EncoderStruct(
            layers,
            len(layers),
            weights.hidden_size,
            weights.words.data_ptr(),
            None if weights.positions is None else weights.positions.data_ptr(),
            None if weights.types is None else weights.types.data_ptr(),
            weights.first_position,
            self._norm(weights.embedding_norm),
            self._norm(weights.final_norm),
            self._floats(weights.bias),
            0 if weights.bias is None else (weights.bias.shape[1] + 1) // 2,
            weights.num_heads,
            native.ACTIVATIONS[weights.activation],
            weights.pre_norm,
            weights.rms,
            native.DTYPES[weights.words.dtype],
            weights.eps,
        )
        self._layers = layers
        self._encode = library.chairlift_encode

    def _fill(self, struct: native.EncoderLayerStruct, layer: EncoderLayer, gate: Activation | None) -> None:
        struct.attention_norm, struct.mlp_norm = self._norm(layer.attention_norm), self._norm(layer.mlp_norm)
        struct.qkv, struct.out = self._pack(layer.qkv), self._pack(layer.out)
        struct.up, struct.down = self._pack(layer.up, gate), self._pack(layer.down)
        struct.cos_sin = self._floats(layer.cos_sin)
        struct.window = -1 if layer.window is None else layer.window

    def _pack(self, projection: Projection, gate: Activation | None = None) -> native.WeightStruct:
        gated = gate is not None
        weight, bias = projection.weight, projection.bias
        own = self._format_of(weight)
        assert own is not None
        packed = PackedWeight(self._library, weight, bias, own, activation=gate, gated=gated)
        self._held.append(packed)
        self.nbytes += packed.nbytes
        return packed.struct

    def _norm(self, norm: Norm | None) -> native.LayerNormStruct:
        return (
            native.LayerNormStruct(None, None)
            if norm is None
            else native.LayerNormStruct(*map(self._floats, (norm.weight, norm.bias)))
        )

    def _floats(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        wide = tensor.float().contiguous()
        self._held.append(wide)
        return wide.data_ptr()

    def __call__(self, texts: Texts, output: Output) -> Tensor:
        """Return hidden states, float32: [T, H] for "tokens", else [S, H]."""
        starts = texts.starts
        rows = len(texts.token_ids) if output == "tokens" else len(starts) - 1
        out = torch.empty((rows, self._hidden_size))
        struct = native.TextsStruct(
            texts.token_ids.ctypes.data,
            None if texts.type_ids is None else texts.type_ids.ctypes.data,
            starts.ctypes.data,
            len(starts) - 1,
            _OUTPUTS[output],
        )
        self._encode(ctypes.byref(self._encoder), ctypes.byref(struct), out.data_ptr())
        return out

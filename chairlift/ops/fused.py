"""A decoder's whole forward pass in one native call."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.ops import native
from chairlift.ops.base import DecoderLayer, DecoderWeights, DenseMlp, Inputs, KVCache, Linear, Mixer, Mlp
from chairlift.ops.experts import Experts
from chairlift.ops.gated_delta_net import GatedDeltaNet
from chairlift.ops.latent import EPS, LatentOutput, LatentProjection
from chairlift.ops.mamba_mixer import MambaMixer
from chairlift.ops.native_heads import heads_struct
from chairlift.ops.packed import PackedWeight
from chairlift.ops.recurrence import NativeSpans, states_struct
from chairlift.ops.rotation import RotaryTable
from chairlift.ops.short_convolution import ShortConvolution


def _struct(linear: Linear) -> native.WeightStruct:
    assert isinstance(linear, PackedWeight)
    return linear.struct


def can_fuse(weights: DecoderWeights) -> bool:
    """Whether the native products hold every weight, and those in one format that one product takes in turn."""
    linears = [
        linear
        for layer in weights.layers
        for linear in (*_parts_of(layer.qkv), *_parts_of(layer.out), *_linears_of(layer.mlp))
    ]
    if not all(isinstance(part, PackedWeight) for part in linears) or not isinstance(weights.head, PackedWeight | None):
        return False
    in_turn = [each for layer in weights.layers for each in _in_turn(layer)]
    return all(len({_struct(linear).format for linear in each}) <= 1 for each in in_turn)


def _in_turn(layer: DecoderLayer) -> Iterator[Sequence[Linear]]:
    """Weights that lie side by side for one product: those of heads, and of experts."""
    if isinstance(layer.qkv, LatentProjection):
        yield layer.qkv.key_up
    if isinstance(layer.out, LatentOutput):
        yield layer.out.value_up
    if isinstance(layer.mlp, Experts):
        yield [expert.gate_up for expert in layer.mlp.experts]
        yield [expert.down for expert in layer.mlp.experts]


def _parts_of(linear: Linear) -> Iterator[Linear]:
    """All weights that it multiplies with, each by itself."""
    if isinstance(linear, LatentProjection):
        yield from (linear.first, *([] if linear.query is None else [linear.query]), *linear.key_up)
    elif isinstance(linear, LatentOutput):
        yield from (*linear.value_up, linear.out)
    else:
        yield linear


def _linears_of(mlp: Mlp) -> Iterator[Linear | None]:
    """All weights that it multiplies with but a router's; None for one of a kind that the fused pass does not know."""
    if isinstance(mlp, DenseMlp):
        yield from (mlp.gate_up, mlp.down)
    elif isinstance(mlp, Experts):
        for expert in (*mlp.experts, *([] if mlp.shared is None else [mlp.shared])):
            yield from (expert.gate_up, expert.down)
    else:
        yield None


def _experts_struct(experts: Experts) -> native.ExpertsStruct:
    """Describe them; arrays that it points to are its own, the tensors are the caller's to keep."""
    routing = experts.routing
    all_of = native.WeightStruct * routing.count
    shared = experts.shared
    return native.ExpertsStruct(
        experts.router.data_ptr(),
        None if experts.router_bias is None else experts.router_bias.data_ptr(),
        None if experts.choice_bias is None else experts.choice_bias.data_ptr(),
        all_of(*(_struct(expert.gate_up) for expert in experts.experts)),
        all_of(*(_struct(expert.down) for expert in experts.experts)),
        native.WeightStruct() if shared is None else _struct(shared.gate_up),
        native.WeightStruct() if shared is None else _struct(shared.down),
        routing.count,
        routing.chosen,
        routing.scoring == "sigmoid",
        routing.renormalized,
        experts.shared_gated,
        routing.groups,
        routing.groups_chosen,
        routing.group_best,
        routing.least_sum,
        routing.scale,
    )


def _latent_struct(before: LatentProjection, after: LatentOutput) -> native.LatentStruct:
    """Describe both sides of latent attention, as `_experts_struct` does."""
    shape = before.shape
    all_of = native.WeightStruct * shape.num_heads
    return native.LatentStruct(
        _struct(before.first),
        native.WeightStruct() if before.query is None else _struct(before.query),
        native.NormStruct.of(before.query_norm),
        native.NormStruct.of(before.norm),
        all_of(*map(_struct, before.key_up)),
        all_of(*map(_struct, after.value_up)),
        shape.rank,
        shape.plain,
        shape.rotated,
        shape.value,
        EPS,
    )


def _convolution_struct(
    weight: Tensor, bias: Tensor | None, states: Tensor, silu: bool = False
) -> native.ConvolutionStruct:
    """Describe one; what it sees and gives are the pass's own."""
    bias_at = None if bias is None else bias.data_ptr()
    return native.ConvolutionStruct(
        None, weight.data_ptr(), bias_at, None, states_struct(states), 0, *weight.shape, silu
    )


def _delta_struct(net: GatedDeltaNet, seen: Tensor, memory: Tensor) -> native.DeltaNetStruct:
    """The same of a layer with the delta rule."""
    sizes = net.key_heads, net.value_heads, net.key_dim, net.value_dim
    rule = native.DeltaRuleStruct(*[None] * 6, states_struct(memory), 0, 0, 0, *sizes, True)
    return native.DeltaNetStruct(
        _convolution_struct(net.taps, None, seen, silu=True),
        rule,
        net.decay.data_ptr(),
        net.step_bias.data_ptr(),
        native.NormStruct.of(net.norm),
    )


def _mamba_struct(mixer: MambaMixer, seen: Tensor, memory: Tensor) -> native.MambaMixerStruct:
    """The same of a layer with Mamba 2."""
    sizes = mixer.heads, mixer.groups, mixer.head_dim, mixer.state_dim
    vectors = mixer.decay.data_ptr(), mixer.skip.data_ptr()
    scan = native.Mamba2Struct(*[None] * 4, *vectors, None, states_struct(memory), 0, 0, 0, *sizes)
    return native.MambaMixerStruct(
        _convolution_struct(mixer.taps, mixer.bias, seen, silu=True),
        scan,
        mixer.step_bias.data_ptr(),
        native.NormStruct.of(mixer.norm),
        mixer.least_step,
        mixer.most_step,
    )


class FusedDecoder:
    """What `DecoderWeights` describe, over caches of the native layout. Callable: see `Forward`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: DecoderWeights,
        caches: Sequence[KVCache],
        rotations: Sequence[RotaryTable],
        states: Sequence[Sequence[Tensor]],
    ) -> None:
        # The structures hold addresses only, so what they point to is kept here.
        self._held = weights, caches, rotations, states
        self._experts: list[native.ExpertsStruct] = []
        self._latents: list[native.LatentStruct] = []
        self._mixers: list[ctypes.Structure] = []
        layers = (native.DecoderLayerStruct * len(caches))()
        parts = zip(layers, weights.layers, caches, rotations, states, strict=True)
        for struct, layer, cache, rotation, state in parts:
            self._describe(struct, layer, weights.eps)
            if layer.mixer is not None:
                self._place_mixer(struct, layer.mixer, state)
                continue
            struct.k_cache, struct.v_cache = cache[0].data_ptr(), cache[1].data_ptr()
            struct.rotation = native.RotaryTableStruct.of(rotation)
        heads, k = next((layer.heads, cache[0]) for layer, cache in zip(weights.layers, caches, strict=True) if cache)
        assert isinstance(weights.head, PackedWeight | None)
        self._hidden_size, self._dtype = weights.norm.shape[0], weights.dtype
        self._layers = layers
        self._side_work: tuple[Callable[[], bool], Any] | None = None
        self._raised: BaseException | None = None
        self._decoder = native.DecoderStruct(
            layers,
            len(layers),
            self._hidden_size,
            native.NormStruct.of(weights.norm),
            None if weights.embedding is None else weights.embedding.data_ptr(),
            None if weights.positions is None else weights.positions.data_ptr(),
            # Without a head its structure is all zeros, and nobody looks at it.
            native.WeightStruct() if weights.head is None else weights.head.struct,
            heads_struct(heads, k),
            weights.eps,
            weights.embedding_scale,
            native.DTYPES[self._dtype],
        )
        self._decode = library.chairlift_decode

    def _describe(self, struct: native.DecoderLayerStruct, layer: DecoderLayer, eps: float) -> None:
        """Fill in all but the cache and its rotation."""
        for name in ("attention_pre_norm", "attention_post_norm", "mlp_pre_norm", "mlp_post_norm"):
            setattr(struct, name, native.NormStruct.of(getattr(layer, name)))
        struct.head_norms = native.HeadNormsStruct.of(layer.q_norm, layer.k_norm, layer.heads, eps)
        struct.sinks = None if layer.sinks is None else layer.sinks.data_ptr()
        if isinstance(layer.qkv, LatentProjection):
            assert isinstance(layer.out, LatentOutput)
            self._latents.append(_latent_struct(layer.qkv, layer.out))
            struct.latent, struct.out = ctypes.pointer(self._latents[-1]), _struct(layer.out.out)
        else:
            struct.qkv, struct.out = _struct(layer.qkv), _struct(layer.out)
        if isinstance(layer.mlp, DenseMlp):
            struct.gate_up, struct.down = _struct(layer.mlp.gate_up), _struct(layer.mlp.down)
        else:
            assert isinstance(layer.mlp, Experts)
            self._experts.append(_experts_struct(layer.mlp))
            struct.experts = ctypes.pointer(self._experts[-1])
        struct.window = layer.heads.window or 0
        struct.gated = layer.gated
        struct.parallel = layer.parallel

    def _place_mixer(self, struct: native.DecoderLayerStruct, mixer: Mixer, states: Sequence[Tensor]) -> None:
        """Describe what stands in the place of attention, over its states."""
        if isinstance(mixer, ShortConvolution):
            convolution = _convolution_struct(mixer.weight, mixer.bias, states[0])
            self._mixers.append(convolution)
            struct.convolution = ctypes.pointer(convolution)
        elif isinstance(mixer, MambaMixer):
            mamba = _mamba_struct(mixer, *states)
            self._mixers.append(mamba)
            struct.mamba = ctypes.pointer(mamba)
        else:
            delta = _delta_struct(mixer, *states)
            self._mixers.append(delta)
            struct.delta = ctypes.pointer(delta)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Write K and V of all tokens and return the normalized hidden states [R, H] of `inputs.logit_rows`."""
        batch, rows = inputs.attention, inputs.logit_rows
        hidden = torch.empty((rows.shape[0], self._hidden_size), dtype=self._dtype)
        step = native.PassStruct(
            inputs.token_ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            rows.data_ptr(),
            inputs.token_ids.shape[0],
            rows.shape[0],
            native.BatchStruct(
                batch.query_start.data_ptr(),
                batch.context_len.data_ptr(),
                batch.block_tables.data_ptr(),
                batch.block_tables.stride(0),
                batch.block_tables.shape[0],
            ),
        )
        if self._mixers:
            assert inputs.states is not None
            spans = NativeSpans(inputs.states)
            step.states = ctypes.pointer(spans.struct)
        if inputs.side_work is not None:
            step.side_work = self._callback_for(inputs.side_work)
        self._decode(ctypes.byref(self._decoder), ctypes.byref(step), hidden.data_ptr())
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        return hidden

    def _callback_for(self, side_work: Callable[[], bool]) -> Any:
        """The same as the library calls it; it is made once, as mostly it is what it was."""
        if self._side_work is None or self._side_work[0] != side_work:

            def call() -> bool:
                try:
                    return side_work()
                except BaseException as error:
                    # Also an interrupt by the keyboard: nothing is raised through the library.
                    self._raised = error
                    return False

            self._side_work = side_work, native.SIDE_WORK(call)
        return self._side_work[1]

"""Layers of the most common shape, computed by our operations one after the other.

Of a small model's step transformers' modules take as long as the products do. A layer is of that shape if it has a
norm, a mixer, another norm and an MLP, if its code asks for nothing else, and if the model then gives the same numbers.
An attention is computed so too if it has the usual parts; other mixers are run as modules.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from chairlift.ops.contract import Ops
from chairlift.runners.decoder.rebound import called_by
from chairlift.runners.decoder.transformers_attention import Angles, HeadNorms, PagedAttention
from chairlift.runners.decoder.transformers_parts import RmsNorm, by_rows, dense_of, joined

# What families call the norms and the MLP of such a layer.
_PARTS = (
    ("input_layernorm", "post_attention_layernorm", "mlp"),
    ("operator_norm", "ffn_norm", "feed_forward"),
    ("input_layernorm", "pre_ff_layernorm", "feed_forward"),
)
_ATTENTION = "self_attn"
# Its mixer, or those of which it has one, and by what its code knows which.
_MIXERS = {_ATTENTION, "conv", "linear_attn", "mamba"}
_CHOICES = {"is_attention_layer", "block_type"}
# Of an MLP that may tell more than what it makes.
_UNPACKS = {"isinstance", "tuple"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_OUTS = ("o_proj", "out_proj")
_NORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")
# All that the usual attention's forward asks for: projections, a rotation, and the function that attends.
_CALLED = {
    *(*_PROJECTIONS, *_OUTS, *(name for pair in _NORMS for name in pair)),
    *("apply_rotary_pos_emb", "head_dim", "scaling", "sliding_window"),
    *("shape", "view", "transpose", "reshape", "contiguous", "update", "layer_idx", "config", "_attn_implementation"),
    *("ALL_ATTENTION_FUNCTIONS", "get_interface", "eager_attention_forward"),
    *("training", "attention_dropout", "getattr"),
}
# Rows [T, H] that are normalized, the angles of their positions, and what else a layer is given -> [T, H].
_Mix = Callable[[Tensor, Angles | None, Mapping[str, Any]], Tensor]


class _Layer(NamedTuple):
    """The parts of a layer of that shape."""

    before: RmsNorm
    mixer: Any
    between: RmsNorm
    mlp: Any
    attends: bool


def shorten(model: nn.Module, paged: PagedAttention, ops: Ops) -> list[nn.Module]:
    """Have all layers of that shape computed so; return them, each of which does as before without its `forward`."""
    attentions = {id(module): index for index, module in paged.modules.items()}
    found = []
    for module, layer in _of_that_shape(model):
        index = attentions.get(id(layer.mixer))
        mix = None if index is None else _attending(layer.mixer, index, paged, ops)
        module.forward = _forward(layer, mix or _as_module(layer.mixer, layer.attends), ops)
        found.append(module)
    return found


def _of_that_shape(model: nn.Module) -> Iterator[tuple[nn.Module, _Layer]]:
    for module in model.modules():
        names, called = {name for name, _ in module.named_children()}, called_by(module)
        for parts in _PARTS:
            mixers = names - {*parts}
            if len(mixers) != 1 or not {*parts} <= names or not mixers <= _MIXERS:
                continue
            norms = getattr(module, parts[0]), getattr(module, parts[1])
            asks = {*parts} <= called <= {*parts} | _MIXERS | _CHOICES | _UNPACKS
            if asks and isinstance(norms[0], RmsNorm) and isinstance(norms[1], RmsNorm):
                (mixer,) = mixers
                attends = mixer == _ATTENTION
                yield module, _Layer(norms[0], getattr(module, mixer), norms[1], getattr(module, parts[2]), attends)


def _attending(attention: Any, index: int, paged: PagedAttention, ops: Ops) -> _Mix | None:
    """What the usual attention does; None for another."""
    # Its rotation is noted only, and so nothing but what is asked for here comes before the function that attends.
    rotates, called = "forward" in vars(attention), called_by(attention)
    outs = [getattr(attention, name) for name in _OUTS if name in called]
    norms = _head_norms(attention, called)
    if not rotates or not called <= _CALLED or len(outs) != 1 or norms is None:
        return None
    heads = paged.heads[index]
    widths = [heads.num_heads * heads.head_dim, *[heads.num_kv_heads * heads.head_dim] * 2]
    parts = [getattr(attention, name, None) for name in _PROJECTIONS]
    if joined(parts) is None or attention.q_proj.joint.widths != widths:
        return None
    linear, out = attention.q_proj.joint.linear, by_rows(outs[0])

    def mix(rows: Tensor, angles: Angles | None, others: Mapping[str, Any]) -> Tensor:
        assert angles is not None
        return out(paged.attend_rows(index, linear(rows), angles, norms))

    return mix


def _head_norms(attention: Any, called: set[str]) -> HeadNorms | None:
    """Norms that it has of queries and keys; None if they are not those that our kernels have."""
    for names in _NORMS:
        if not called & {*names}:
            continue
        query, key = (getattr(attention, name, None) for name in names)
        if not isinstance(query, RmsNorm) or not isinstance(key, RmsNorm) or query.eps != key.eps:
            return None
        if not query.scale.shape == key.scale.shape == (attention.head_dim,):
            return None
        return HeadNorms(query.scale, key.scale, query.eps)
    return HeadNorms()


def _as_module(mixer: Any, attends: bool) -> _Mix:
    def mix(rows: Tensor, angles: Angles | None, others: Mapping[str, Any]) -> Tensor:
        if attends:
            found: Tensor = mixer(hidden_states=rows[None], position_embeddings=angles, **others)[0]
            return found[0]
        given: Tensor = mixer(rows[None], **{name: each for name, each in others.items() if name != "position_ids"})
        return given[0]

    return mix


def _forward(layer: _Layer, mix: _Mix, ops: Ops) -> Callable[..., Tensor]:
    before, between, mlp, dense = layer.before, layer.between, by_rows(layer.mlp), dense_of(layer.mlp)
    add_mlp = None if dense is None else ops.fuse_mlp(between.scale, between.eps, dense)

    def forward(hidden_states: Tensor, *, position_embeddings: Angles | None = None, **others: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        rows = hidden_states[0].contiguous()
        residual = mix(ops.rms_norm(rows, before.scale, before.eps), position_embeddings, others).contiguous()
        if add_mlp is not None:
            add_mlp(rows, residual)
            return residual[None]
        normed = ops.add_rms_norm(rows, residual, between.scale, between.eps)
        return mlp(normed).add_(residual)[None]

    return forward

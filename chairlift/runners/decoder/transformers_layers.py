"""Layers of the most common shape, computed by our operations one after the other.

Of a small model's step transformers' modules take as long as the products do. A layer is of that shape if it has these
parts, if its code and its attention's ask for nothing else, and if the model then gives the same numbers.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from chairlift.ops.contract import Ops
from chairlift.runners.decoder.rebound import called_by
from chairlift.runners.decoder.transformers_attention import PagedAttention
from chairlift.runners.decoder.transformers_parts import ProjectionPart, RmsNorm

# What such a layer is made of, and all that its forward asks for.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
# All that its attention's forward asks for: projections, a rotation, and the function that attends.
_ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "apply_rotary_pos_emb", "head_dim", "scaling", "sliding_window"),
    *("shape", "view", "transpose", "reshape", "contiguous", "update", "layer_idx", "config", "_attn_implementation"),
    *(
        "ALL_ATTENTION_FUNCTIONS",
        "get_interface",
        "eager_attention_forward",
        "training",
        "attention_dropout",
        "getattr",
    ),
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def shorten(model: nn.Module, paged: PagedAttention, ops: Ops) -> list[nn.Module]:
    """Have all layers of that shape computed so; return them, each of which does as before without its `forward`."""
    found = [*_of_that_shape(model, paged)]
    for layer in found:
        layer.forward = _forward(layer, paged, ops)
    return found


def _of_that_shape(model: nn.Module, paged: PagedAttention) -> Iterator[Any]:
    attentions = {id(module): index for index, module in paged.modules.items()}
    for layer in model.modules():
        if {name for name, _ in layer.named_children()} != _LAYER or called_by(layer) != _LAYER:
            continue
        attention: Any = layer.self_attn
        # Its rotation is noted only, and so nothing but what is asked for here comes before the function that attends.
        rotates = "forward" in vars(attention)
        if id(attention) not in attentions or not rotates or not called_by(attention) <= _ATTENTION:
            continue
        heads = paged.heads[attentions[id(attention)]]
        widths = [heads.num_heads * heads.head_dim, *[heads.num_kv_heads * heads.head_dim] * 2]
        parts = [getattr(attention, name) for name in _PROJECTIONS]
        if not all(isinstance(part, ProjectionPart) for part in parts) or parts[0].joint.widths != widths:
            continue
        if [part.index for part in parts] == [0, 1, 2] and len({id(part.joint) for part in parts}) == 1:
            norms = layer.input_layernorm, layer.post_attention_layernorm
            if all(isinstance(norm, RmsNorm) for norm in norms):
                yield layer


def _forward(layer: Any, paged: PagedAttention, ops: Ops) -> Callable[..., Tensor]:
    first, second, mlp, out = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp, layer.self_attn.o_proj
    index, project = layer.self_attn.layer_idx, layer.self_attn.q_proj.joint.linear

    def forward(hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        rows = hidden_states[0].contiguous()
        attended = paged.attend_rows(index, project(ops.rms_norm(rows, first.scale, first.eps)), *position_embeddings)
        residual: Tensor = out(attended)
        normed = ops.add_rms_norm(rows, residual, second.scale, second.eps)
        made: Tensor = mlp(normed[None])
        return made.add_(residual)

    return forward

"""The experts of one layer: read by name, one by one or from tensors that hold all of them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from chairlift.folders.expert_rules import ExpertConfig
from chairlift.ops.base import GatedMlp
from chairlift.ops.contract import Ops
from chairlift.ops.experts import Experts, Routing
from chairlift.runners.decoder.config import DecoderConfig
from chairlift.runners.weights import Weights


def read_experts(
    config: DecoderConfig, experts: ExpertConfig, ops: Ops, weights: Weights, prefix: str, shared: GatedMlp | None
) -> Experts:
    """Read a layer's, whose tensors' names begin with `prefix`; `shared` is what all of its tokens use.

    Raises UnsupportedModel naming a missing or misshapen tensor.
    """
    names, hidden, count = experts.names, config.hidden_size, experts.count
    router = weights.take([prefix + names.router], [(count, hidden)], torch.float32)
    gated = shared is not None and names.shared_gate is not None
    if gated:
        router = torch.cat((router, weights.take([f"{prefix}{names.shared_gate}"], [(1, hidden)], torch.float32)))
    bias = None if names.choice_bias is None else _choice_bias(weights, prefix + names.choice_bias, count)

    def expert(gate_up: Tensor, down: Tensor) -> GatedMlp:
        # The pass adds what comes back as it is.
        down *= config.residual_scale
        return GatedMlp(ops.gated_linear(gate_up, None, config.activation), ops.linear(down, None))

    return Experts(
        routing=Routing(count, experts.chosen, experts.scoring, experts.renormalized, experts.least_sum, experts.scale),
        router=router,
        choice_bias=bias,
        experts=[expert(*each) for each in _tensors(experts, weights, prefix, hidden)],
        shared=shared,
        shared_gated=gated,
    )


def _tensors(experts: ExpertConfig, weights: Weights, prefix: str, hidden: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Gate and up [2 * I, H] and down [H, I] of each expert, one after the other, so that no two are held at once."""
    names, width = experts.names, experts.width
    together = [prefix + name for name in names.together]
    if together[0] in weights:
        shapes = (experts.count, 2 * width, hidden), (experts.count, hidden, width)
        gate_ups, downs = (weights.take([name], [shape]) for name, shape in zip(together, shapes, strict=True))
        yield from zip(gate_ups, downs, strict=True)
        return
    for index in range(experts.count):
        gate, up, down = (f"{prefix}{names.experts.format(index)}.{part}.weight" for part in names.parts)
        yield weights.take([gate, up], [(width, hidden)] * 2), weights.take([down], [(hidden, width)])


def _choice_bias(weights: Weights, name: str, count: int) -> Tensor:
    """[E]; ERNIE has it as one row [1, E]."""
    shape = weights.shape(name)
    return weights.take([name], [(1, count) if len(shape) == 2 else (count,)], torch.float32).flatten()

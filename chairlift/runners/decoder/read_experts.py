"""The experts of one layer: read by name, one by one or from tensors that hold all of them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.folders.expert_rules import ExpertConfig
from chairlift.ops.base import DenseMlp
from chairlift.ops.contract import Ops
from chairlift.ops.experts import Experts, Routing
from chairlift.runners.decoder.config import DecoderConfig
from chairlift.runners.decoder.mxfp4 import BLOCK, dequantize
from chairlift.runners.weights import Matrix, Weights


def read_experts(
    config: DecoderConfig, experts: ExpertConfig, ops: Ops, weights: Weights, prefix: str, shared: DenseMlp | None
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

    router_bias = None
    if names.router_bias is not None:
        router_bias = weights.take([prefix + names.router_bias], [(count,)], torch.float32)

    def expert(gate_up: Matrix, down: Matrix) -> DenseMlp:
        # The pass adds what comes back as it is.
        down.weight.mul_(config.residual_scale)
        activation = experts.activation or config.activation
        return DenseMlp(ops.gated_linear(*gate_up, activation), ops.linear(*down))

    return Experts(
        routing=Routing(
            count,
            experts.chosen,
            experts.scoring,
            experts.renormalized,
            experts.least_sum,
            experts.scale,
            experts.groups,
            experts.groups_chosen,
            experts.group_best,
        ),
        router=router,
        router_bias=router_bias,
        choice_bias=bias,
        experts=[expert(*each) for each in _tensors(experts, weights, prefix, hidden)],
        shared=shared,
        shared_gated=gated,
    )


def _tensors(experts: ExpertConfig, weights: Weights, prefix: str, hidden: int) -> Iterator[tuple[Matrix, Matrix]]:
    """Gate and up [2 * I, H] and down [H, I] of each expert, one after the other."""
    names, width = experts.names, experts.width
    together = [prefix + name for name in names.together]

    def named(index: int) -> list[str]:
        return [f"{prefix}{names.experts.format(index)}.{part}" for part in names.parts]

    # Files may have one by one what a family's folders have together.
    if names.transposed and f"{named(0)[0]}.weight" not in weights:
        yield from zip(*_by_turns(experts, weights, together, hidden), strict=True)
        return
    if together[0] in weights:
        shapes = (experts.count, 2 * width, hidden), (experts.count, hidden, width)
        gate_ups, downs = (weights.take([name], [shape]) for name, shape in zip(together, shapes, strict=True))
        yield from zip(map(Matrix, gate_ups), map(Matrix, downs), strict=True)
        return
    for index in range(experts.count):
        *both, down = named(index)
        gate_up = weights.take([f"{name}.weight" for name in both], [(width, hidden)] * 2)
        lowered = weights.take([f"{down}.weight"], [(hidden, width)])
        if not names.transposed:
            yield Matrix(gate_up), Matrix(lowered)
            continue
        biases = weights.take([f"{name}.bias" for name in both], [(width,)] * 2)
        yield Matrix(gate_up, biases), Matrix(lowered, weights.take([f"{down}.bias"], [(hidden,)]))


def _by_turns(
    experts: ExpertConfig, weights: Weights, names: Sequence[str], hidden: int
) -> tuple[Iterator[Matrix], Iterator[Matrix]]:
    """Experts whose gate and up take turns, in two tensors with biases beside them, packed or transposed."""
    count, width = experts.count, experts.width

    def each(name: str, outs: int, ins: int) -> Iterator[Matrix]:
        biases = weights.take([f"{name}_bias"], [(count, outs)])
        if f"{name}_blocks" not in weights:
            whole = weights.take([name], [(count, ins, outs)])
            return (Matrix(weight.T.contiguous(), bias) for weight, bias in zip(whole, biases, strict=True))
        if ins % BLOCK:
            raise UnsupportedModel(f"tensor '{name}_blocks': rows of {ins} numbers are no whole blocks of {BLOCK}")
        blocks = weights.take_bytes(f"{name}_blocks", (count, outs, ins // BLOCK, BLOCK // 2))
        scales = weights.take_bytes(f"{name}_scales", (count, outs, ins // BLOCK))
        packed = zip(blocks, scales, biases, strict=True)
        return (Matrix(dequantize(block, scale, weights.dtype), bias) for block, scale, bias in packed)

    def sorted_out(rows: Matrix) -> Matrix:
        order = torch.arange(2 * width, device=rows.weight.device).view(-1, 2).T.flatten()
        return Matrix(rows.weight[order], None if rows.bias is None else rows.bias[order])

    gate_up, down = each(names[0], 2 * width, hidden), each(names[1], hidden, width)
    return map(sorted_out, gate_up), down


def _choice_bias(weights: Weights, name: str, count: int) -> Tensor:
    """[E]; ERNIE has it as one row [1, E]."""
    shape = weights.shape(name)
    return weights.take([name], [(1, count) if len(shape) == 2 else (count,)], torch.float32).flatten()

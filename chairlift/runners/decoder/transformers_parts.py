"""Our operations in place of transformers' modules that compute the same.

A module's kind is guessed by its parts, and then tried: it is replaced if it gives the same numbers.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from chairlift.ops.activation import ACTIVATIONS, Activation, gated
from chairlift.ops.base import DenseMlp, Head, Linear
from chairlift.ops.contract import Ops

# Of mixtures of experts: which expert a token goes to hangs by a hair, and is not worth rounding. Some of these modules
# are also asked for their weights, as are those that Mamba's time steps come from.
_LEFT = (".gate", ".router", ".router.classifier", ".gate.wg", ".dt_proj")
# Projections of the same numbers: of attention, and of Qwen 3.5's layers with states.
_JOINED = ("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
# What gates, what is gated, and what comes after that.
_GATED = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
# By how much what is tried may differ, as a share of the largest number.
_SAME = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_ROWS = 5


def put_in(model: Any, ops: Ops) -> int:
    """Replace norms, gated MLPs and projections; return the bytes of what was packed."""
    total = 0
    for name, module in _each(model):
        norm = _norm_like(module, ops)
        if norm is not None:
            _replace(model, name, norm)
    for name, module in _each(model):
        mlp = _mlp_like(module, ops)
        if mlp is not None:
            _replace(model, name, mlp)
            total += mlp.nbytes
    for _, module in _each(model):
        total += sum(_join(module, names, ops) for names in _JOINED)
    head = model.get_output_embeddings()
    for name, module in _each(model):
        packed = None if name.endswith(_LEFT) else _projection_like(module, module is head, ops)
        if packed is None:
            continue
        if isinstance(packed, _PackedHead):
            _share(model, module.weight, packed.head)
        _replace(model, name, packed)
        total += packed.nbytes
    return total


def _share(model: Any, weight: Tensor, head: Head) -> None:
    """Have rows of embeddings that are tied to the head read back out of it, so that they lie in memory once."""
    for name, module in _each(model):
        if isinstance(module, nn.Embedding) and module.weight is weight:
            scale = _scale_of(module)
            if scale is not None:
                _replace(model, name, _HeadEmbedding(head, module, scale))


def _each(model: Any) -> Iterator[tuple[str, Any]]:
    """Its modules, as far as they are there when their turn comes: none that was replaced is held until all are."""
    for name in [name for name, _ in model.named_modules()]:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            # It was a part of one that was replaced.
            continue
        yield name, module


def set_apart(model: Any) -> None:
    """Have modules get projections that are computed together each in one piece: some look at them in other shapes."""
    for module in model.modules():
        if isinstance(module, ProjectionPart):
            module.joint.apart = True


class _PackedLinear(nn.Module):
    """A projection by our products."""

    def __init__(self, linear: Linear, width: int) -> None:
        super().__init__()
        self.linear, self._width, self.nbytes = linear, width, linear.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.linear(_rows(x)).view(*x.shape[:-1], self._width)


class _PackedHead(nn.Module):
    """The last projection by our products."""

    def __init__(self, head: Head, width: int, like: Tensor) -> None:
        super().__init__()
        self.head, self._width, self.nbytes = head, width, head.nbytes
        # Some models ask for its type, and nobody for its numbers.
        self.register_buffer("weight", like.new_empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., V]."""
        return self.head.logits(_rows(x)).view(*x.shape[:-1], self._width)


class _HeadEmbedding(nn.Module):
    """The embedding by the head that it is tied to, each row times a scale."""

    def __init__(self, head: Head, own: nn.Embedding, scale: Tensor) -> None:
        super().__init__()
        self._head, self._scale = head, None if scale == 1 else scale
        # Some models ask for these, for the type of the weight, and for single rows of it.
        self.num_embeddings, self.embedding_dim, self.padding_idx = (
            own.num_embeddings,
            own.embedding_dim,
            own.padding_idx,
        )
        self.weight = _EmbeddingRows(head, own.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H]."""
        found = self._head.embed(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)
        return found if self._scale is None else found * self._scale


class _EmbeddingRows:
    """What stands for the weight of an embedding that is the head's: its type, and rows of it."""

    def __init__(self, head: Head, own: Tensor) -> None:
        self._head, self.dtype, self.device, self.shape = head, own.dtype, own.device, own.shape

    def __getitem__(self, index: Any) -> Tensor:
        """Row [H] of a number, or a part of it. Raises TypeError for anything else, IndexError if there is none."""
        row, *part = index if isinstance(index, tuple) else (index,)
        if not isinstance(row, int):
            raise TypeError("of an embedding that is the head's, rows are had one by one")
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"its embedding has no row {row}")
        found = self._head.embed(torch.tensor([row], device=self.device))[0]
        return found[tuple(part)] if part else found


class _Mlp(nn.Module):
    """A gated MLP by our products."""

    def __init__(self, mlp: DenseMlp) -> None:
        super().__init__()
        self.mlp, self.nbytes = mlp, mlp.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return self.mlp(_rows(x)).view(x.shape)


class RmsNorm(nn.Module):
    """An RMS norm by our kernel."""

    def __init__(self, ops: Ops, scale: Tensor, eps: float, own: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self._ops, self.scale, self.eps, self._dtype = ops, scale, eps, weight.dtype
        # What it stands for, not as a part of it: for rows of another type, as Mamba's float32.
        self._own = (own,)
        # Some layers ask for its type.
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        if x.dtype != self._dtype:
            found: Tensor = self._own[0](x)
            return found
        return self._ops.rms_norm(x.contiguous(), self.scale, self.eps)


class _Joint:
    """Projections of the same numbers, one after the other: the first that is asked for computes all of them."""

    def __init__(self, linear: Linear, widths: list[int]) -> None:
        self.linear, self.widths = linear, widths
        # Whether each is in one piece, and not a part of rows that have all of them.
        self.apart = False
        # Of what the parts are, and those that nobody has asked for.
        self._of: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """Projection `index` of x [..., in]."""
        if self._of is not x or index not in self._parts:
            found = torch.split(self.linear(_rows(x)), self.widths, dim=1)
            self._of = x
            parts = [each.contiguous() for each in found] if self.apart else found
            self._parts = {number: each.reshape(*x.shape[:-1], -1) for number, each in enumerate(parts)}
        part = self._parts.pop(index)
        if not self._parts:
            self._of = None
        return part


class ProjectionPart(nn.Module):
    """One of projections that are computed together."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self.joint, self.index = joint, index

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.joint.part(self.index, x)


def by_rows(module: Any) -> Callable[[Tensor], Tensor]:
    """What a module makes of rows [T, in] -> [T, out]: of ours without the module."""
    if isinstance(module, _PackedLinear):
        return module.linear
    if isinstance(module, _Mlp):
        return module.mlp

    def compute(rows: Tensor) -> Tensor:
        found = module(rows[None])
        # A mixture of experts may also tell how it chose.
        made: Tensor = found[0] if isinstance(found, tuple) else found
        return made[0]

    return compute


def dense_of(module: Any) -> DenseMlp | None:
    """What computes a module of ours that is a gated MLP; None of another."""
    return module.mlp if isinstance(module, _Mlp) else None


def joined(modules: Sequence[Any]) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """What projections make of rows [T, in], [T, out] of each, if they are computed together, in this order."""
    parts = [module for module in modules if isinstance(module, ProjectionPart)]
    if len(parts) < len(modules) or len({id(part.joint) for part in parts}) > 1:
        return None
    joint = parts[0].joint
    if [part.index for part in parts] != list(range(len(joint.widths))):
        return None
    return lambda rows: torch.split(joint.linear(rows), joint.widths, dim=1)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _norm_like(module: Any, ops: Ops) -> RmsNorm | None:
    """An RMS norm in place of one: with its weight as it is, in float32, or with one more."""
    own = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or list(own) != ["weight"] or not isinstance(eps, float):
        return None
    weight = own["weight"].detach()
    if weight.dim() != 1:
        return None
    scales = (weight, weight.float(), 1 + weight.float())
    norms = [RmsNorm(ops, scale.contiguous(), eps, module, weight) for scale in scales]
    # Beside one large weight it is hardly seen what the others lack: so it is the nearest one, not any that is near.
    return _nearest(module, norms, weight.shape[0], weight)


def _mlp_like(module: Any, ops: Ops) -> _Mlp | None:
    """A gated MLP in place of one that has a gate, an activation and two projections, and nothing else."""
    names = {name for name, _ in module.named_children()} - {"act_fn"}
    known = next((each for each in _GATED if {*each} == names), None)
    if known is None or not all(type(getattr(module, name)) is nn.Linear for name in names):
        return None
    gate, up, down = (getattr(module, name) for name in known)
    if (gate.bias is None) != (up.bias is None) or gate.weight.shape != up.weight.shape:
        return None
    halves = functools.lru_cache(maxsize=1)(lambda x: (gate(x), up(x)))
    plain = {_plainly(halves, down, activation): activation for activation in sorted(set(ACTIVATIONS.values()))}
    found = _nearest(module, plain, gate.in_features, gate.weight)
    if found is None:
        return None
    weight, bias = _side_by_side([gate, up])
    own_bias = None if down.bias is None else down.bias.detach()
    gate_up = ops.gated_linear(weight, bias, plain[found])
    return _Mlp(DenseMlp(gate_up, ops.linear(down.weight.detach(), own_bias)))


def _plainly(
    halves: Callable[[Tensor], tuple[Tensor, Tensor]], down: Any, activation: Activation
) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        found: Tensor = down(gated(*halves(x), activation))
        return found

    return compute


_Computes = TypeVar("_Computes", bound=Callable[[Tensor], Tensor])


@torch.no_grad()
def _nearest(module: Any, others: Iterable[_Computes], width: int, like: Tensor) -> _Computes | None:
    """Which of others makes most nearly the same of some random rows, if one does. What fails is of no such kind."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, width, generator=generator).to(like.device, like.dtype)
    nearest, least, theirs = None, math.inf, None
    for other in others:
        try:
            theirs = module(x) if theirs is None else theirs
            ours = other(x)
        except Exception:  # of any kind, as it is anybody's code
            continue
        if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            continue
        off = (theirs.float() - ours.float()).abs()
        if off.max() <= _SAME[like.dtype] * theirs.abs().max() and off.mean() < least:
            nearest, least = other, float(off.mean())
    return nearest


def _side_by_side(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """The weights of projections, and their biases, one below the other."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    return weight, None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])


def _join(module: Any, names: tuple[str, ...], ops: Ops) -> int:
    """Have projections of that name computed together, if a module has them; return the bytes of their weight."""
    linears: list[Any] = [getattr(module, name, None) for name in names]
    if not all(type(linear) is nn.Linear for linear in linears):
        return 0
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return 0
    joint = _Joint(ops.linear(*_side_by_side(linears)), [linear.out_features for linear in linears])
    for index, name in enumerate(names):
        setattr(module, name, ProjectionPart(joint, index))
    return joint.linear.nbytes


@torch.no_grad()
def _scale_of(embedding: nn.Embedding) -> Tensor | None:
    """What an embedding multiplies its rows with, if it does no more than that."""
    weight = embedding.weight
    ids = torch.arange(min(_ROWS, len(weight)), device=weight.device)
    scale = torch.as_tensor(getattr(embedding, "embed_scale", 1.0)).to(weight.device, weight.dtype)
    return scale if torch.equal(embedding(ids), nn.functional.embedding(ids, weight) * scale) else None


def _projection_like(module: Any, is_head: bool, ops: Ops) -> _PackedLinear | _PackedHead | None:
    from transformers.pytorch_utils import Conv1D

    if type(module) not in (nn.Linear, Conv1D):
        return None
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T.contiguous()
    if is_head and module.bias is None:
        return _PackedHead(ops.head(weight.detach()), weight.shape[0], weight)
    bias = None if module.bias is None else module.bias.detach()
    return _PackedLinear(ops.linear(weight.detach(), bias), weight.shape[0])

"""Queries and keys rotated by the kernel that writes them, and not by a function of transformers' modules."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.runners.decoder.rebound import called_by, rebound

NAME = "apply_rotary_pos_emb"


class Rotation:
    """Notes how a layer's queries and keys are to be rotated; `take` gives it to whoever does.

    The kernels turn the two halves of a head together, by a row of a table [T, D] float32 (cosines, then sines) for
    each token of a pass.
    """

    def __init__(self) -> None:
        # What was asked for last, and for what; and the tables of this pass by the cosines that they were made of.
        self._asked: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        # Set once all layers have been seen to turn halves: to look at a GPU's numbers is to wait for it.
        self.sure = False

    def begin(self) -> None:
        """A pass begins."""
        self._asked = None
        self._tables.clear()

    def note(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stands in for `apply_rotary_pos_emb`: gives queries and keys back as they are."""
        self._asked = cos, sin, query, key
        return query, key

    def take(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The table [T, D] by which this layer's queries and keys are to be rotated; None if they are already.

        Raises ValueError where it is not the whole head that turns, by halves, or something else comes after that.
        """
        if self._asked is None:
            return None
        (cos, sin, asked_query, asked_key), self._asked = self._asked, None
        if query is not asked_query or key is not asked_key:
            raise ValueError("what is rotated is not what is attended to")
        return self.table(cos, sin, query.shape[-1])

    def table(self, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
        """The table [T, D] of these cosines and sines. Raises ValueError as `take`."""
        known = self._tables.get(id(cos))
        if known is None:
            half = head_dim // 2
            whole = cos.dim() == 3 and cos.shape[-1] == head_dim
            if not whole or not (self.sure or torch.equal(cos[..., :half], cos[..., half:])):
                raise ValueError("it is not the two halves of a whole head that are rotated")
            table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1).float()
            # The cosines are held too, so that their id is nobody else's meanwhile.
            known = self._tables[id(cos)] = table, cos
        return known[0]


def take_over(modules: Iterable[nn.Module], rotation: Rotation) -> None:
    """Have attention modules note their rotation only, where the function that they call turns halves."""
    for module in modules:
        function = _function_of(module)
        if function is not None and _turns_halves(function):
            module.forward = rebound(module, {NAME: rotation.note})


def give_back(modules: Iterable[nn.Module]) -> None:
    """Have them rotate as they did."""
    for module in modules:
        vars(module).pop("forward", None)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """x [1, H, T, D] rotated by halves, by the rows of a table [T, D]."""
    cos, sin = table.to(x.dtype).chunk(2, dim=1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _function_of(module: nn.Module) -> Callable[..., Any] | None:
    if NAME not in called_by(module):
        return None
    found = inspect.unwrap(type(module).forward).__globals__.get(NAME)
    return found if callable(found) else None


def _turns_halves(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1))
    angle = torch.randn(1, 3, 4, generator=generator).repeat(1, 1, 2)
    table = torch.cat((angle[0, :, :4].cos(), angle[0, :, :4].sin()), dim=1)
    try:
        found = function(query, key, angle.cos(), angle.sin())
    except Exception:  # of any kind, as it is anybody's code
        return False
    pairs = zip(found, (query, key), strict=False)
    return all(torch.allclose(one, rotated(other, table), atol=1e-5) for one, other in pairs)

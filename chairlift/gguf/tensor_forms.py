"""Forms of tensors that converters change, whichever model they are of: changed back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from chairlift.gguf.hybrid_names import TensorChange
from chairlift.gguf.told_settings import ToldSettings


def with_channel(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """A convolution's weights [C, 1, K] of [C, K]: each channel is a group of one."""
    (taps,) = parts
    if taps.dim() != 2:
        raise ValueError("it has to be [channels, taps]")
    return taps.unsqueeze(1)


def lowered(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """The weights of a norm, to which one was added."""
    return parts[0].float() - 1


def logarithm(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """The logarithms of decays, which files have as what those are: below zero."""
    (decays,) = parts
    if not (decays < 0).all():
        raise ValueError("decays have to be below zero")
    return decays.float().neg().log()


def flat(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """A list of numbers that lie in groups, or as a column."""
    return parts[0].flatten()


def joined(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """Rows of projections, one below the other."""
    return torch.cat(list(parts))


def joined_experts(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """Rows of each expert's projections [E, outs, ins], one below the other."""
    return torch.cat(list(parts), dim=1)


def of_one(name: str, make: Callable[[Sequence[Tensor], ToldSettings], Tensor]) -> TensorChange:
    """A change of one tensor."""
    return TensorChange(name, (name,), make)

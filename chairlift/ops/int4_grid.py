"""Weights rounded to 4 bits in plain torch: what native/int4_grid.h is tested against, and says more of."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Weights of an output that have a factor and an offset of their own.
GROUP = 32
_HIGHEST, _MOST_FACTOR, _MOST_OFFSET = 15, 16, 128
# A step is told apart from this many units on; weights may be so far from its grid.
_LEAST_STEP, _OFF = 3.0, 0.5
_UNITS_TRIED, _LARGEST_UNIT = 16, 1.3


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights [N, D] to 4 bits with a factor and an offset for each 32 of an output, and a scale for each output.

    Returns factor * number - offset, [N, D] int8, and the scales, [N, 1]: their product is nearly the weight. Of the
    factors and offsets around those that reach from the lowest to the highest weight of a group, the ones with the
    least squares are taken. Weights that lie on a grid of at most 16 points keep their numbers on it where that is
    nearer, and the scale is chosen so that most of these grids fit.
    """
    outs, ins = weight.shape
    highest = weight.float().abs().amax(-1, keepdim=True)
    padded = F.pad(weight.float() * torch.where(highest > 0, 127 / highest, 0.0), (0, -ins % GROUP))
    groups = padded.view(outs, -1, GROUP)
    step, spread = _steps(groups)
    unit = _unit_for(step, spread)
    groups, step = groups / unit[..., None], step / unit[..., None]
    made, error = _nearest_numbers(groups)
    for below in (0, 1):
        factor = (step.floor().clamp(1, _MOST_FACTOR) + below).clamp(max=_MOST_FACTOR)
        tried, squares = _same_numbers(groups, step, factor)
        nearer = squares < error
        made, error = torch.where(nearer, tried, made), torch.where(nearer, squares, error)
    return made.view(outs, -1)[:, :ins].to(torch.int8), highest / 127 * unit


def _steps(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The largest steps by which groups [N, G, 32] lie on a grid, or 0, and variances of their numbers: [N, G, 1]."""
    low = groups.amin(-1, keepdim=True)
    span = groups.amax(-1, keepdim=True) - low
    step, spread = torch.zeros_like(low), torch.zeros_like(low)
    for count in range(_HIGHEST, 0, -1):
        each = span / count
        place = (groups - low) / each.clamp(min=1e-9)
        off = (place - place.round()).abs().amax(-1, keepdim=True) * each
        found = (off <= _OFF) & (each >= _LEAST_STEP)
        variance = place.round().var(-1, correction=0, keepdim=True)
        step, spread = torch.where(found, each, step), torch.where(found, variance, spread)
    return step, spread


def _unit_for(step: Tensor, spread: Tensor) -> Tensor:
    """How much larger than the smallest possible the units of outputs should be, [N, 1], for steps [N, G, 1]."""
    known = step > 0
    best, least = torch.ones_like(step[:, 0]), torch.full_like(step[:, 0], torch.inf)
    for tried in range(_UNITS_TRIED + 1):
        unit = 1 + (_LARGEST_UNIT - 1) * tried / _UNITS_TRIED
        apart = (step / unit - (step / unit).round().clamp(max=_MOST_FACTOR)) * unit
        error = torch.where(known, apart.square() * spread + unit**2 / 12, 0.0).sum(1)
        better = error < least
        best, least = torch.where(better, unit, best), torch.where(better, error, least)
    return torch.where(known.float().mean(1) > 0.5, best, 1.0)


def _near(factor: Tensor, offset: Tensor, highest: Tensor | int = _HIGHEST) -> Tensor:
    """The offset nearest to this one by which numbers from 0 to `highest` fit a byte."""
    return torch.maximum(offset.round(), (highest * factor - 127).clamp(min=0)).clamp(max=_MOST_OFFSET)


def _squares(groups: Tensor, made: Tensor) -> Tensor:
    return (made - groups).square().sum(-1, keepdim=True)


def _nearest_numbers(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Factor * number - offset by the best grids that are tried, and the sums of squares that they are off."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    middle = ((high - low) / _HIGHEST).round()
    best, least = torch.zeros_like(groups), torch.full_like(low, torch.inf)
    for more in (-1, 0, 1):
        factor = (middle + more).clamp(1, _MOST_FACTOR)
        centre = (_HIGHEST * factor - low - high) / 2
        for shift in (-2, -1, 0, 1, 2):
            offset = _near(factor, centre + 0.2 * shift * factor)
            made = ((groups + offset) / factor).round().clamp(0, _HIGHEST) * factor - offset
            squares = _squares(groups, made)
            better = squares < least
            best, least = torch.where(better, made, best), torch.where(better, squares, least)
    return best, least


def _same_numbers(groups: Tensor, step: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """As `_nearest_numbers`, by the numbers that weights have on a grid of this step; where it is 0 infinitely off."""
    place = (groups - groups.amin(-1, keepdim=True)) / step.clamp(min=1e-9)
    numbers = place.round().clamp(max=_HIGHEST)
    top = numbers.amax(-1, keepdim=True)
    offset = _near(factor, (factor * numbers - groups).mean(-1, keepdim=True), top)
    made = factor * numbers - offset
    fits = (step > 0) & (top * factor - offset <= 127)
    return made, torch.where(fits, _squares(groups, made), torch.inf)

"""Grids of 4 bits: how near weights are under them, and that those which had a grid keep it."""

from collections.abc import Callable

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from support.native_isa import ISAS, kernels_of, needs_native
from torch import Tensor

from chairlift.ops.cpu import CpuOps
from chairlift.ops.int4_grid import GROUP, quantize_int4

OUTS, INS = 200, 640


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_groups(weight: Tensor, size: int, is_symmetric: bool) -> Tensor:
    """As GPTQ and AWQ round: a scale, and where asymmetric a zero point, for each group of one output's weights."""
    groups = weight.view(len(weight), -1, size)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = groups.abs().amax(-1, keepdim=True) / 7.5 if is_symmetric else (high - low) / 15
    scale = scale.half().float()
    zero = torch.full_like(scale, 8) if is_symmetric else (-low / scale).round()
    return (((groups / scale).round() + zero).clamp(0, 15) - zero).mul(scale).view(weight.shape)


def in_ggml(weight: Tensor, kind: str) -> Tensor:
    """There and back by the package's own rounding."""
    number = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(weight.numpy(), number), number).copy())


def in_super_blocks(weight: Tensor) -> Tensor:
    """As Q4_K: eight groups share what 6 bits of each, for its scale and its lowest weight, are multiples of."""
    groups = weight.view(len(weight), -1, 8, GROUP)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    parts = []
    for each in ((high - low) / 15, -low):
        unit = (each.amax(2, keepdim=True) / 63).half().float()
        parts.append((each / unit).round() * unit)
    scale, least = parts
    return (((groups + least) / scale).round().clamp(0, 15) * scale - least).view(weight.shape)


# What lies on a grid, and what of its norm is lost by rounding it.
GRIDS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "Q4_0": (lambda weight: in_ggml(weight, "Q4_0"), 0.0235),
    "Q4_1": (lambda weight: in_ggml(weight, "Q4_1"), 0.0259),
    "Q4_K": (lambda weight: in_super_blocks(weight[:, :512]), 0.0250),
    "a scale, 128": (lambda weight: in_groups(weight, 128, True), 0.0162),
    "a zero point, 128": (lambda weight: in_groups(weight, 128, False), 0.0161),
    "a zero point, 32": (lambda weight: in_groups(weight, 32, False), 0.0255),
}


def lost(made: Tensor, weight: Tensor) -> float:
    return float((made.double() - weight.double()).norm() / weight.double().norm())


def native_numbers(weight: Tensor, isa: str) -> Tensor:
    with kernels_of(isa):
        return CpuOps(weight.dtype, "int4").head(weight).embed(torch.arange(len(weight)))


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_that_lie_on_a_grid_keep_it(grid: str) -> None:
    """Of the same weights in another order, in which groups mix, as much is lost as of those that were on no grid."""
    make, expected = GRIDS[grid]
    weight = make(random(OUTS, INS)).bfloat16().float()
    mixed = weight[:, torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))]
    found = [lost(steps * scales, each) for each in (weight, mixed) for steps, scales in [quantize_int4(each)]]
    assert found[0] == pytest.approx(expected, abs=0.0005)
    assert found[1] > 0.065


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_grids_are_as_near(dtype: torch.dtype, isa: str) -> None:
    """On grids, on none, in part, in rows that end within a group, of any size."""
    plain = random(24, 330)
    mixed = torch.cat([in_groups(plain[:, :320], 64, True)[:, :128], plain[:, 128:]], dim=1)
    for weight in (plain, mixed, *(make(random(24, INS)) for make, _ in GRIDS.values())):
        for size in (1.0, 1e-20, 1e20):
            given = (weight * size).to(dtype)
            wanted, scales = quantize_int4(given)
            errors = [lost(made, given.float()) for made in (wanted * scales, native_numbers(given, isa))]
            # What is read back is rounded to bfloat16.
            assert errors[1] <= 1.001 * errors[0] + (0.002 if dtype == torch.bfloat16 else 0)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_unusual_weights_stay_what_they_are(isa: str) -> None:
    """All alike, of one sign, two values, next to nothing, and what is no number: that output's alone."""
    weight = random(12, 96)
    weight[0] = 0
    weight[1] = 0.25
    weight[2] = weight[2].abs() + 1
    weight[3] = -weight[3].abs() - 1
    weight[4] = weight[4].sign()
    weight[5] *= 1e-40
    weight[6, 5] = torch.nan
    weight[7, 5] = torch.inf
    found = native_numbers(weight, isa)
    assert not found[0].any()
    for row in (1, 4):
        assert torch.allclose(found[row], weight[row], rtol=0.01)
    for row in (2, 3):
        assert lost(found[row], weight[row]) < 0.05
    assert found[5].abs().max() < 1e-38
    assert not found[6].isfinite().any()
    assert not found[7].isfinite().any()
    assert lost(found[8:], weight[8:]) < 0.09


def test_grids_have_nearly_the_least_squares_that_any_have() -> None:
    weight = random(24, 320) * random(24, 1, seed=1).exp()
    steps, scales = quantize_int4(weight)
    groups, units = steps.float().view(24, 10, GROUP), (weight / scales).view(24, 10, GROUP)
    least = torch.full((24, 10), torch.inf)
    for factor in range(1, 17):
        for offset in range(max(0, 15 * factor - 127), 129):
            made = ((units + offset) / factor).round().clamp(0, 15) * factor - offset
            least = least.minimum((made - units).square().sum(-1))
    assert (groups - units).square().sum() <= 1.05 * least.sum()


def test_offsets_and_good_factors_lose_less_than_scales_alone() -> None:
    """Of normally distributed weights, beside a float scale for each 32 by the rule of Q4_0."""
    weight = random(OUTS, INS)
    steps, scales = quantize_int4(weight)
    assert lost(steps * scales, weight) == pytest.approx(0.073, abs=0.001)
    assert lost(in_ggml(weight, "Q4_0"), weight) == pytest.approx(0.086, abs=0.001)

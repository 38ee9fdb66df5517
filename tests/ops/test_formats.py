"""The table of weight formats against the kernels': what each holds, and that packing loses no more than it says."""

from collections.abc import Iterator

import pytest
import torch
from support.native_isa import ISAS, kernels_of, needs_native

from chairlift.ops.formats import FORMATS, PANEL, WeightFormat
from chairlift.ops.native import load_library
from chairlift.ops.packed import PackedWeight


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_of(request.param):
        yield request.param


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
def test_the_kernels_know_each_format_as_the_table_has_it(weight_format: WeightFormat, isa: str) -> None:
    info = load_library()[0].chairlift_format(weight_format.id).contents
    assert info.name.decode() == weight_format.name
    assert (info.bits, info.inputs) == (weight_format.bits, weight_format.inputs)
    assert (info.block_inputs, info.block_bytes) == weight_format.block
    assert (info.scaled, info.compensated) == (weight_format.scaled, weight_format.compensated)


@needs_native
def test_the_table_has_every_format_of_the_kernels() -> None:
    library = load_library()[0]
    assert [each.id for each in FORMATS.values()] == list(range(len(FORMATS)))
    assert not library.chairlift_format(len(FORMATS))
    assert not library.chairlift_format(-1)


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(32, 64), (33, 30), (250, 34), (7, 4), (100, 3), (1600, 577)], ids=str)
def test_a_packed_weight_reads_back(
    weight_format: WeightFormat, dtype: torch.dtype, shape: tuple[int, int], isa: str
) -> None:
    """Packing and reading back is there on every processor, whoever multiplies."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = torch.arange(shape[0]).flip(0)
    found = PackedWeight(load_library()[0], weight, None, weight_format).embed(ids).float()
    exact = weight[ids].float()
    steps = 2 ** (weight_format.bits - 1) - 1
    # Half a step; of 4 bits a group's farthest may be off by a whole one, where that brings the others nearer.
    part = 1 if weight_format.bits == 4 else 0.5001
    most = exact.abs().amax(-1, keepdim=True) / steps * part if weight_format.scaled else 0
    # Numbers that are kept as bfloat16, or read back as such, are rounded to 8 bits.
    rounded = weight_format.rows == torch.bfloat16 or dtype == torch.bfloat16
    assert ((found - exact).abs() <= most + rounded * exact.abs() * 2**-8).all()
    if not weight_format.scaled and dtype == weight_format.rows:
        assert torch.equal(found, exact)


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
def test_panels_are_filled_up_to_whole_blocks(weight_format: WeightFormat) -> None:
    inputs, size = weight_format.block
    assert inputs % weight_format.inputs == 0
    for ins in (1, 4, 130, 577):
        assert weight_format.packed_bytes(3, ins) == 3 * size * -(-ins // inputs)
        assert weight_format.packed_bytes(3, ins) >= 3 * PANEL * ins * weight_format.bits // 8

"""The table of weight formats against the kernels': what each holds, and that packing loses no more than it says."""

from collections.abc import Iterator

import pytest
import torch
from support.native_isa import ISAS, kernels_of, needs_native

from chairlift.ops.cpu import CpuOps
from chairlift.ops.formats import FORMATS, HALVES, PANEL, WeightFormat, narrowest
from chairlift.ops.native import load_library, product_path
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
    # Numbers that are kept as bfloat16, or read back as such, are rounded to 8 bits, and those as float16 to 11.
    kept = HALVES.get(weight_format.name, weight_format.rows)
    rounded = 2**-8 if torch.bfloat16 in (kept, dtype) else 2**-11 if kept == torch.float16 else 0
    smallest = 2**-25 if kept == torch.float16 else 0
    assert ((found - exact).abs() <= most + rounded * exact.abs() + smallest).all()
    if not weight_format.scaled:
        assert torch.equal(found, exact.to(kept).to(dtype).float())


def test_every_number_of_float16_is_kept(isa: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.float16).float()
    numbers = numbers[numbers.isfinite()].view(-1, 128)
    library, own = load_library()[0], FORMATS["float16"]
    packed = PackedWeight(library, numbers, None, own)
    ids = torch.arange(len(numbers))
    # Zeros keep their signs, too.
    assert torch.equal(packed.embed(ids).view(torch.int32), numbers.view(torch.int32))
    if product_path(library, own) is not None:
        assert torch.equal(packed.logits(torch.eye(128)), numbers.T)


def test_float16_takes_the_nearest_of_two(isa: str) -> None:
    halfway = torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 65519, 65520, 1e9, float("nan")]])
    halfway = torch.cat([halfway, -halfway])
    found = PackedWeight(load_library()[0], halfway, None, FORMATS["float16"]).embed(torch.arange(2))
    torch.testing.assert_close(found, halfway.half().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("rows", [1, 4, 13, 200])
@pytest.mark.parametrize("shape", [(33, 30), (96, 130), (1600, 577)], ids=str)
def test_products_of_16_bits_are_those_of_float32(shape: tuple[int, int], rows: int, name: str, isa: str) -> None:
    """To the bit: they are widened, and summed in the same order."""
    library = load_library()[0]
    if product_path(library, FORMATS[name]) is None:
        pytest.skip(f"{isa} leaves them to oneDNN")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(*shape, generator=generator).to(HALVES[name]).float()
    x, bias = torch.randn(rows, shape[1], generator=generator), torch.randn(shape[0], generator=generator)
    found, wanted = (PackedWeight(library, weight, bias, FORMATS[each]) for each in (name, "float32"))
    assert torch.equal(found(x), wanted(x))
    assert torch.equal(found.best(x)[1], wanted.best(x)[1])


@needs_native
@pytest.mark.parametrize(
    ("name", "others"),
    [("float16", [1 + 2**-11, 2**-25, 1e6, float("nan")]), ("wide_bfloat16", [1 + 2**-8, 2**-140, float("nan")])],
)
def test_weights_that_16_bits_hold_are_kept_so(name: str, others: list[float]) -> None:
    ops = CpuOps(torch.float32)
    if product_path(load_library()[0], FORMATS[name]) is None:
        pytest.skip("they are left to oneDNN here")
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)).to(HALVES[name]).float()
    assert narrowest(weight) is FORMATS[name]
    assert ops.linear(weight, None).nbytes == 2 * weight.numel()
    # One number in the last row is enough.
    for other in others:
        changed = weight.clone()
        changed[63, 4095] = other
        assert narrowest(changed) is FORMATS["float32"]
        assert ops.linear(changed, None).nbytes == 4 * weight.numel()


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
def test_panels_are_filled_up_to_whole_blocks(weight_format: WeightFormat) -> None:
    inputs, size = weight_format.block
    assert inputs % weight_format.inputs == 0
    for ins in (1, 4, 130, 577):
        assert weight_format.packed_bytes(3, ins) == 3 * size * -(-ins // inputs)
        assert weight_format.packed_bytes(3, ins) >= 3 * PANEL * ins * weight_format.bits // 8

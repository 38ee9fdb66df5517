"""Products with packed weights of every format, against the reference, on every set of native kernels.

How int8 rounds a number halfway between two steps is open: a fused multiply-add sees more digits of x * (127 / highest)
than the rounded product that torch makes, and in bfloat16 such numbers are not rare. So what the kernels rounded to is
read back and checked on its own, to be the nearest steps but for ties; the sums of those steps must then be exact.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.native_isa import ISAS, kernels_of, needs_native, runs_here, torch_threads
from torch import Tensor

from chairlift.ops import native
from chairlift.ops.activation import Activation, activate
from chairlift.ops.base import Allowed, Quantization
from chairlift.ops.cpu import CpuOps, OneDnnLinear, product_rows
from chairlift.ops.formats import FORMATS
from chairlift.ops.int4_grid import quantize_int4
from chairlift.ops.native import load_library, product_path
from chairlift.ops.packed import PackedWeight
from chairlift.ops.reference import ReferenceOps, quantize

# (outs, ins): whole panels and not, inputs that fill their last step of four and not.
SHAPES = [(32, 64), (33, 30), (96, 130), (250, 34), (7, 4), (64, 577), (100, 3)]
ROWS = [1, 2, 4, 7, 10, 11, 12, 13, 24, 25, 48, 97, 200]
Kind = tuple[torch.dtype, Quantization]
KINDS: list[Kind] = [
    (torch.bfloat16, "none"),
    (torch.float32, "none"),
    (torch.bfloat16, "int8"),
    (torch.float32, "int8"),
    (torch.bfloat16, "int4"),
    (torch.float32, "int4"),
]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_of(request.param):
        yield request.param


def name_of(kind: Kind) -> str:
    dtype, quantization = str(kind[0]).removeprefix("torch."), kind[1]
    return dtype if quantization == "none" else f"{quantization}-{dtype}"


@pytest.fixture(params=KINDS, ids=name_of)
def kind(request: pytest.FixtureRequest, isa: str) -> Kind:
    own = FORMATS.get(name_of(request.param))
    if own is not None and product_path(load_library()[0], own) is None:
        pytest.skip(f"{isa} leaves {own.name} products to oneDNN")
    return request.param


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(
    kind: Kind, outs: int, ins: int, bias: bool = False, gated: bool = False
) -> tuple[PackedWeight, Tensor, Tensor | None]:
    """A packed weight, and the weight and the bias that are in it."""
    dtype, quantization = kind
    if kind == (torch.bfloat16, "none"):
        ins += ins % 2  # the native products take pairs of inputs; others go to oneDNN
    weight = random(outs, ins, dtype=dtype)
    offset = random(outs, dtype=dtype, seed=1) if bias else None
    ops = CpuOps(dtype, quantization)
    packed = ops.gated_linear(weight, offset) if gated else ops.linear(weight, offset)
    assert isinstance(packed, PackedWeight)
    return packed, weight, offset


def steps_of_rows(kind: Kind, x: Tensor) -> Tensor:
    """The whole numbers [T, in] that the kernels round rows to, whatever the weights: as those of 8 bits show them."""
    identity = torch.eye(x.shape[1], dtype=kind[0])
    unit = x.float().abs().amax(-1, keepdim=True) / 127
    return nearest(x, (CpuOps(kind[0], "int8").head(identity).logits(x) / unit).nan_to_num(0))


def rounded_weight(kind: Kind, weight: Tensor) -> Tensor | None:
    """What the kernels round a weight to, [out, in] float64, if they do."""
    if kind[1] == "none":
        return None
    rows = CpuOps(*kind).head(weight).embed(torch.arange(len(weight))).float()
    if kind[1] == "int4":
        return on_good_grids(weight, rows)
    unit = weight.float().abs().amax(-1, keepdim=True) / 127
    return nearest(weight, (rows / unit).nan_to_num(0)) * unit.double()


def on_good_grids(exact: Tensor, found: Tensor) -> Tensor:
    """What was found, not rounded, once it is clear that each group is told apart as 4 bits can, and as well."""
    wanted, scales = quantize_int4(exact)
    steps = (found / scales).nan_to_num(0).double().round()
    for group in steps.split(32, dim=-1):
        assert (group.sort().values.diff() != 0).sum(-1).max() < 16
    assert steps.abs().max() <= 128
    errors = [(each.double() * scales - exact.double()).square().sum() for each in (steps, wanted)]
    assert errors[0] <= 1.0001 * errors[1]
    # Of bfloat16 weights some grids are as good as others.
    assert (steps != wanted).double().mean() < 0.01
    return steps * scales.double()


def nearest(exact: Tensor, found: Tensor) -> Tensor:
    """Steps `found`, once it is clear that they are the nearest ones."""
    # A product rounded to bfloat16 is at most a quarter of a step off.
    steps = found.double().round()
    highest = exact.double().abs().amax(-1, keepdim=True)
    assert ((steps - (exact.double() * 127 / highest).nan_to_num(0)).abs() <= 0.5 + 1e-4).all()
    by_reference, _ = quantize(exact)
    assert (steps != by_reference).double().mean() < 0.02
    return steps


def expected_sums(
    kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None, rounded: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x * weight^T + bias in float64, and how far a float32 result may be from it.

    `rounded` is the weight as it is packed, found once for all rows.
    """
    if rounded is not None:
        sums = steps_of_rows(kind, x) * (x.double().abs().amax(-1, keepdim=True) / 127) @ rounded.T
        most = 1e-6 * sums.abs() + 1e-12  # what float64 leaves of sums that are 0
    else:
        sums = x.double() @ weight.double().T
        most = 1e-5 * (x.double().abs() @ weight.double().abs().T)
    return (sums, most) if bias is None else (sums + bias, most + 1e-6 * bias.abs())


def assert_near(actual: Tensor, expected: Tensor, most: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    if dtype == torch.bfloat16:
        most = most + expected.abs() * 2**-8
    assert (error <= most).all(), f"{(error - most).max()} beyond the bound"


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_that_of_the_reference(kind: Kind, shape: tuple[int, int], bias: bool) -> None:
    packed, weight, offset = make(kind, *shape, bias=bias)
    rounded, by_reference = rounded_weight(kind, weight), ReferenceOps(kind[1]).linear(weight, offset)
    for rows in ROWS:
        x = random(rows, weight.shape[1], dtype=kind[0], seed=rows)
        wanted, most = expected_sums(kind, x, weight, offset, rounded)
        assert packed(x).dtype == kind[0]
        assert_near(packed(x), wanted, most, kind[0])
        # A few ties apart this is what the reference gives.
        reference = by_reference(x).float()
        assert (packed(x) - reference).float().square().mean() < 1e-3 * reference.square().mean()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("shape", [(64, 64), (33, 30), (7, 4)], ids=str)
def test_activated_linear_is_the_activation_of_a_linear(
    kind: Kind, shape: tuple[int, int], activation: Activation
) -> None:
    _, weight, offset = make(kind, *shape, bias=True)
    packed = CpuOps(*kind).activated_linear(weight, offset, activation)
    assert isinstance(packed, PackedWeight)
    rounded = rounded_weight(kind, weight)
    for rows in (1, 13, 48):
        x = random(rows, weight.shape[1], dtype=kind[0], seed=rows)
        sums, most = expected_sums(kind, x, weight, offset, rounded)
        # No activation is steeper than 1.13, nor is ours further than that from the exact one.
        assert_near(packed(x), activate(sums, activation), 1.2 * most + 2e-6 * sums.abs() + 2e-6, kind[0])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(64, 64), (66, 30), (2 * 50, 130), (14, 7), (2 * 33, 577)], ids=str)
def test_gated_linear_is_that_of_the_reference(kind: Kind, shape: tuple[int, int], bias: bool) -> None:
    packed, weight, offset = make(kind, *shape, bias=bias, gated=True)
    rounded, by_reference = rounded_weight(kind, weight), ReferenceOps(kind[1]).gated_linear(weight, offset)
    for rows in ROWS:
        x = random(rows, weight.shape[1], dtype=kind[0], seed=rows)
        sums, bounds = expected_sums(kind, x, weight, offset, rounded)
        (gate, up), (gate_most, up_most) = sums.chunk(2, dim=-1), bounds.chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(gate) * up
        # The slope of SiLU is at most 1.1.
        most = 1.1 * gate_most * up.abs() + gate.abs() * up_most + 1e-6 * wanted.abs() + 1e-6
        assert_near(packed(x), wanted, most, kind[0])
        reference = by_reference(x).float()
        assert (packed(x) - reference).float().square().mean() < 1e-3 * reference.square().mean()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_gated_linears_have_other_activations(kind: Kind, activation: Activation) -> None:
    dtype, quantization = kind
    weight, x = random(2 * 50, 130, dtype=dtype) / 8, random(33, 130, dtype=dtype, seed=1)
    found = CpuOps(dtype, quantization).gated_linear(weight, None, activation)(x)
    wanted = ReferenceOps(quantization).gated_linear(weight, None, activation)(x)
    assert (found - wanted).float().square().mean() < 1e-4 * wanted.float().square().mean()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_head_is_that_of_the_reference(kind: Kind, shape: tuple[int, int]) -> None:
    head, weight, _ = make(kind, *shape)
    ids = torch.arange(shape[0]).flip(0).repeat(2)
    rounded = rounded_weight(kind, weight)
    if rounded is None:
        assert torch.equal(head.embed(ids), weight[ids])
    else:
        assert torch.equal(head.embed(ids), rounded.float().to(kind[0])[ids])
    for rows in ROWS:
        hidden = random(rows, weight.shape[1], dtype=kind[0], seed=rows)
        logits = head.logits(hidden)
        assert logits.dtype == torch.float32
        assert_near(logits, *expected_sums(kind, hidden, weight, None, rounded), torch.float32)
        values, indices = head.best(hidden)
        assert torch.equal(values, logits.amax(-1))
        assert torch.equal(indices, logits.argmax(-1))


def test_the_first_of_equal_logits_is_best(kind: Kind) -> None:
    """Within a panel, in another panel, and in another thread's panels, which lie far behind."""
    row = random(1, 64, dtype=kind[0])
    for tied in ([3, 5], [40, 7], [2000, 31, 32], [2999, 1500], [0, 2999]):
        weight = random(3000, 64, dtype=kind[0], seed=1) / 8
        weight[tied] = row
        head = CpuOps(*kind).head(weight)
        hidden = torch.cat((row, random(200, 64, dtype=kind[0], seed=2), row))
        _, indices = head.best(hidden)
        assert indices[0] == indices[-1] == min(tied)
        assert torch.equal(indices, head.logits(hidden).argmax(-1))
    values, indices = CpuOps(*kind).head(torch.zeros(50, 64, dtype=kind[0])).best(hidden)
    assert values.tolist() == indices.tolist() == [0] * len(hidden)


def bits_of(allowed: Tensor) -> list[Tensor]:
    """For each of R rows its words, as in `Allowed`, with a bit for each true value of [R, V]."""
    rows, vocab = allowed.shape
    padded = torch.zeros(rows, -(-vocab // 32) * 32, dtype=torch.uint8)
    padded[:, :vocab] = allowed
    packed = np.packbits(padded.numpy(), axis=1, bitorder="little")
    return list(torch.from_numpy(packed.view(np.int32)))


@pytest.mark.parametrize("vocab", [31, 64, 3000])
@pytest.mark.parametrize("share", [0.5, 0.001])
def test_only_what_is_allowed_can_be_best(kind: Kind, vocab: int, share: float) -> None:
    head = CpuOps(*kind).head(random(vocab, 64, dtype=kind[0], seed=1))
    hidden = random(40, 64, dtype=kind[0], seed=2)
    allowed = torch.rand(40, vocab, generator=torch.Generator().manual_seed(3)) < share
    allowed[0], allowed[1] = True, False
    allowed[2:, 5] = True
    allowed[3::4] = True
    bits: Allowed = [None if index % 4 == 3 else row for index, row in enumerate(bits_of(allowed))]
    excluded = head.logits(hidden).float().masked_fill(~allowed, -torch.inf)
    values, indices = head.best(hidden, bits)
    assert torch.equal(values, excluded.amax(-1))
    assert values[1] == -torch.inf
    assert torch.equal(indices[allowed.any(-1)], excluded.argmax(-1)[allowed.any(-1)])
    for ops in (CpuOps(*kind), ReferenceOps()):
        logits = head.logits(hidden).float().contiguous()
        ops.exclude(logits, bits)
        assert torch.equal(logits, excluded)
        # The vocabulary may have more tokens than there are logits.
        wide = [None if row is None else torch.cat((row, torch.ones(2, dtype=torch.int32))) for row in bits]
        logits = head.logits(hidden).float().contiguous()
        ops.exclude(logits, wide)
        assert torch.equal(logits, excluded)
        ops.exclude(logits, [None] * len(wide))
        assert torch.equal(logits, excluded)
    assert torch.equal(head.best(hidden, bits_of(torch.ones_like(allowed)))[1], head.best(hidden)[1])


@pytest.mark.parametrize("vocab", [5, 64, 3000])
@pytest.mark.parametrize("threads", [1, 2])
def test_candidates_are_the_likeliest_in_their_order(kind: Kind, vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    # Each is there twice, so that logits tie; the first counts.
    weight = random(-(-vocab // 2), 64, dtype=kind[0], seed=1).repeat(2, 1)[:vocab]
    head = CpuOps(*kind).head(weight)
    hidden = random(70, 64, dtype=kind[0], seed=2)
    allowed = torch.rand(70, vocab, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed[0], allowed[1] = True, False
    allowed[3::4] = True
    mixed: Allowed = [None if index % 4 == 3 else row for index, row in enumerate(bits_of(allowed))]
    for bits, some in ((None, torch.ones_like(allowed)), (mixed, allowed)):
        logits = head.logits(hidden).float().masked_fill(~some, -torch.inf)
        expected, order = logits.sort(dim=-1, descending=True, stable=True)
        # Others of a row of which not all are allowed are not looked for.
        expected[[index for index in range(70) if bits and bits[index] is not None], 1:] = -torch.inf
        values, tokens = head.candidates(hidden, bits)
        count = min(head.num_candidates, vocab)
        assert torch.equal(values[:, :count], expected[:, :count])
        assert (values[:, count:] == -torch.inf).all()
        real = values[:, :count].isfinite()
        assert torch.equal(tokens[:, :count][real], order[:, :count][real])
        best, first = head.best(hidden, bits)
        assert torch.equal(best, values[:, 0])
        assert torch.equal(first, tokens[:, 0])


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("shape", [(96, 130), (1600, 577)], ids=str)
def test_a_row_is_the_same_in_any_company_and_on_any_threads(kind: Kind, shape: tuple[int, int], gated: bool) -> None:
    packed, weight, _ = make(kind, *shape, bias=True, gated=gated)
    x = random(230, weight.shape[1], dtype=kind[0], seed=2)
    whole = packed(x)
    torch.set_num_threads(1)
    assert torch.equal(packed(x), whole)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        # The first and the last rows in turn.
        for index, count in enumerate(ROWS, threads):
            part = slice(0, count) if index % 2 else slice(230 - count, 230)
            assert torch.equal(packed(x[part].contiguous()), whole[part])
        for row in (0, 5, 113, 229):
            assert torch.equal(packed(x[row : row + 1]), whole[row : row + 1])


def test_logits_and_best_are_the_same_in_any_company_and_on_any_threads(
    kind: Kind,
) -> None:
    head, weight, _ = make(kind, 3000, 128)
    hidden = random(60, weight.shape[1], dtype=kind[0], seed=2)
    logits, (values, indices) = head.logits(hidden), head.best(hidden)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for first, last in ((0, 60), (0, 1), (7, 8), (3, 16), (59, 60)):
            part = hidden[first:last].contiguous()
            assert torch.equal(head.logits(part), logits[first:last])
            assert torch.equal(head.best(part)[0], values[first:last])
            assert torch.equal(head.best(part)[1], indices[first:last])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [1, 5, 48])
def test_what_is_no_number_stays_in_its_row(kind: Kind, bad: float, rows: int) -> None:
    packed, _, _ = make(kind, 96, 130)

    def first_of(x: torch.Tensor) -> torch.Tensor:
        return packed.candidates(x)[0][:, 0]

    x = random(rows, 130, dtype=kind[0], seed=3)
    clean = packed(x)
    broken, others = x.clone(), torch.arange(rows) != rows // 2
    broken[rows // 2, 77] = bad
    for out in (packed(broken), packed.logits(broken)):
        assert not out[rows // 2].isfinite().any()
    assert torch.equal(packed(broken)[others], clean[others])
    for values, expected in ((packed.best(broken)[0], packed.best(x)[0]), (first_of(broken), first_of(x))):
        assert not values[rows // 2].isfinite()
        assert torch.equal(values[others], expected[others])


def test_a_broken_weight_is_noticed(kind: Kind) -> None:
    _, weight, _ = make(kind, 96, 130)
    weight[41, 3] = float("nan")
    out = CpuOps(*kind).linear(weight, None)(random(5, 130, dtype=kind[0]))
    assert out[:, 41].isnan().all()
    assert out[:, torch.arange(96) != 41].isfinite().all()
    assert CpuOps(*kind).head(weight).best(random(5, 130, dtype=kind[0]))[0].isnan().all()


def test_zeros_give_the_bias(kind: Kind) -> None:
    packed, weight, offset = make(kind, 96, 130, bias=True)
    assert offset is not None
    x = random(30, 130, dtype=kind[0])
    x[4] = 0
    assert torch.equal(packed(x)[4], offset)
    weight[17] = 0
    part = CpuOps(*kind).linear(weight, offset)(x)
    assert torch.equal(part[:, 17], offset[17].expand(30))
    assert torch.equal(part[:, 18:], packed(x)[:, 18:])
    assert torch.equal(CpuOps(*kind).linear(torch.zeros_like(weight), None)(x), torch.zeros(30, 96, dtype=kind[0]))


def test_magnitudes_of_any_size_keep_their_ratio(kind: Kind) -> None:
    """A scale for each row and each output: powers of two change nothing but the result's exponent."""
    packed, weight, _ = make(kind, 96, 130)
    x = random(20, 130, dtype=kind[0])
    for power in (-40, 40):
        assert torch.equal(packed.logits(x * 2.0**power), packed.logits(x) * 2.0**power)
        assert torch.equal(CpuOps(*kind).head(weight * 2.0**power).logits(x), packed.logits(x) * 2.0**power)


def test_nothing_to_do_is_no_error(kind: Kind) -> None:
    packed, weight, _ = make(kind, 96, 130)
    x = torch.empty(0, weight.shape[1], dtype=kind[0])
    assert packed(x).shape == packed.logits(x).shape == (0, 96)
    assert [part.shape for part in packed.best(x)] == [(0,), (0,)]
    assert packed.embed(torch.empty(0, dtype=torch.int64)).shape == (0, 130)


def test_a_weight_takes_as_many_bits_as_its_format_says(kind: Kind) -> None:
    packed, weight, _ = make(kind, 1024, 512)
    # One of 4 bits has a 32nd part of two bytes besides.
    each = {"none": kind[0].itemsize, "int8": 1, "int4": 0.5 + 1 / 16}[kind[1]]
    assert 0 <= packed.nbytes - each * weight.numel() <= 8 * 1024


@needs_native
@pytest.mark.parametrize("ops", [ReferenceOps("int8"), CpuOps(torch.float32, "int8")], ids=["reference", "native"])
def test_rounding_is_to_the_nearest_of_255_steps(ops: ReferenceOps | CpuOps) -> None:
    """Against the plain product: each factor is at most half a step off, so errors stay within what that makes."""
    weight, x = random(96, 130), random(20, 130, seed=1)
    found = ops.linear(weight, None)(x)
    steps = [value.abs().amax(-1, keepdim=True) / 127 for value in (x, weight)]
    most = (x.abs().sum(-1, keepdim=True) * steps[1].T + steps[0] * weight.abs().sum(-1)) / 2
    error = (found - x @ weight.T).abs()
    assert (error <= most + 130 * steps[0] * steps[1].T / 4).all()
    # Errors of unlike sign cancel: the usual one is far smaller.
    assert 0 < error.mean() < 0.1


def test_bfloat16_in_float32_is_nearer_than_in_pairs() -> None:
    """Against float64, where a processor can do both."""
    weight, x = random(96, 1536, dtype=torch.bfloat16), random(40, 1536, dtype=torch.bfloat16, seed=1)
    exact = x.double() @ weight.double().T
    errors = {}
    for isa in ("avx512bf16", "avx512vnni", "avx2"):
        with kernels_of(isa):
            found = CpuOps(torch.bfloat16).head(weight).logits(x)
            errors[isa] = float((found.double() - exact).norm() / exact.norm())
    assert errors["avx512vnni"] == errors["avx2"] < 0.6 * errors["avx512bf16"]
    assert errors["avx2"] < 2e-7


def test_float32_is_as_near_as_its_sums_allow(isa: str) -> None:
    """Against float64. Sets of kernels that do not multiply it leave it to the next that run here."""
    path = product_path(load_library()[0], FORMATS["float32"])
    assert path == (None if isa == "baseline" else "avx512" if "avx512" in isa or isa == "amx" else "avx2")
    weight, x = random(96, 1536), random(40, 1536, seed=1)
    found, exact = CpuOps(torch.float32).head(weight).logits(x), x.double() @ weight.double().T
    assert (found.double() - exact).norm() < 4e-7 * exact.norm()
    # It came from our kernels, which give a row the same sums in any company.
    if path is not None:
        assert torch.equal(CpuOps(torch.float32).head(weight).logits(x[3:4]), found[3:4])


@needs_native
def test_the_faster_of_two_ways_is_found() -> None:
    library = load_library()[0]
    assert library.chairlift_faster(b"baseline", b"baseline") == b"baseline"
    assert library.chairlift_faster(b"unheard", b"baseline") is None
    if runs_here("avx512bf16"):
        assert library.chairlift_faster(b"avx512bf16", b"avx512vnni") in (b"avx512bf16", b"avx512vnni")


class TwoWays:
    """A library on a processor that has AVX-512 BF16 and no AMX."""

    def __init__(self, faster: bytes | None) -> None:
        self.faster = faster
        self.asked: list[tuple[bytes, ...]] = []

    def chairlift_select(self, name: bytes | None) -> bytes:
        return name or b"avx512bf16"

    def chairlift_faster(self, *names: bytes) -> bytes | None:
        self.asked.append(names)
        return self.faster


@pytest.mark.parametrize(("faster", "taken"), [(b"avx512vnni", "avx512vnni"), (None, "avx512bf16")])
def test_the_faster_way_is_measured_once_and_taken(
    faster: bytes | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless CHAIRLIFT_ISA says which."""
    library = TwoWays(faster)
    monkeypatch.delenv("CHAIRLIFT_ISA", raising=False)
    monkeypatch.setattr(native, "_measured", {})
    for name in ("_declare", "check_layout", "check_formats"):
        monkeypatch.setattr(native, name, lambda *_: None)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda _: library)
    assert [native.load_library()[1] for _ in range(2)] == [taken] * 2
    assert library.asked == [(b"avx512bf16", b"avx512vnni")]
    monkeypatch.setenv("CHAIRLIFT_ISA", "avx512bf16")
    assert native.load_library()[1] == "avx512bf16"
    assert len(library.asked) == 1


def test_left_to_onednn_products_come_in_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a program for each, which made a worker's heap grow by hundreds of megabytes."""
    weight, bias = torch.randn(24, 16), torch.randn(24)
    linear, sizes = OneDnnLinear(weight, bias), set()
    run = linear._run

    def noting(x: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.add(len(x))
        out: torch.Tensor = run(x, *rest)
        return out

    monkeypatch.setattr(linear, "_run", noting)
    for rows in range(1, 600):
        x = torch.randn(rows, 16)
        out = linear(x)
        assert out.is_contiguous()
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))
        assert rows <= product_rows(rows) <= 1.25 * rows
    assert len(sizes) <= 4 * 10

"""An MLP with its norm and both additions in one native call, against the operations one after the other."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.native_isa import ISAS, kernels_of, needs_native, torch_threads
from torch import Tensor

from chairlift.ops.base import AddMlp, DenseMlp, Quantization
from chairlift.ops.cpu import CpuOps
from chairlift.ops.formats import FORMATS
from chairlift.ops.native import load_library, product_path

pytestmark = needs_native
HIDDEN, WIDTH, EPS = 96, 130, 1e-5
# By how much sums may differ: one way rounds what an MLP gives before it is added to the residual.
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_of(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(ops: CpuOps, dtype: torch.dtype, biases: bool) -> tuple[Tensor, DenseMlp]:
    gate_up, down = random(2 * WIDTH, HIDDEN, dtype=dtype, seed=1), random(HIDDEN, WIDTH, dtype=dtype, seed=2)
    mlp = DenseMlp(
        ops.gated_linear(gate_up / 10, random(2 * WIDTH, dtype=dtype, seed=3) if biases else None),
        ops.linear(down / 10, random(HIDDEN, dtype=dtype, seed=4) if biases else None),
    )
    return random(HIDDEN, dtype=dtype, seed=5), mlp


def applied(add_mlp: AddMlp, added: Tensor, residual: Tensor) -> Tensor:
    found = residual.clone()
    add_mlp(added, found)
    return found


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int4"), ("float32", "int8")]
)
def test_it_gives_what_they_give_alone_and_in_company(
    isa: str, dtype: Any, quantization: Quantization, biases: bool
) -> None:
    if quantization == "none" and product_path(load_library()[0], FORMATS[dtype]) is None:
        pytest.skip(f"{isa} leaves {dtype} products to oneDNN")
    dtype = getattr(torch, dtype)
    ops = CpuOps(dtype, quantization)
    norm, mlp = made(ops, dtype, biases)
    add_mlp = ops.fuse_mlp(norm, EPS, mlp)
    assert add_mlp is not None
    added, residual = random(50, HIDDEN, dtype=dtype, seed=6), random(50, HIDDEN, dtype=dtype, seed=7)
    wanted = residual.clone()
    normed = ops.add_rms_norm(added, wanted, norm, EPS)
    wanted += mlp(normed)
    found = applied(add_mlp, added, residual)
    assert (found - wanted).abs().max() <= CLOSE[dtype] * wanted.abs().max()
    for rows in (slice(0, 1), slice(3, 10), slice(20, 49)):
        assert torch.equal(applied(add_mlp, added[rows].clone(), residual[rows]), found[rows])


def test_weights_that_are_left_to_onednn_are_not_fused() -> None:
    with kernels_of("baseline"):
        ops = CpuOps(torch.float32)
        norm, mlp = made(ops, torch.float32, biases=False)
        assert ops.fuse_mlp(norm, EPS, mlp) is None

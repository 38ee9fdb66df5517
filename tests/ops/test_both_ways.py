"""Attention of tokens that see what follows them, too: of every instruction set, the reference and PyTorch's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention_steps import close, random, run_steps
from support.native_isa import ISAS, kernels_of, needs_native

from chairlift.ops.base import HeadShape
from chairlift.ops.contract import Ops
from chairlift.ops.cpu import CpuOps
from chairlift.ops.cuda import CudaOps
from chairlift.ops.reference import ReferenceOps

WHOLE = [[(0, 1), (0, 77), (0, 300), (0, 33)]]
SHAPES = [
    # heads, kv heads, head_dim, block_size, window
    (9, 3, 64, 16, None),
    (3, 1, 256, 16, 40),
    (14, 2, 64, 32, 1),
    (6, 2, 40, 8, 17),
    (4, 2, 96, 5, 299),
    (80, 1, 64, 16, 300),
]


def heads_of(shape: tuple[Any, ...], both_ways: bool = True) -> HeadShape:
    num_heads, num_kv_heads, dim, _, window = shape
    return HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window, both_ways=both_ways)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cached", [None, torch.int8], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_as_the_reference(
    shape: tuple[Any, ...], dtype: torch.dtype, cached: torch.dtype | None, isa: str
) -> None:
    wanted = run_steps(ReferenceOps(), heads_of(shape), dtype, shape[3], WHOLE, cached=cached)
    with kernels_of(isa):
        native: Ops = CpuOps(dtype)
        together = run_steps(native, heads_of(shape), dtype, shape[3], WHOLE, cached=cached)
        alone = run_steps(native, heads_of(shape), dtype, shape[3], WHOLE, keep=[2], cached=cached)
    assert torch.equal(alone[0], together[2])
    for one, other in zip(together, wanted, strict=True):
        close(one, other) if cached is None else torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch_s_is_as_the_reference(shape: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run_steps(ReferenceOps(), heads_of(shape), torch.bfloat16, shape[3], WHOLE)
    monkeypatch.setattr(ReferenceOps, "attention", None)
    for one, other in zip(run_steps(CudaOps(), heads_of(shape), torch.bfloat16, shape[3], WHOLE), wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize("window", [None, 1, 20, 60])
def test_the_reference_is_its_definition(window: int | None) -> None:
    """Scores of all pairs, but those as far apart as the window is wide."""
    heads = HeadShape(4, 2, 32, 0.2, window, both_ways=True)
    q, k, v = (random(60, count, 32, seed=seed) for seed, count in enumerate((4, 2, 2)))
    places = torch.arange(60)
    seen = (places[:, None] - places).abs() < (window or 60)
    wanted = F.scaled_dot_product_attention(
        *(each.transpose(0, 1) for each in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))), seen, scale=0.2
    )
    found = run_steps_of(q, k, v, heads)
    torch.testing.assert_close(found, wanted.transpose(0, 1), rtol=1e-5, atol=1e-5)


def run_steps_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: HeadShape) -> torch.Tensor:
    from chairlift.ops.reference import _attend

    return _attend(q.flatten(1), k, v, heads, None).view_as(q)


def test_the_last_token_of_a_step_sees_as_much_as_before() -> None:
    """What tokens before it see does not change what it sees."""
    shape = (4, 2, 64, 16, None)
    one, other = (
        run_steps(ReferenceOps(), heads_of(shape, both_ways), torch.float32, 16, WHOLE) for both_ways in (True, False)
    )
    for both, causal in zip(one, other, strict=True):
        torch.testing.assert_close(both[-1], causal[-1], rtol=1e-5, atol=1e-6)
        assert len(both) == 1 or (both[0] - causal[0]).abs().max() > 1e-3

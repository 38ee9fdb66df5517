"""Convolutions and recurrences of the native kernels against plain torch, on every set of native kernels."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from support.native_isa import ISAS, kernels_of
from torch import Tensor
from torch.nn import functional

from chairlift.ops.base import StateSpans
from chairlift.ops.native import load_library
from chairlift.ops.recurrence import NativeRecurrence

STARTS = [0, 1, 38, 43, 44, 56]
ROWS = [3, 0, 5, 1, 4]
# Behind how many tokens states are copied, and to which rows: in the middle of a text only.
CUTS = {1: [(2, 6), (20, 7)], 4: [(11, 8)]}
SPANS = StateSpans(ROWS, [0, 9, 0, 4, 2], STARTS, CUTS)
TOKENS = STARTS[-1]
NUM_ROWS = 9


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_of(request.param):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layer(NamedTuple):
    """A layer: what it makes of tokens by these spans and states, and of one token by plain torch."""

    states: Tensor
    by_kernels: Callable[[NativeRecurrence, StateSpans, Tensor, slice], Tensor]
    # (its state, float32; which token) -> (its next state, what it gives)
    plainly: Callable[[Tensor, int], tuple[Tensor, Tensor]]


def convolution(dtype: torch.dtype, channels: int, taps: int, biased: bool, silu: bool) -> Layer:
    # Rows lie apart, as parts of a wider projection.
    x = random(TOKENS, channels + 7, seed=1, dtype=dtype)[:, :channels]
    weight = random(channels, taps, seed=2, dtype=dtype)
    bias = random(channels, seed=3, dtype=dtype) if biased else None

    def plainly(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        state = torch.cat([state[:, 1:], x[token].float()[:, None]], dim=1)
        found = (state * weight.float()).sum(1) + (0 if bias is None else bias.float())
        return state, functional.silu(found.to(dtype).float()) if silu else found

    def by_kernels(kernels: NativeRecurrence, spans: StateSpans, states: Tensor, part: slice) -> Tensor:
        return kernels.causal_conv(kernels.prepare(spans), states, x[part], weight, bias, silu)

    return Layer(random(NUM_ROWS, channels, taps, seed=4, dtype=dtype), by_kernels, plainly)


def delta_rule(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], unit: bool) -> Layer:
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    scale = 1.0 if unit else 0.2
    q, k = (scale * random(TOKENS, key_heads, key_dim, seed=seed) for seed in (1, 2))
    q, k, v = q.to(dtype), k.to(dtype), random(TOKENS, value_heads, value_dim, seed=3, dtype=dtype)
    g, beta = -random(TOKENS, value_heads, seed=4).abs(), random(TOKENS, value_heads, seed=5).sigmoid()

    def plainly(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        wide = [each[token].float().repeat_interleave(value_heads // key_heads, 0) for each in (q, k)]
        query, key = ([each / (each.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for each in wide]) if unit else wide
        state = state * g[token].exp()[:, None, None]
        seen = (state * key[:, :, None]).sum(1)
        state = state + key[:, :, None] * ((v[token].float() - seen) * beta[token][:, None])[:, None]
        return state, (state * query[:, :, None]).sum(1) / key_dim**0.5

    def by_kernels(kernels: NativeRecurrence, spans: StateSpans, states: Tensor, part: slice) -> Tensor:
        qkv = q[part], k[part], v[part]
        return kernels.gated_delta(kernels.prepare(spans), states, qkv, g[part], beta[part], unit)

    return Layer(random(NUM_ROWS, value_heads, key_dim, value_dim, seed=6), by_kernels, plainly)


def mamba(dtype: torch.dtype, heads: int, groups: int, dim: int, size: int, added: bool) -> Layer:
    x = random(TOKENS, heads, dim, seed=1, dtype=dtype)
    b, c = (random(TOKENS, groups, size, seed=seed, dtype=dtype) for seed in (2, 3))
    dt, a = random(TOKENS, heads, seed=4).abs(), -random(heads, seed=5).abs()
    d = random(heads, seed=6) if added else None

    def plainly(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        given, step = x[token].float(), dt[token][:, None, None]
        of, to = (each[token].float().repeat_interleave(heads // groups, 0) for each in (b, c))
        state = state * (a[:, None, None] * step).exp() + given[:, :, None] * step * of[:, None]
        found = (state * to[:, None]).sum(2)
        return state, found if d is None else found + d[:, None] * given

    def by_kernels(kernels: NativeRecurrence, spans: StateSpans, states: Tensor, part: slice) -> Tensor:
        return kernels.mamba2(kernels.prepare(spans), states, (x[part], b[part], c[part]), dt[part], a, d)

    return Layer(random(NUM_ROWS, heads, dim, size, seed=7), by_kernels, plainly)


LAYERS: dict[str, Callable[[torch.dtype], Layer]] = {
    "conv": lambda dtype: convolution(dtype, 64, 4, False, True),
    "conv of odd sizes": lambda dtype: convolution(dtype, 70, 3, True, False),
    "conv of many inputs": lambda dtype: convolution(dtype, 5, 16, True, True),
    "delta": lambda dtype: delta_rule(dtype, (2, 4), (128, 128), True),
    "delta of odd sizes": lambda dtype: delta_rule(dtype, (1, 3), (20, 41), False),
    "mamba": lambda dtype: mamba(dtype, 4, 2, 16, 64, True),
    "mamba of odd sizes": lambda dtype: mamba(dtype, 3, 1, 7, 21, False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_what_its_definition_says(name: str, dtype: torch.dtype) -> None:
    """Outputs and states, those that are copied on the way too; the other rows stay as they were."""
    layer = LAYERS[name](dtype)
    states = layer.states.clone()
    found = layer.by_kernels(NativeRecurrence(load_library()[0]), SPANS, states, slice(None))
    wanted = layer.states.clone()
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for index, row in enumerate(ROWS):
        state, cuts = layer.states[row].float(), dict(CUTS.get(index, ()))
        for token in range(STARTS[index], STARTS[index + 1]):
            state, given = layer.plainly(state, token)
            torch.testing.assert_close(found[token].float(), given, **loose)
            if (copy := cuts.get(token + 1 - STARTS[index])) is not None:
                wanted[copy] = state
        wanted[row] = state
    torch.testing.assert_close(states, wanted, **loose)
    assert torch.equal(states[2], layer.states[2])


@pytest.mark.parametrize("name", LAYERS)
def test_parts_and_company_change_nothing(name: str, dtype: torch.dtype) -> None:
    """Not in a bit: alone, and in two parts."""
    layer, kernels = LAYERS[name](dtype), NativeRecurrence(load_library()[0])
    together, apart = layer.states.clone(), layer.states.clone()
    found = layer.by_kernels(kernels, SPANS, together, slice(None))
    for index, row in enumerate(ROWS):
        begin, end = STARTS[index], STARTS[index + 1]
        middle = (begin + end) // 2
        for first, stop in ((begin, middle), (middle, end)):
            if first < stop:
                part = slice(first, stop)
                alone = layer.by_kernels(kernels, StateSpans([row], [0], [0, stop - first], {}), apart, part)
                assert torch.equal(alone, found[part])
    assert torch.equal(apart[ROWS], together[ROWS])

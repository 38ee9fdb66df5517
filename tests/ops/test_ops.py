"""The native operations against the reference, for every instruction set that was built."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_steps import (
    CPU,
    SHAPES,
    STEPS,
    TOLERANCE,
    blocks_for,
    close,
    make_batch,
    random,
    run_steps,
)
from support.native_isa import ISAS, kernels_of, needs_native, torch_threads

from chairlift.errors import ConfigError
from chairlift.ops import cpu, cuda, key_groups, reference, select
from chairlift.ops.activation import gated
from chairlift.ops.base import AttentionBatch, HeadShape, KVCache
from chairlift.ops.contract import Ops
from chairlift.ops.cuda import CudaOps
from chairlift.ops.native import ACTIVATIONS, LIBRARY, load_library
from chairlift.ops.packed import PackedWeight
from chairlift.ops.reference import ReferenceOps, decode_attention
from chairlift.ops.rotation import RotaryTable

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine would take most of the time of these small cases."""
    with torch_threads(1):
        yield


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest, dtype: torch.dtype) -> Iterator[cpu.CpuOps]:
    with kernels_of(request.param):
        yield cpu.CpuOps(dtype)


@pytest.fixture
def chosen(dtype: torch.dtype) -> cpu.CpuOps:
    """Of the kernels that are chosen here."""
    load_library()
    return cpu.CpuOps(dtype)


@functools.cache
def reference_steps(
    heads: HeadShape, dtype: torch.dtype, block_size: int, norm: str | None = None, cached: torch.dtype | None = None
) -> list[torch.Tensor]:
    """What the reference makes of `STEPS`."""
    return run_steps(ReferenceOps(), heads, dtype, block_size, STEPS, norm=norm, cached=cached)


@needs_native
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [None, "head", "projection"])
def test_attention_is_that_of_the_reference(native: Ops, dtype: torch.dtype, shape: tuple, norm: str | None) -> None:
    num_heads, num_kv_heads, dim, block_size, window = shape
    heads = HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window)
    actual = run_steps(native, heads, dtype, block_size, STEPS, norm=norm)
    expected = reference_steps(heads, dtype, block_size, norm)
    for one, other in zip(actual, expected, strict=True):
        close(one, other)


@needs_native
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_on_rounded_values_is_that_of_the_reference(native: Ops, dtype: torch.dtype, shape: tuple) -> None:
    num_heads, num_kv_heads, dim, block_size, window = shape
    heads = HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window)
    actual = run_steps(native, heads, dtype, block_size, STEPS, norm="head", cached=torch.int8)
    expected = reference_steps(heads, dtype, block_size, "head", torch.int8)
    exact = reference_steps(heads, dtype, block_size, "head")
    for one, other, unrounded in zip(actual, expected, exact, strict=True):
        # A rotation that differs in its last bit now and then rounds to the next of the 255 steps.
        torch.testing.assert_close(one, other, **(TOLERANCE[dtype] | {"atol": 1e-2}))
        assert (one - other).float().abs().mean() < (1e-4 if dtype == torch.float32 else 2e-3)
        assert 0 < (one - unrounded).float().abs().mean() < 0.02


@needs_native
def test_slopes_are_those_of_the_reference(native: Ops, dtype: torch.dtype) -> None:
    heads = HeadShape(6, 2, 40, 0.2, 90, slopes=(0.9, 0.5, 0.1, 0.03, 0.004, 0.0))
    for ops in (native, AtOnce()):
        for one, other in zip(run_steps(ops, heads, dtype, 8, STEPS), reference_steps(heads, dtype, 8), strict=True):
            close(one, other)


@needs_native
def test_sums_over_the_widest_heads_fit(native: Ops, dtype: torch.dtype) -> None:
    """All numbers are at the end of their range, so that every product of the last token with itself is the largest."""
    heads = HeadShape(2, 1, 576, 576**-0.5, None)
    cache = native.allocate_kv_cache(1, 16, heads, torch.int8, CPU)
    batch = make_batch([(0, 5)], [[0]], 16)
    qkv = torch.ones(5, 4 * 576, dtype=dtype)
    qkv[:4, 2 * 576 : 3 * 576] = 0
    qkv[:, 3 * 576 :] *= torch.arange(1, 6)[:, None]
    still = torch.cat((torch.ones(5, 288), torch.zeros(5, 288)), dim=1)
    query = native.rope_and_write(qkv, RotaryTable(still), batch, cache, heads, None, None, 1e-6)
    # The last key's score is 24, all others' are 0.
    wanted = torch.tensor([1.0, 1.5, 2.0, 2.5, 5.0]).repeat_interleave(2 * 576).view(5, -1)
    torch.testing.assert_close(native.attention(query, cache, batch, heads).float(), wanted, atol=0.01, rtol=0)


class AtOnce(ReferenceOps):
    """With the way without waiting for a device."""

    calls = 0

    def attention(self, q: torch.Tensor, cache: KVCache, batch: AttentionBatch, heads: HeadShape) -> torch.Tensor:
        if batch.max_query_len > 1:
            return super().attention(q, cache, batch, heads)
        self.calls += 1
        return decode_attention(q, cache, batch, heads)


@pytest.mark.parametrize("cached", [None, torch.int8], ids=["plain", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_at_once_are_those_of_the_reference(
    dtype: torch.dtype, shape: tuple, cached: torch.dtype | None
) -> None:
    """Held against one sequence after the other."""
    num_heads, num_kv_heads, dim, block_size, window = shape
    heads = HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window)
    steps = [STEPS[0], [(5, 6), (77, 78), (300, 301), (0, 1)], [(6, 7), (78, 79), (301, 302), (1, 2)]]
    ops = AtOnce()
    actual = run_steps(ops, heads, dtype, block_size, steps, cached=cached)
    assert ops.calls == 2
    for one, other in zip(
        actual, run_steps(ReferenceOps(), heads, dtype, block_size, steps, cached=cached), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_pytorch_is_that_of_the_reference(shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: prompts one after the other, decodes at once."""
    num_heads, num_kv_heads, dim, block_size, window = shape
    heads = HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window)
    wanted = run_steps(ReferenceOps(), heads, torch.bfloat16, block_size, STEPS)
    monkeypatch.setattr(ReferenceOps, "attention", None)
    for one, other in zip(run_steps(CudaOps(), heads, torch.bfloat16, block_size, STEPS), wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize(("where", "ops"), [(cuda, CudaOps()), (reference, AtOnce())], ids=["cuda", "reference"])
def test_no_more_keys_are_copied_at_once_than_there_is_room_for(
    where: Any, ops: ReferenceOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, compute, sizes = HeadShape(6, 2, 64, 0.125, 50), where._decode_rows, list[int]()
    steps = [STEPS[0], [(5, 6), (77, 78), (300, 301), (0, 1)]]
    wanted = run_steps(ops, heads, torch.bfloat16, 16, steps)

    def counted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(q))
        found: torch.Tensor = compute(q, *rest)
        return found

    monkeypatch.setattr(where, "_decode_rows", counted)
    for most, parts in ((10_000, [4]), (3 * 301, [3, 1]), (5, [1, 1, 1, 1])):
        monkeypatch.setattr(key_groups, "_MOST_KEYS", most)
        found = run_steps(ops, heads, torch.bfloat16, 16, steps)
        assert sizes == parts
        sizes.clear()
        for one, other in zip(found, wanted, strict=True):
            close(one, other)


@pytest.mark.parametrize("most", [6 * 300 * 100, 5], ids=["some", "one"])
def test_no_more_scores_of_a_prompt_are_there_at_once_than_there_is_room_for(
    dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, compute, sizes = HeadShape(6, 2, 64, 0.125, 50, 3.0), reference._attend_rows, list[tuple[int, int]]()
    wanted = run_steps(ReferenceOps(), heads, dtype, 16, STEPS)

    def counted(q: torch.Tensor, query: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append((len(q), 6 * len(q) * len(k)))
        return compute(q, query, k, *rest)

    monkeypatch.setattr(reference, "_attend_rows", counted)
    monkeypatch.setattr(reference, "_MOST_SCORES", most)
    found = run_steps(ReferenceOps(), heads, dtype, 16, STEPS)
    assert all(rows == 1 or size <= most for rows, size in sizes)
    assert max(rows for rows, _ in sizes) > 90 or most == 5
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


@needs_native
@pytest.mark.parametrize("block_size", [1, 5, 16, 24])
def test_rounded_values_are_within_half_a_step(native: Ops, dtype: torch.dtype, block_size: int) -> None:
    heads = HeadShape(2, 2, 40, 1.0)
    table = blocks_for([50], block_size)
    batch = make_batch([(0, 50)], table, block_size)
    qkv = random(50, 6 * 40, dtype=dtype)
    qkv[7] = 0
    cos_sin = torch.cat((torch.ones(50, 20), torch.zeros(50, 20)), dim=-1)
    for ops in (native, ReferenceOps()):
        caches = [
            ops.allocate_kv_cache(len(table[0]) + 3, block_size, heads, each, CPU) for each in (torch.int8, dtype)
        ]
        for cache in caches:
            ops.rope_and_write(qkv, RotaryTable(cos_sin), batch, cache, heads)
        # A token that sees only itself gets its own value back.
        alone = HeadShape(2, 2, 40, 1.0, window=1)
        rounded, exact = (ops.attention(qkv[:, :80].contiguous(), cache, batch, alone).float() for cache in caches)
        step = exact.view(50, 2, 40).abs().amax(-1, keepdim=True) / 127
        slack = step * (0.01 if dtype == torch.float32 else 0.5)
        assert ((rounded - exact).view(50, 2, 40).abs() <= step / 2 + slack).all()


@needs_native
def test_all_bytes_of_a_rounded_cache_are_in_its_tensors(native: Ops, dtype: torch.dtype) -> None:
    heads = HeadShape(4, 2, 64, 1.0)
    for ops in (native, ReferenceOps()):
        cache = ops.allocate_kv_cache(3, 16, heads, torch.int8, CPU)
        assert sum(pages.nbytes for pages in cache) == 3 * 16 * 2 * 2 * (64 + 4)


@needs_native
@pytest.mark.parametrize("rounded", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
def test_a_sequence_is_the_same_alone_and_in_a_batch(
    native: Ops, dtype: torch.dtype, shape: tuple, rounded: bool
) -> None:
    cached = torch.int8 if rounded else None
    num_heads, num_kv_heads, dim, block_size, window = shape
    heads = HeadShape(num_heads, num_kv_heads, dim, dim**-0.5, window)
    torch.set_num_threads(2)
    together = run_steps(native, heads, dtype, block_size, STEPS, cached=cached)
    torch.set_num_threads(1)
    for index, expected in enumerate(together):
        assert torch.equal(run_steps(native, heads, dtype, block_size, STEPS, keep=[index], cached=cached)[0], expected)


@needs_native
@pytest.mark.parametrize("cached", [None, torch.int8], ids=["plain", "int8"])
def test_chunks_of_a_prompt_do_not_change_its_attention(
    native: Ops, dtype: torch.dtype, cached: torch.dtype | None
) -> None:
    heads = HeadShape(6, 2, 64, 0.125)
    whole = run_steps(native, heads, dtype, 16, [[(0, 700)]], cached=cached)
    parts = [[(0, 100)], [(100, 101)], [(101, 699)], [(699, 700)]]
    chunked = run_steps(native, heads, dtype, 16, parts, cached=cached)
    assert torch.equal(whole[0], chunked[0])


@needs_native
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("dim", [8, 72, 576])
def test_elementwise_operations_are_those_of_the_reference(
    native: cpu.CpuOps, dtype: torch.dtype, rows: int, dim: int
) -> None:
    reference = ReferenceOps()
    x, weight = random(rows, dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
    close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    # With a weight of floats there is one rounding, so that nearly all results are the same to the bit.
    found, wanted = (ops.rms_norm(x, random(dim, seed=1), 1e-5) for ops in (native, reference))
    close(found, wanted)
    assert dtype == torch.float32 or (found != wanted).float().mean() < 0.01
    residuals = [random(rows, dim, dtype=dtype, seed=2) for _ in range(2)]
    outputs = [
        ops.add_rms_norm(x, residual, weight, 1e-5)
        for ops, residual in zip((native, reference), residuals, strict=True)
    ]
    close(*outputs)
    assert torch.equal(*residuals)
    gate_up = 10 * random(rows, 2 * dim, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = 200, -200
    gate, up = gate_up.chunk(2, dim=-1)
    for activation in ACTIVATIONS:
        # Of gpt-oss's the kernel rounds nothing in between.
        parts = (gate.float(), up.float()) if activation == "swiglu_clamped" else (gate, up)
        found, wanted = native.gate(gate_up, activation), gated(*parts, activation).to(dtype)
        most = TOLERANCE[dtype]["atol"] + TOLERANCE[dtype]["rtol"] * wanted.float().abs()
        # The polynomial for Phi is off by less than this.
        most += (1e-5 if activation == "gelu" else 0) * (gate * up).float().abs()
        assert ((found - wanted).float().abs() <= most).all()


@needs_native
@pytest.mark.parametrize("shape", [(32, 2), (33, 64), (96, 130), (250, 34)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_of_a_row_does_not_depend_on_the_others(
    chosen: Ops, dtype: torch.dtype, shape: tuple[int, int], bias: bool
) -> None:
    outs, ins = shape
    weight, x = random(outs, ins, dtype=dtype), random(230, ins, dtype=dtype, seed=1)
    layer = chosen.linear(weight, random(outs, dtype=dtype, seed=2) if bias else None)
    whole = layer(x)
    torch.set_num_threads(2)
    assert torch.equal(layer(x), whole)
    if isinstance(layer, PackedWeight):
        for count in (1, 2, 3, 11, 12, 13, 97):
            assert torch.equal(layer(x[:count]), whole[:count])
            assert torch.equal(layer(x[230 - count :].contiguous()), whole[230 - count :])
    torch.testing.assert_close(
        whole.double(),
        ReferenceOps().linear(weight.double(), random(outs, dtype=dtype, seed=2).double() if bias else None)(
            x.double()
        ),
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-2 if dtype == torch.bfloat16 else 1e-4,
    )


@needs_native
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_that_of_the_reference(chosen: Ops, dtype: torch.dtype, bias: bool) -> None:
    weight, offset = random(96, 576, dtype=dtype), random(96, dtype=dtype, seed=1) if bias else None
    x = random(33, 576, dtype=dtype, seed=2)
    layer = chosen.linear(weight, offset)
    expected = ReferenceOps().linear(weight.double(), None if offset is None else offset.double())(x.double())
    torch.testing.assert_close(
        layer(x).double(), expected, rtol=TOLERANCE[dtype]["rtol"], atol=10 * TOLERANCE[dtype]["atol"]
    )


@needs_native
def test_nothing_to_do_is_no_error(native: cpu.CpuOps, dtype: torch.dtype) -> None:
    assert native.rms_norm(torch.empty(0, 8, dtype=dtype), torch.ones(8, dtype=dtype), 1e-5).shape == (0, 8)
    assert native.gate(torch.empty(0, 16, dtype=dtype), "silu").shape == (0, 8)


@needs_native
def test_a_head_without_a_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="reference"):
        cpu.CpuOps(torch.float32).allocate_kv_cache(2, 16, HeadShape(1, 1, 20, 1.0), torch.float32, CPU)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not LIBRARY.exists():
        pytest.skip("the native library is not built")
    monkeypatch.setenv("CHAIRLIFT_ISA", "avx1024")
    with pytest.raises(ConfigError, match="CHAIRLIFT_ISA"):
        load_library()


@needs_native
def test_auto_is_native_on_the_cpu() -> None:
    assert select.select_ops("auto", CPU, torch.bfloat16, 64).name.startswith("native-")
    assert select.select_ops("reference", CPU, torch.bfloat16, 64).name == "reference"
    assert select.select_ops("auto", CPU, torch.float16, 64).name == "reference"
    assert select.select_ops("auto", CPU, torch.float32, 20).name == "reference"
    with pytest.raises(ConfigError, match="multiple of 8"):
        select.select_ops("native", CPU, torch.float32, 20)


def test_there_are_no_native_operations_on_cuda() -> None:
    assert select.select_ops("auto", torch.device("cuda"), torch.bfloat16, 64).name == "cuda"
    with pytest.raises(ConfigError, match="ops = 'native'"):
        select.select_ops("native", torch.device("cuda"), torch.bfloat16, 64)


def test_on_cuda_attention_is_not_planned_for_each_length() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        select.select_ops("reference", CPU, torch.bfloat16, 64)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        select.select_ops("reference", torch.device("cuda"), torch.bfloat16, 64)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_on_cuda_it_is_said_that_rounding_is_only_imitated(caplog: pytest.LogCaptureFixture) -> None:
    for name, device, quantization in (
        ("auto", "cuda", "none"),
        ("reference", "cuda", "int8"),
        ("reference", "cpu", "int8"),
    ):
        select.select_ops(name, torch.device(device), torch.bfloat16, 64, quantization)  # type: ignore[arg-type]
    assert not caplog.records
    select.select_ops("auto", torch.device("cuda"), torch.bfloat16, 64, "int4")
    assert "quantization = 'int4' on CUDA only imitates the rounding" in caplog.text


def test_a_missing_library_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(load_library, "__defaults__", (tmp_path / "missing.so",))
    with caplog.at_level(logging.WARNING):
        assert select.select_ops("auto", CPU, torch.float32, 64).name == "reference"
        assert select.select_ops("auto", CPU, torch.float32, 64).name == "reference"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(ConfigError, match="compiler"):
        select.select_ops("native", CPU, torch.float32, 64)

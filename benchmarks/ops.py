"""Each native operation against the reference, on the shapes of a 135M-parameter Llama, as ratios and bandwidths.

Run: python benchmarks/ops.py [--dtype float32] [--only attention] [--quantization int8] [--cache int8] [--heads 14 2].
The best of several rounds is kept. Where attention reads more than it computes, compare its GB/s with those of the
plain read timed before it.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from roofline import WEIGHT_BYTES
from torch.nn import functional

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.ops.base import AttentionBatch, HeadShape
from chairlift.ops.contract import Ops
from chairlift.ops.cpu import CpuOps
from chairlift.ops.reference import ReferenceOps
from chairlift.ops.rotation import RotaryTable

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, VOCABULARY, BLOCK_SIZE = 576, 1536, 49152, 16
# More than the last-level cache holds, as one step walks through all weights and caches of a model.
COLD_BYTES = 128 << 20


def best_seconds(calls: list[Callable[[], object]], seconds: float = 0.25) -> float:
    """Mean, over the calls, of each one's shortest time in rounds through all of them."""
    best, until = [float("inf")] * len(calls), time.perf_counter() + seconds
    while True:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
        if time.perf_counter() > until:
            return sum(best) / len(best)


class Report:
    """Times operations, and keeps each as a run of a round."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.round = 1

    def __call__(
        self,
        name: str,
        native: list[Callable[[], object]],
        reference: list[Callable[[], object]],
        size: float,
        operations: float | None = None,
    ) -> None:
        """Time one operation; `size` is the bytes that must be read and written."""
        for call in (native[0], reference[0]):
            call()
        fast, slow = best_seconds(native), best_seconds(reference)
        fast = min(fast, best_seconds(native))
        row = {"round": self.round, "name": name, "us": fast * 1e6, "gb_s": size / fast / 1e9, "times": slow / fast}
        if operations is not None:
            row["gflop_s"] = operations / fast / 1e9
        self.recording.add(row)


def bench_linear(native: Ops, reference: Ops, dtype: torch.dtype, report: Report) -> None:
    shapes = [(VOCABULARY, HIDDEN), (960, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (HIDDEN, HIDDEN)]
    for out, width in shapes:
        rounded = native.quantization != "none"
        size = int(out * width * (WEIGHT_BYTES[native.quantization] if rounded else dtype.itemsize))
        weights = [torch.randn(out, width).to(dtype) for _ in range(max(1, COLD_BYTES // size))]
        layers = [[ops.linear(weight, None) for weight in weights] for ops in (native, reference)]
        for tokens in (1, 2, 4, 16, 128, 512):
            x = torch.randn(tokens, width).to(dtype)
            fast, slow = ([partial(layer, x) for layer in side] for side in layers)
            report(f"linear {out}x{width}, {tokens} tokens", fast, slow, size, 2 * tokens * out * width)


def bench_elementwise(native: CpuOps, reference: Ops, dtype: torch.dtype, report: Report) -> None:
    weight = torch.randn(HIDDEN).to(dtype)
    for tokens in (1, 16, 512):
        x, residual = torch.randn(2, tokens, HIDDEN).to(dtype)
        gate_up = torch.randn(tokens, 2 * INTERMEDIATE).to(dtype)
        cases = [
            ("rms_norm", (x, weight, 1e-5), 2 * x.nbytes),
            ("add_rms_norm", (x, residual, weight, 1e-5), 4 * x.nbytes),
        ]
        for name, arguments, size in cases:
            fast, slow = ([partial(getattr(ops, name), *arguments)] for ops in (native, reference))
            report(f"{name}, {tokens} tokens", fast, slow, size)
        gate, up = gate_up.chunk(2, dim=-1)
        plain = partial(lambda gate, up: functional.silu(gate) * up, gate, up)
        report(f"gate, {tokens} tokens", [partial(native.gate, gate_up, "silu")], [plain], 1.5 * gate_up.nbytes)


def make_batch(sequences: int, tokens: int, context: int) -> AttentionBatch:
    """The last `tokens` of `context` tokens of each sequence, in scattered blocks."""
    per_sequence = -(-context // BLOCK_SIZE)
    tables = torch.randperm(sequences * per_sequence).view(sequences, per_sequence)
    positions = torch.arange(context - tokens, context)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(
        query_start=torch.arange(0, (sequences + 1) * tokens, tokens, dtype=torch.int32),
        context_len=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=tables.int(),
        slot_mapping=slots.flatten(),
        positions=positions.repeat(sequences),
        max_query_len=tokens,
        max_context_len=context,
    )


def bench_attention(
    native: Ops, reference: Ops, dtype: torch.dtype, report: Report, heads: HeadShape, cached: torch.dtype
) -> None:
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    decodes = [(1, 100), (1, 1000), (1, 8000), (16, 100), (16, 1000), (64, 160), (64, 1000)]
    prefills = [(4, 128, 128), (1, 512, 512), (1, 512, 4000)]
    memory = torch.ones(COLD_BYTES // 4)
    for sequences, tokens, context in [*((count, 1, context) for count, context in decodes), *prefills]:
        batch = make_batch(sequences, tokens, context)
        per_token = 2 * heads.num_kv_heads * (heads.head_dim * cached.itemsize + (4 if cached == torch.int8 else 0))
        size = sequences * context * per_token
        qkv = torch.randn(sequences * tokens, width).to(dtype)
        rotation = RotaryTable(torch.randn(context, heads.head_dim))
        attends: list[list[Callable[[], object]]] = []
        writes: list[list[Callable[[], object]]] = []
        for ops in (native, reference):
            caches = [
                ops.allocate_kv_cache(batch.block_tables.numel(), BLOCK_SIZE, heads, cached, CPU)
                for _ in range(min(64, max(1, COLD_BYTES // size)) if tokens == 1 else 1)
            ]
            for pages in itertools.chain(*caches):
                pages.fill_(0.5 if pages.is_floating_point() else 64)
            query = ops.rope_and_write(qkv, rotation, batch, caches[0], heads)
            attends.append([partial(ops.attention, query, cache, batch, heads) for cache in caches])
            writes.append([partial(ops.rope_and_write, qkv, rotation, batch, cache, heads) for cache in caches])
        label = f"{sequences} x {tokens} tokens, {context} context"
        if tokens == 1:
            report(f"plain read before {label}", [memory.sum], [memory.sum], memory.nbytes)
        seen = sequences * tokens * (context - (tokens - 1) / 2)
        report(f"attention, {label}", *attends, size, 4 * heads.num_heads * heads.head_dim * seen)
        report(f"rope_and_write, {label}", *writes, 2 * qkv.nbytes)


def main() -> None:
    names = ["elementwise", "attention", "linear"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--only", choices=names)
    parser.add_argument(
        "--quantization",
        choices=["none", "int8", "int4"],
        default="none",
        help="of the native products; the reference's stay",
    )
    parser.add_argument("--cache", choices=["int8"], help="dtype of the KV cache")
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3), metavar=("QUERY", "KV"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    native = CpuOps(dtype, arguments.quantization)
    recording = Recording(start("ops", vars(arguments) | {"ops": native.name}), arguments.out)
    report = Report(recording)
    heads = HeadShape(*arguments.heads, 64, 64**-0.5)
    cached = torch.int8 if arguments.cache else dtype
    runs: list[Callable[[CpuOps, Ops, torch.dtype, Report], None]] = [
        bench_elementwise,
        partial(bench_attention, heads=heads, cached=cached),
        bench_linear,
    ]
    for report.round in range(1, arguments.rounds + 1):
        for name, run in zip(names, runs, strict=True):
            if arguments.only in (None, name):
                run(native, ReferenceOps(), dtype, report)
    print(markdown(recording.results))


def markdown(results: Results) -> str:
    """A row for each operation."""
    columns = (
        Column("us", "us", "{:.1f}"),
        Column("gb_s", "GB/s", "{:.1f}"),
        Column("gflop_s", "GFLOP/s", "{:.1f}"),
        Column("times", "times faster than plain torch", "{:.1f}"),
    )
    settings = results["settings"]
    about = f"{settings['ops']}, {settings['dtype']}"
    return f"{caption(results)}; {about}:\n\n{table(results['runs'], [Column('name', 'operation')], columns)}"


if __name__ == "__main__":
    main()

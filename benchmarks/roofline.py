"""The fewest seconds that this machine allows a model and a workload: python benchmarks/roofline.py MODEL WORKLOAD

Measures what memory gives where as much is read as the model's weights are, and how fast products of the model's own
shapes run on weights that lie in the cache (bfloat16: the best of our own and oneDNN's; `--quantization int8`: our
own), then walks the workload's steps, as the
real scheduler makes them, at those rates: a step takes at least the time to read each weight once or to multiply it
with all tokens, whichever is longer, and the time to read the KV cache. Nothing else counts.
`--measured TOK_S` prints the share of the limit that a rate reaches; benchmarks/offline.py, compare.py and serving.py
(`--roofline MODEL`) do so for their own.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workloads

from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.policy import make_policy
from chairlift.core.sequences.request import Request, SamplingParams, StepResult
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.ops.base import Quantization
from chairlift.ops.select import select_ops
from chairlift.runners.decoder.config import DecoderConfig, read_config

ROWS = 512
Shape = tuple[int, int]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("workload", choices=workloads.NAMES)
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--measured", type=float, metavar="TOK_S", help="a rate to compare with the limit")
    args = parser.parse_args()
    report = Machine.of(args.model, args.quantization, args.kv_cache_dtype).limit(args.workload)
    if args.measured:
        report["share_percent"] = round(100 * args.measured / report["limit_tok_s"], 1)
    print(json.dumps(report))


class Machine:
    """What memory and products of a model's shapes give here and now; measuring takes some seconds."""

    @classmethod
    def of(cls, folder: str | Path, quantization: Quantization, kv_cache_dtype: str) -> "Machine":
        """Measure for the model in a folder."""
        return cls(read_config(Path(folder)), quantization, 1 if kv_cache_dtype == "int8" else 2)

    def __init__(self, config: DecoderConfig, quantization: Quantization, kv_bytes: int) -> None:
        self.config = config
        self.weight_bytes = 1 if quantization == "int8" else 2
        self.token_bytes = config.num_layers * config.num_kv_heads * config.head_dim * 2 * kv_bytes
        layer, head = shapes(config)
        weights = config.num_layers * sum(outs * ins for outs, ins in layer) + head[0] * head[1]
        # As much as a step reads: a large cache holds a part of it from one step to the next.
        self.step_bytes = self.weight_bytes * weights
        self.bandwidth = measure_bandwidth(self.step_bytes)
        self.rates = {shape: measure_product(shape, quantization) for shape in {*layer, head}}

    def limit(self, workload: str) -> dict[str, Any]:
        """Return the fewest seconds of a workload and the rate they make, beside what was measured."""
        jobs = workloads.requests(workload)
        seconds = fewest_seconds(self, jobs)
        return {
            "workload": workload,
            "memory_gb_s": round(self.bandwidth / 1e9, 1),
            "memory_read_mb": round(self.step_bytes / 1e6),
            "products_gop_s": {f"{n}x{k}": round(rate / 1e9) for (n, k), rate in sorted(self.rates.items())},
            "fewest_seconds": round(seconds, 2),
            "limit_tok_s": round(sum(length for _, length in jobs) / seconds, 1),
        }


def shapes(config: DecoderConfig) -> tuple[list[Shape], Shape]:
    """The weights [out, in] of one layer, as they are fused, and of the head."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, middle = config.hidden_size, config.intermediate_size
    layer = [(query + 2 * key, hidden), (hidden, query), (2 * middle, hidden), (hidden, middle)]
    return layer, (config.vocab_size, hidden)


def measure_bandwidth(size: int) -> float:
    """Bytes a second that a plain sum reads of so many, again and again."""
    values = torch.ones(size // 4)
    return size / _median(values.sum, 7)


def measure_product(shape: Shape, quantization: Quantization) -> float:
    """Operations a second of the faster implementation, weights warm."""
    outs, ins = shape
    weight, x = torch.randn(outs, ins).bfloat16(), torch.randn(ROWS, ins).bfloat16()
    ours = select_ops("auto", torch.device("cpu"), torch.bfloat16, 64, quantization).linear(weight, None)
    seconds = _median(lambda: ours(x), 9)
    if quantization == "none":
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        theirs = torch.ops.mkldnn._linear_pointwise
        seconds = min(seconds, _median(lambda: theirs(x, packed, None, "none", [], ""), 9))
    return 2 * ROWS * outs * ins / seconds


def fewest_seconds(machine: Machine, jobs: list[tuple[list[int], int]]) -> float:
    """Add up the steps of the workload under continuous batching with 64 seats and 512 tokens a step."""
    config, bandwidth, rates = machine.config, machine.bandwidth, machine.rates
    scheduler = SequenceScheduler(make_policy("continuous", 64, 0), BlockPool(100_000), enable_prefix_caching=False)
    for index, (prompt, length) in enumerate(jobs):
        params = SamplingParams(max_tokens=length)
        scheduler.add(Request(id=str(index), prompt_ids=prompt, params=params, max_tokens=length, arrival=index))
    layer, head = shapes(config)
    total = 0.0
    while scheduler.num_waiting or scheduler.num_running:
        step = scheduler.schedule(total)
        ends = {s.id: s.num_computed_tokens + step.num_tokens[s.id] for s in scheduler.running}
        sampled = [s.id for s in scheduler.running if ends[s.id] == len(s.token_ids)]

        def product(shape: Shape, rows: int) -> float:
            weights = shape[0] * shape[1]
            return max(2 * weights * rows / rates[shape], machine.weight_bytes * weights / bandwidth) if rows else 0.0

        total += config.num_layers * sum(product(shape, step.total_tokens) for shape in layer)
        total += product(head, len(sampled)) + sum(ends.values()) * machine.token_bytes / bandwidth
        scheduler.update(step, StepResult({name: [0] for name in sampled}), total)
    return total


def _median(work: Callable[[], object], runs: int) -> float:
    work()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()

"""The fewest seconds that this machine allows a model and a workload: python benchmarks/roofline.py MODEL WORKLOAD

Measures what memory gives where as much is read as the model's weights are, and how fast products of the model's own
shapes run on weights that lie in the cache (bfloat16: the best of our own and oneDNN's, in bfloat16 and on float32
copies; int8 and int4: our own), then walks the workload's steps, as the real scheduler makes them, at those rates: a
step takes at least the time to read each weight once or to multiply it with all tokens, whichever is longer, and the
time to read the KV cache. Of experts it reads as many as tokens that choose at random would need, and multiplies with
those that were chosen. Nothing else counts.
`--measured TOK_S` prints the share of the limit that a rate reaches; benchmarks/offline.py, compare.py and serving.py
(`--roofline MODEL`) do so for their own.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import workloads

from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.step import StepResult
from chairlift.core.sequences.strategy import make_strategy
from chairlift.hub.resolve import located
from chairlift.ops.base import Quantization
from chairlift.ops.formats import FORMATS, PANEL
from chairlift.ops.select import select_ops
from chairlift.runners.decoder.config import DecoderConfig, read_config

ROWS = 512
# Of a number, with what groups of 32 have besides.
WEIGHT_BYTES: dict[Quantization, float] = {
    "none": 2,
    "int8": FORMATS["int8"].packed_bytes(1, 64) / (64 * PANEL),
    "int4": FORMATS["int4"].packed_bytes(1, 64) / (64 * PANEL),
}
Shape = tuple[int, int]


class Weights(NamedTuple):
    """A kind of weight [out, in]: how many layers have it, how many they have of it, and how many a token needs."""

    shape: Shape
    layers: int
    count: int = 1
    chosen: int = 1

    @property
    def size(self) -> int:
        """Numbers of one of them."""
        return self.shape[0] * self.shape[1]

    def read(self, tokens: int) -> float:
        """How many numbers so many tokens read in a step."""
        missed: float = (1 - self.chosen / self.count) ** tokens
        return self.layers * self.size * self.count * (1 - missed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("workload", choices=workloads.NAMES)
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
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
        return cls(read_config(Path(located(str(folder)))), quantization, 1 if kv_cache_dtype == "int8" else 2)

    def __init__(self, config: DecoderConfig, quantization: Quantization, kv_bytes: int) -> None:
        self.config = config
        self.weight_bytes = WEIGHT_BYTES[quantization]
        self.token_bytes = config.num_layers * config.num_kv_heads * config.head_dim * 2 * kv_bytes
        layers, head = weights_of(config)
        # As much as a step reads: a large cache holds a part of it from one step to the next.
        self.step_bytes = round(self.weight_bytes * sum(each.read(1) for each in (*layers, head)))
        self.bandwidth = measure_bandwidth(self.step_bytes)
        products = {each.shape: measure_product(each.shape, quantization) for each in (*layers, head)}
        self.rates = {shape: rate for shape, (_, rate) in products.items()}
        self.fastest = {shape: name for shape, (name, _) in products.items()}

    def limit(self, workload: str) -> dict[str, Any]:
        """Return the fewest seconds of a workload and the rate they make, beside what was measured."""
        jobs = workloads.requests(workload)
        seconds = fewest_seconds(self, jobs)
        return {
            "workload": workload,
            "memory_gb_s": round(self.bandwidth / 1e9, 1),
            "memory_read_mb": round(self.step_bytes / 1e6),
            "products_gop_s": {f"{n}x{k}": round(rate / 1e9) for (n, k), rate in sorted(self.rates.items())},
            "products_by": {f"{n}x{k}": name for (n, k), name in sorted(self.fastest.items())},
            "fewest_seconds": round(seconds, 2),
            "limit_tok_s": round(sum(length for _, length in jobs) / seconds, 1),
        }


def weights_of(config: DecoderConfig) -> tuple[list[Weights], Weights]:
    """The weights of the layers, as they are fused, and of the head."""
    hidden, experts = config.hidden_size, config.experts
    found = [Weights(shape, config.num_layers) for shape in _of_attention(config)]

    def mlp(width: int, layers: int, count: int = 1, chosen: int = 1) -> None:
        if width and layers:
            shapes = ((2 * width, hidden), (hidden, width))
            found.extend(Weights(shape, layers, count, chosen) for shape in shapes)

    with_experts = 0 if experts is None else sum(experts.layers)
    mlp(config.intermediate_size, config.num_layers - with_experts)
    if experts is not None:
        mlp(experts.width, with_experts, experts.count, experts.chosen)
        mlp(experts.shared_width, with_experts)
    return found, Weights((config.vocab_size, hidden), 1)


def _of_attention(config: DecoderConfig) -> list[Shape]:
    """Shapes of a layer's projections before and after attention; heads with weights of their own count together."""
    hidden, latent = config.hidden_size, config.latent
    if latent is None:
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return [(query + 2 * key, hidden), (hidden, query)]
    queries = config.num_heads * (latent.plain + latent.rotated)
    shapes = [((latent.query_rank or queries) + latent.width, hidden)]
    if latent.query_rank is not None:
        shapes.append((queries, latent.query_rank))
    up = [(config.num_heads * latent.rank, latent.plain), (config.num_heads * latent.value, latent.rank)]
    return [*shapes, *up, (hidden, config.num_heads * latent.value)]


def measure_bandwidth(size: int) -> float:
    """Bytes a second that a plain sum reads of so many, again and again."""
    values = torch.ones(size // 4)
    return size / _median(values.sum, 7)


def measure_product(shape: Shape, quantization: Quantization) -> tuple[str, float]:
    """The fastest implementation, weights warm, and its operations a second."""
    outs, ins = shape
    weight, x = torch.randn(outs, ins).bfloat16(), torch.randn(ROWS, ins).bfloat16()
    ours = select_ops("auto", torch.device("cpu"), torch.bfloat16, 64, quantization).linear(weight, None)
    ways: dict[str, Callable[[], object]] = {"ours": lambda: ours(x)}
    if quantization == "none":
        ways["oneDNN, float32"] = _by_onednn(weight.float(), x.float())
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            ways["oneDNN, bfloat16"] = _by_onednn(weight, x)
    seconds = {name: _median(work, 9) for name, work in ways.items()}
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest, 2 * ROWS * outs * ins / seconds[fastest]


def _by_onednn(weight: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def fewest_seconds(machine: Machine, jobs: list[tuple[list[int], int]]) -> float:
    """Add up the steps of the workload under continuous batching with 64 slots and 512 tokens a step."""
    config, bandwidth, rates = machine.config, machine.bandwidth, machine.rates
    scheduler = SequenceScheduler(make_strategy("continuous", 64, 0), BlockPool(100_000), enable_prefix_caching=False)
    for index, (prompt, length) in enumerate(jobs):
        params = SamplingParams(max_tokens=length)
        scheduler.add(Request(id=str(index), prompt_ids=prompt, params=params, max_tokens=length, arrival=index))
    layers, head = weights_of(config)
    total = 0.0
    while scheduler.num_waiting or scheduler.num_running:
        step = scheduler.schedule(total)
        ends = {s.id: s.num_computed_tokens + step.num_tokens[s.id] for s in scheduler.running}
        sampled = [s.id for s in scheduler.running if ends[s.id] == len(s.token_ids)]

        def product(each: Weights, rows: int) -> float:
            multiplied = 2 * each.layers * each.size * each.chosen * rows / rates[each.shape]
            return max(multiplied, machine.weight_bytes * each.read(rows) / bandwidth)

        total += sum(product(each, step.total_tokens) for each in layers)
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

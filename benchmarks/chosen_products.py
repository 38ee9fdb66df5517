"""Whether our products of bfloat16 weights are the fastest here: python benchmarks/chosen_products.py --out FILE

For each instruction set a process of its own (`CHAIRLIFT_ISA`, and oneDNN held to the same level) multiplies weights of
the shapes of llama-135m and Qwen2 0.5B with rows of bfloat16: by ours, as chosen there, by oneDNN in bfloat16, and by
oneDNN on float32 copies of the weight and of the rows. Weights come from memory, as in a step. Beside them a loop of
fused multiply-adds of float32 on registers, compiled for that set, says what its arithmetic gives at most.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ops import COLD_BYTES, best_seconds
from torch import Tensor

from chairlift.bench.raw_results import Column, Recording, Results, caption, failures, start, table
from chairlift.ops.cpu import CpuOps
from chairlift.ops.formats import FORMATS
from chairlift.ops.native import load_library, product_path

# By their outputs and inputs, as they are fused.
SHAPES = {
    "llama-135m": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "qwen2-0.5b": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
}
ROWS = (1, 4, 16, 64, 128, 512)
# What holds oneDNN to the same, the flags of the loop, and how many sums of how many bytes it has.
LEVELS = {
    "amx": ("AVX512_CORE_AMX", ["-mavx512f"], 24, 64),
    "avx512bf16": ("AVX512_CORE_BF16", ["-mavx512f"], 24, 64),
    "avx512vnni": ("AVX512_CORE_VNNI", ["-mavx512f"], 24, 64),
    "avxvnni": ("AVX2_VNNI", ["-mavx2", "-mfma"], 12, 32),
    "avx2": ("AVX2", ["-mavx2", "-mfma"], 12, 32),
}
_LOOP = """
#include <omp.h>
// Of the 32 registers of AVX-512 the older letter names 16.
#if defined(__AVX512F__)
#define REGISTER "+v"
#else
#define REGISTER "+x"
#endif
typedef float vec __attribute__((vector_size(BYTES)));
extern "C" double seconds_of(long times) {
    double began = 0, ended = 0;
#pragma omp parallel
    {
        const vec factor = vec{} + 0.999f, added = vec{} + 0.001f;
        SUMS
#pragma omp barrier
#pragma omp master
        began = omp_get_wtime();
        for (long t = 0; t < times; t++) {
            STEPS
        }
#pragma omp barrier
#pragma omp master
        ended = omp_get_wtime();
    }
    return ended - began;
}
"""
_TIMES = 4_000_000
# Two that are nearer to each other than this are as fast.
_NOISE = 0.03
NAMES = (Column("isa", "instructions", "{}"), Column("by", "chosen", "{}"), Column("rows", "rows", "{}"))
COLUMNS = (
    Column("fma_gflop_s", "FMA alone, GFLOP/s", "{:.0f}"),
    Column("least", "least of any shape, GFLOP/s", "{:.0f}"),
    Column("most", "most", "{:.0f}"),
    Column("behind_percent", "most behind oneDNN", "{:.0f}%"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("--one", choices=list(LEVELS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    recording = Recording(start("chosen_products", vars(args)), args.out)
    for number in range(1, args.rounds + 1):
        for level in args.levels if number % 2 else reversed(args.levels):
            print(f"round {number}: {level}", file=sys.stderr)
            environment = os.environ | {"CHAIRLIFT_ISA": level, "ONEDNN_MAX_CPU_ISA": LEVELS[level][0]}
            command = [sys.executable, __file__, "--one", level]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                recording.fail({"name": level, "round": number}, done.stderr.strip()[-500:])
                continue
            for row in json.loads(done.stdout.splitlines()[-1]):
                recording.add({"round": number} | row)
    print(markdown(recording.results))


def measure(level: str) -> list[dict[str, Any]]:
    """All shapes with all rows by this process's instruction set."""
    ops, found = CpuOps(torch.bfloat16, "none"), []
    path = product_path(load_library()[0], FORMATS["bfloat16"])
    limit = fma_rate(level)
    for model, shapes in SHAPES.items():
        for outs, ins in shapes:
            copies = max(1, COLD_BYTES // (2 * outs * ins))
            weights = [torch.randn(outs, ins).bfloat16() for _ in range(copies)]
            ours = [ops.linear(weight, None) for weight in weights]
            for rows in ROWS:
                x = torch.randn(rows, ins).bfloat16()
                sides = {"ours": [partial(layer, x) for layer in ours]}
                sides |= {name: _by_onednn(name, weights, x) for name in _types(level)}
                seconds = _fastest(sides)
                flops = {name: 2e-9 * rows * outs * ins / each for name, each in seconds.items()}
                found.append({"isa": level, "model": model, "shape": f"{outs}x{ins}", "rows": rows, "gflop_s": flops})
    limit = max(limit, fma_rate(level))
    return [row | {"fma_gflop_s": limit, "by": path} for row in found]


def _types(level: str) -> list[str]:
    """Types that oneDNN multiplies with as much as this; it refuses bfloat16 below AVX-512."""
    return ["float32"] if level in ("avx2", "avxvnni") else ["bfloat16", "float32"]


def _by_onednn(dtype: str, weights: list[Tensor], x: Tensor) -> list[Callable[[], object]]:
    """The same products by oneDNN on weights packed for so many rows, all of this type."""
    wanted = getattr(torch, dtype)
    # Enough of them to come from memory is half as many of twice the size.
    some = weights[: max(1, len(weights) * 2 // wanted.itemsize)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight.to(wanted), len(x)) for weight in some]
    multiply, rows = torch.ops.mkldnn._linear_pointwise, x.to(wanted)
    return [partial(multiply, rows, weight, None, "none", [], "") for weight in packed]


def _fastest(sides: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """Seconds of a product by each side, in turn twice, so that no side has the machine's better moments alone."""
    found = dict.fromkeys(sides, float("inf"))
    for _ in range(2):
        for name, calls in sides.items():
            calls[0]()
            found[name] = min(found[name], best_seconds(calls, 0.1))
    return found


def fma_rate(level: str) -> float:
    """GFLOP/s of fused multiply-adds that nothing but registers feeds, on all threads."""
    _, flags, count, size = LEVELS[level]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.cpp", Path(folder) / "loop.so"
        # An array of sums would stay in memory.
        sums = [f"vec s{i} = vec{{}} + {i}.0f;" for i in range(count)]
        steps = [f's{i} = s{i} * factor + added; asm volatile("" : REGISTER(s{i}));' for i in range(count)]
        source.write_text(_LOOP.replace("SUMS", " ".join(sums)).replace("STEPS", "\n".join(steps)))
        command = [os.environ.get("CXX", "c++"), "-O2", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", *flags]
        command += [f"-DBYTES={size}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        loop = ctypes.CDLL(str(library)).seconds_of
        loop.restype, loop.argtypes = ctypes.c_double, [ctypes.c_long]
        seconds = min(loop(_TIMES) for _ in range(5))
    return 2e-9 * _TIMES * count * (size // 4) * torch.get_num_threads() / seconds


def markdown(results: Results) -> str:
    """For each instruction set and number of rows the slowest and the fastest shape, and the one most behind."""
    runs = results["runs"]
    lines = [f"{caption(results)}:", table(summed_up(runs), NAMES, COLUMNS), "\n".join(most_behind(runs))]
    return "\n\n".join([*lines, *failures(results)])


def summed_up(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each round, instruction set and number of rows."""
    groups: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["round"], run["isa"], run["rows"]), []).append(run)
    return [_of_group(group) for group in groups.values()]


def _of_group(group: list[dict[str, Any]]) -> dict[str, Any]:
    ours = [run["gflop_s"]["ours"] for run in group]
    kept = {name: group[0][name] for name in ("round", "isa", "by", "rows", "fma_gflop_s")}
    return kept | {"least": min(ours), "most": max(ours), "behind_percent": 100 * max(map(_behind, group))}


def most_behind(runs: list[dict[str, Any]]) -> list[str]:
    """A line for each instruction set: how many products are behind, and which most of all, by medians of rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        product = f"{run['model']} {run['shape']}, {run['rows']} rows"
        found.setdefault(run["isa"], {}).setdefault(product, []).append(_behind(run))
    lines = []
    for isa, products in found.items():
        medians = {name: statistics.median(values) for name, values in products.items()}
        behind = sum(value > _NOISE for value in medians.values())
        worst = max(medians, key=lambda name: medians[name])
        lines.append(
            f"- {isa}: {behind} of {len(medians)} products more than {_NOISE:.0%} behind oneDNN, most of all {worst}"
        )
    return lines


def _behind(run: dict[str, Any]) -> float:
    """By what part oneDNN's better one is faster than ours; below zero where it is slower."""
    rates = run["gflop_s"]
    best: float = max(rate for name, rate in rates.items() if name != "ours")
    return best / rates["ours"] - 1


if __name__ == "__main__":
    main()

"""infinity's embedding rate, best of batch sizes and precisions: run by an environment of its own.

python benchmarks/dynamic/peers/infinity_embed.py MODEL. All texts are given to its engine at once, which sorts by
length, tokenizes in threads and pads each batch. Prints one line of JSON for each setting.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

import texts


def main() -> None:
    parser = argparse.ArgumentParser()
    texts.add_arguments(parser)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    strings, lengths = texts.make_texts(args.model, args.texts)
    for dtype in args.dtypes:
        for batch_size in args.batch_sizes:
            seconds, vectors = asyncio.run(measure(args, strings, dtype, batch_size))
            report = {"engine": "infinity", "dtype": dtype, "batch_size": batch_size}
            report |= {"tokens": sum(lengths), "seconds": round(seconds, 3), "tok_s": round(sum(lengths) / seconds)}
            print(json.dumps(report), flush=True)
            if args.vectors:
                np.save(args.vectors, vectors)


async def measure(args: argparse.Namespace, strings: list[str], dtype: str, batch_size: int) -> tuple[float, object]:
    """Seconds of the best round, and the vectors of the last."""
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    settings = EngineArgs(
        model_name_or_path=str(args.model),
        engine="torch",
        device="cpu",
        dtype=dtype,
        batch_size=batch_size,
        bettertransformer=False,
        model_warmup=False,
        lengths_via_tokenize=False,
    )
    best, vectors = float("inf"), None
    engine = AsyncEmbeddingEngine.from_args(settings)
    async with engine:
        await engine.embed(sentences=strings[:batch_size])
        for _ in range(args.rounds):
            began = time.perf_counter()
            vectors, _ = await engine.embed(sentences=strings)
            best = min(best, time.perf_counter() - began)
    return best, np.array(vectors)


if __name__ == "__main__":
    main()

"""sentence-transformers' embedding rate, best of batch sizes and precisions: run by an environment of its own.

python benchmarks/dynamic/peers/sentence_transformers_embed.py MODEL. `encode` sorts texts by length itself and pads
each batch. Prints one line of JSON for each setting.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

import texts


def main() -> None:
    from sentence_transformers import SentenceTransformer

    parser = argparse.ArgumentParser()
    texts.add_arguments(parser)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    strings, lengths = texts.make_texts(args.model, args.texts)
    for dtype in args.dtypes:
        model = SentenceTransformer(str(args.model), device="cpu", model_kwargs={"dtype": dtype})
        model.max_seq_length = texts.CAP
        for batch_size in args.batch_sizes:
            model.encode(strings[:batch_size], batch_size=batch_size)
            best = float("inf")
            for _ in range(args.rounds):
                began = time.perf_counter()
                vectors = model.encode(strings, batch_size=batch_size, convert_to_numpy=True)
                best = min(best, time.perf_counter() - began)
            report = {"engine": "sentence-transformers", "dtype": dtype, "batch_size": batch_size}
            report |= {"tokens": sum(lengths), "seconds": round(best, 3), "tok_s": round(sum(lengths) / best)}
            print(json.dumps(report), flush=True)
    if args.vectors:
        np.save(args.vectors, vectors)


if __name__ == "__main__":
    main()

"""vLLM's embedding rate with its pooling runner: run by an environment of its own.

python benchmarks/dynamic/peers/vllm_embed.py MODEL. Texts are given all at once; tokens of a step are the setting that
counts. Prints one line of JSON for each.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

import texts


def main() -> None:
    # The sentence-transformers files of a model may cut texts sooner than its positions end.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    from vllm import LLM

    parser = argparse.ArgumentParser()
    texts.add_arguments(parser)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    strings, lengths = texts.make_texts(args.model, args.texts)
    llm = LLM(
        str(args.model),
        runner="pooling",
        dtype=args.dtype,
        max_model_len=texts.CAP,
        max_num_batched_tokens=args.batch_tokens,
        max_num_seqs=args.max_num_seqs,
    )
    llm.embed(strings[:16], use_tqdm=False)
    best = float("inf")
    for _ in range(args.rounds):
        began = time.perf_counter()
        outputs = llm.embed(strings, use_tqdm=False)
        best = min(best, time.perf_counter() - began)
    report = {"engine": "vllm pooling", "dtype": args.dtype, "batch_tokens": args.batch_tokens}
    report |= {"max_num_seqs": args.max_num_seqs, "tokens": sum(lengths), "seconds": round(best, 3)}
    print(json.dumps(report | {"tok_s": round(sum(lengths) / best)}), flush=True)
    if args.vectors:
        np.save(args.vectors, np.array([output.outputs.embedding for output in outputs]))


if __name__ == "__main__":
    main()

"""Embedding throughput in process, in real tokens a second: python benchmarks/dynamic/embed.py MODEL

Texts are tokenized and run in the order they come in, in batches of so many tokens; tokenizing counts. Prints one line
of JSON. `--roofline` adds what the products alone would allow here and now.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import texts

sys.path.insert(0, str(Path(__file__).parent.parent))
import roofline

from chairlift.runners.encoder.config import EncoderConfig, read_encoder_config
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.text.encoding import TextEncoder


def main() -> None:
    parser = argparse.ArgumentParser()
    texts.add_arguments(parser)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--roofline", action="store_true")
    args = parser.parse_args()
    strings, lengths = texts.make_texts(args.model, args.texts)
    runner = EncoderRunner(args.model, dtype=args.dtype, quantization=args.quantization, max_tokens=texts.CAP)
    info = runner.load()
    encoder = TextEncoder(args.model, texts.CAP)
    runner.warm_up([64])
    best = float("inf")
    every = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        encodings = encoder.encode_texts(strings)
        tokenized = time.perf_counter() - began
        vectors = []
        batch, size = [], 0
        for encoding in encodings:
            if batch and size + len(encoding.token_ids) > args.batch_tokens:
                vectors += runner.run(batch)
                batch, size = [], 0
            batch.append(encoding)
            size += len(encoding.token_ids)
        vectors += runner.run(batch)
        seconds = time.perf_counter() - began
        every.append(round(seconds, 3))
        if seconds < best:
            best, best_tokenized = seconds, tokenized
    assert [len(encoding.token_ids) for encoding in encodings] == lengths
    report = {
        "engine": "chairlift",
        "dtype": info.dtype,
        "quantization": args.quantization,
        "ops": info.ops,
        "tokens": sum(lengths),
        "seconds": round(best, 3),
        "runs_s": every,
        "tok_s": round(sum(lengths) / best),
        "tokenizing_seconds": round(best_tokenized, 3),
        "run_tok_s": round(sum(lengths) / (best - best_tokenized)),
    }
    if args.roofline:
        limit = products_limit(read_encoder_config(args.model), args.quantization)
        report |= {"products_limit_tok_s": round(limit), "share_percent": round(100 * report["tok_s"] / limit, 1)}
    if args.vectors:
        np.save(args.vectors, np.stack(vectors))
    print(json.dumps(report))


def products_limit(config: EncoderConfig, quantization: str) -> float:
    """Tokens a second if there were nothing but the products, each at the best rate measured here."""
    hidden, middle = config.hidden_size, config.intermediate_size
    up = middle * (2 if config.family.gated else 1)
    shapes = [(3 * hidden, hidden), (hidden, hidden), (up, hidden), (hidden, middle)]
    rates = (roofline.measure_product(shape, quantization)[1] for shape in shapes)
    seconds = sum(2 * outs * ins / rate for (outs, ins), rate in zip(shapes, rates, strict=True))
    return 1 / (config.num_layers * seconds)


if __name__ == "__main__":
    main()

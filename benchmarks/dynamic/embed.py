"""Embedding throughput in process, in real tokens a second: python benchmarks/dynamic/embed.py MODEL

All texts are given to `LLM.embed` at once, as the peers' libraries get them; tokenizing counts. Prints one line of
JSON. `--roofline` adds what the products alone would allow here and now.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import texts

sys.path.insert(0, str(Path(__file__).parent.parent))
import roofline

import chairlift
from chairlift.runners.encoder.config import EncoderConfig, read_encoder_config
from chairlift.runners.encoder.runner import EncoderRunner


def main() -> None:
    parser = argparse.ArgumentParser()
    texts.add_arguments(parser)
    parser.add_argument("--batch-tokens", type=int, help="of a batch at most (default: the library's)")
    parser.add_argument("--batch-size", type=int, help="texts of a batch at most (default: the library's)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--roofline", action="store_true")
    args = parser.parse_args()
    report = measure(args)
    if args.roofline:
        limit = products_limit(read_encoder_config(args.model), args.quantization)
        report |= {"products_limit_tok_s": round(limit), "share_percent": round(100 * report["tok_s"] / limit, 1)}
    print(json.dumps(report))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What the library gives, the best of the rounds."""
    strings, lengths = texts.make_texts(args.model, args.texts)
    batches = {"max_batch_tokens": args.batch_tokens, "max_batch_size": args.batch_size}
    given = {name: value for name, value in batches.items() if value is not None}
    settings = {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": texts.CAP, **given}
    llm = chairlift.LLM(args.model, **settings)
    llm.embed(strings[:16], use_tqdm=False)
    every = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        outputs = llm.embed(strings, use_tqdm=False)
        every.append(round(time.perf_counter() - began, 3))
    assert [len(output.prompt_token_ids) for output in outputs] == lengths
    if args.vectors:
        np.save(args.vectors, np.array([output.outputs.embedding for output in outputs]))
    llm.close()
    # The library says neither; a runner that is loaded the same way does.
    info = EncoderRunner(args.model, dtype=args.dtype, quantization=args.quantization, max_tokens=texts.CAP).load()
    return {
        "engine": "chairlift",
        "through": "LLM.embed",
        "dtype": info.dtype,
        "quantization": args.quantization,
        "ops": info.ops,
        "tokens": sum(lengths),
        "seconds": min(every),
        "runs_s": every,
        "tok_s": round(sum(lengths) / min(every)),
    }


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

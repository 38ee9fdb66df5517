"""A model by native kernels, through transformers with our attention, and by transformers alone, in one process each:

    python benchmarks/through_transformers.py MODEL_DIR [--sequences 16] [--rounds 3] --out FILE.json

All get the same prompts of 64 random tokens and give 64 tokens each, greedily, in bfloat16; every second round goes
backwards. transformers alone is its own continuous batching (`generate_batch`), and its `generate`, which for prompts
of one length pads nothing.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import workloads

from chairlift.bench.raw_results import Column, Recording, Results, caption, failures, start, table

PROMPT, OUTPUT = 64, 64
NATIVE, THROUGH = "native kernels", "through transformers"
OWN, PLAIN = "transformers, generate_batch", "transformers, generate"
ENGINES = (NATIVE, THROUGH, OWN, PLAIN)
BEFORE = "through transformers, before"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=30_000, help="prompts use the token ids below")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"], help="of ours")
    parser.add_argument(
        "--before", metavar="CHECKOUT", help="an older Chairlift, built, which goes through transformers"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    recording = Recording(start("through_transformers", vars(args), args.model), args.out)
    for number in range(1, args.rounds + 1):
        engines = [*args.engines, *([BEFORE] if args.before else [])]
        for engine in engines if number % 2 else reversed(engines):
            print(f"round {number}: {engine}", file=sys.stderr)
            one, env = (THROUGH, {"PYTHONPATH": args.before}) if engine == BEFORE else (engine, {})
            command = [sys.executable, __file__, args.model, "--one", one, "--vocab", str(args.vocab)]
            command += ["--sequences", str(args.sequences), "--quantization", args.quantization]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
            about = {"name": engine, "round": number}
            if done.returncode:
                recording.fail(about, done.stderr.strip()[-500:])
            else:
                recording.add(about | json.loads(done.stdout.splitlines()[-1]))
    print(markdown(recording.results))


def markdown(results: Results) -> str:
    """Output tokens a second of each."""
    columns = (Column("output_tok_s", "output tok/s", "{:.0f}"), Column("load_s", "load, s", "{:.1f}"))
    settings = results["settings"]
    bits = settings.get("quantization", "none")
    about = f"{settings['sequences']} sequences of {PROMPT} tokens, {OUTPUT} out" + (
        f", {bits}" if bits != "none" else ""
    )
    text = table(results["runs"], [Column("name", "")], columns)
    return "\n\n".join([f"{caption(results)}; {about}:", text, *failures(results)])


def measure(engine: str, args: argparse.Namespace) -> dict[str, float]:
    """Load, warm up with two tokens each, and time one run."""
    words = random.Random(0)
    prompts = [workloads.random_ids(words, PROMPT, args.vocab) for _ in range(args.sequences)]
    began = time.perf_counter()
    run = _ours(engine, args.model, args.quantization) if engine in (NATIVE, THROUGH) else _theirs(engine, args.model)
    loaded = time.perf_counter()
    run(prompts, 2)
    timed = time.perf_counter()
    made = run(prompts, OUTPUT)
    seconds = time.perf_counter() - timed
    assert made == OUTPUT * len(prompts), f"{made} tokens"
    return {"output_tok_s": made / seconds, "load_s": loaded - began}


def _ours(engine: str, model: str, quantization: str) -> Any:
    import chairlift

    implementation = "native" if engine == NATIVE else "transformers"
    settings = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_gb": 1, "enable_prefix_caching": False}
    llm = chairlift.LLM(model, implementation=implementation, quantization=quantization, **settings)

    def run(prompts: list[list[int]], length: int) -> int:
        params = chairlift.SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def _theirs(engine: str, model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded.eval().to(device)

    def config(length: int) -> Any:
        return GenerationConfig(
            max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0
        )

    def run(prompts: list[list[int]], length: int) -> int:
        if engine == PLAIN:
            made = loaded.generate(torch.tensor(prompts, device=device), generation_config=config(length))
            return int((made.shape[1] - PROMPT) * len(prompts))
        found = loaded.generate_batch(prompts, generation_config=config(length))
        return sum(len(each.generated_tokens) for each in found.values())

    # generate_batch writes, in a thread of its own, what it was given here.
    return torch.no_grad()(run)


if __name__ == "__main__":
    main()

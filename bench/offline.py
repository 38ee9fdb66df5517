"""Chairlift's rate on a workload, in process: python bench/offline.py MODEL WORKLOAD [--repeat 3] [SETTING=VALUE ...]

Prints one JSON line: the median of `repeat` runs after a warm-up, prefix caching off, 64 sequences at most.
"""

import argparse
import json
import statistics
import time

import workloads

import chairlift


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("workload", choices=workloads.NAMES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="any field of EngineConfig, as JSON")
    args = parser.parse_args()
    settings = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_gb": 2, "enable_prefix_caching": False}
    settings |= {name: json.loads(value) for name, _, value in (s.partition("=") for s in args.settings)}
    start = time.perf_counter()
    llm = chairlift.LLM(args.model, **settings)
    load = time.perf_counter() - start
    jobs = workloads.requests(args.workload)
    prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
    params = [chairlift.SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for _, n in jobs]
    llm.generate([[1, 2, 3]], chairlift.SamplingParams(max_tokens=4), use_tqdm=False)
    seconds = []
    for _ in range(args.repeat):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    median = statistics.median(seconds)
    print(
        json.dumps(
            {
                "engine": "chairlift",
                "ops": llm.engine.info.ops,
                "workload": args.workload,
                "load_s": round(load, 1),
                "seconds": round(median, 2),
                "output_tok_s": round(made / median, 1),
                "best_tok_s": round(made / min(seconds), 1),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Chairlift's rate in process: python benchmarks/offline.py MODEL WORKLOAD[,WORKLOAD...] [SETTING=VALUE ...] [--repeat
3]

Prints one JSON line a workload: the median of `repeat` runs after a warm-up, prefix caching off, 64 sequences at most.
`--roofline` measures right after the runs what the machine allows (benchmarks/roofline.py) and adds the share reached.
"""

import argparse
import json
import time
from collections.abc import Callable

from offline_run import Jobs, add_arguments, report, take_turns

import chairlift


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="any field of SequenceConfig, as JSON")
    parser.add_argument("--turns", action="store_true", help="step by step, as offline_run.take_turns says")
    parser.add_argument("--roofline", action="store_true", help="print the share of the machine's limit")
    args = parser.parse_intermixed_args()
    settings = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_gb": 2, "enable_prefix_caching": False}
    settings |= {name: json.loads(value) for name, _, value in (s.partition("=") for s in args.settings)}
    start = time.perf_counter()
    llm = chairlift.LLM(args.model, **settings)
    load = time.perf_counter() - start

    def prepare(jobs: Jobs) -> Callable[[], int]:
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        params = [chairlift.SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for _, n in jobs]

        def run() -> int:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return run

    if args.turns:
        take_turns(prepare, llm.engine)
        return

    def limit(workload: str) -> float:
        # Here, so that the seconds to load still hold the import of torch.
        from roofline import Machine

        machine = Machine.of(args.model, llm.config.quantization, llm.config.kv_cache_dtype)
        return float(machine.limit(workload)["limit_tok_s"])

    report("chairlift", args, load, prepare, limit if args.roofline else None, ops=llm.engine.info.ops)


if __name__ == "__main__":
    main()

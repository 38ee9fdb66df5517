"""vLLM's rates in process, run by its own interpreter: vllm_engine.py MODEL WORKLOAD[,WORKLOAD...] [--repeat 3]"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

# Behind the installed packages, of which some share a name with a file there.
sys.path.append(str(Path(__file__).parents[1]))

from offline_run import arguments, report


def main() -> None:
    from vllm import LLM, SamplingParams

    args = arguments()
    start = time.perf_counter()
    llm = LLM(args.model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False)
    load = time.perf_counter() - start

    def prepare(jobs: list[tuple[list[int], int]]) -> Callable[[], int]:
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for _, n in jobs]

        def run() -> int:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return run

    report("vllm", args, load, prepare)


# Its worker process imports this file again.
if __name__ == "__main__":
    main()

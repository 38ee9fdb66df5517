"""OpenVINO GenAI's rates, run by its own interpreter: openvino_engine.py MODEL WORKLOAD[,WORKLOAD...] [--repeat 3]"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

# Behind the installed packages, of which some share a name with a file there.
sys.path.append(str(Path(__file__).parents[1]))

from offline_run import arguments, report


def main() -> None:
    args = arguments()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, 64, 512
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    start = time.perf_counter()
    pipe = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", {})
    load = time.perf_counter() - start

    def prepare(jobs: list[tuple[list[int], int]]) -> Callable[[], int]:
        prompts = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in jobs]
        configs = [genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False) for _, n in jobs]

        def run() -> int:
            return sum(len(result.m_generation_ids[0]) for result in pipe.generate(prompts, configs))

        return run

    report("openvino", args, load, prepare)


if __name__ == "__main__":
    main()

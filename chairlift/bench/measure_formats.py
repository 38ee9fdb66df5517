"""One format of weights: what it takes, how fast it is, and how well the model still predicts a text."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chairlift.bench.perplexity import WINDOW, Surprise, surprise, windows_of
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import ConfigError
from chairlift.library.llm import LLM


class Exercise(NamedTuple):
    """What every format is to do: predict the first tokens of a text, and answer so many prompts at once."""

    text: str
    text_tokens: int
    sequences: list[int]
    prompt_len: int
    output_len: int
    seed: int


def measure_format(
    model: str, settings: Mapping[str, Any], exercise: Exercise, on_progress: Callable[[], object]
) -> tuple[dict[str, Any], Surprise]:
    """Load a model with these settings and measure it. Raises ConfigError for what the model can't do.

    `on_progress` is called when it is loaded, when the text was predicted and for each number of sequences.
    """
    began = time.perf_counter()
    llm = LLM(model, enable_prefix_caching=False, max_num_seqs=max(exercise.sequences), **settings)
    loaded = time.perf_counter() - began
    try:
        info = llm.engine.info
        wanted = exercise.prompt_len + exercise.output_len
        if wanted > info.max_model_len:
            raise ConfigError(
                f"the model takes {info.max_model_len} tokens: --prompt-len and --output-len make {wanted}"
            )
        on_progress()
        windows = windows_of(llm.tokenizer, exercise.text, exercise.text_tokens, min(WINDOW, info.max_model_len - 1))
        found = surprise(llm, windows)
        on_progress()
        speeds = {}
        for count in exercise.sequences:
            speeds[str(count)] = _tokens_a_second(llm, count, exercise)
            on_progress()
    finally:
        llm.close()
    return {
        "ops": info.ops,
        "load_s": loaded,
        "weight_mb": info.weight_bytes / 1e6,
        "kv_bytes": info.kv_bytes / (info.num_blocks * info.block_size),
        "tok_s": speeds,
        "text_tokens": sum(map(len, windows)),
        "perplexity": found.perplexity,
    }, found


def _tokens_a_second(llm: LLM, count: int, exercise: Exercise) -> float:
    """Output tokens a second of so many sequences that begin at once, their prompts included."""
    draw = random.Random(exercise.seed)
    vocabulary = llm.engine.info.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(exercise.prompt_len)] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=exercise.output_len, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

"""What a model that answers in one call takes on this machine: batches of many sizes, timed."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any

from chairlift.bench.measure_sequences import check_seconds
from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError, RequestFailed
from chairlift.plan.machine_profile import LEAST_SAMPLES, CallSample, ItemProfile
from chairlift.plan.resampler import fit_calls
from chairlift.runners.items import Encoding, ItemInfo, ItemRunner

_LENGTHS = (8, 32, 128, 512, 2048)


def measure_items(
    config: ItemConfig,
    runner: ItemRunner,
    seconds: float = 20.0,
    *,
    examples: Sequence[Any] = (),
    seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> ItemProfile:
    """Load a model, and time its calls for so many seconds, of which `on_progress` hears the share that has passed.

    Sizes are those of the server: a text's tokens, and 1 for anything else. Texts are made up; of other payloads there
    must be `examples`. Raises ConfigError without any, or if there is too little time for enough calls, and
    RequestFailed if the model fails at one.
    """
    check_seconds(seconds)
    info = runner.load()
    try:
        most = config.max_batch_size or info.max_batch_size or 32
        runner.warm_up(config.warm_up_for(most))
        calls: list[CallSample] = []
        began = time.monotonic()
        for payloads, computed in _batches(info, config, most, examples, seed):
            calls.append(_timed(runner, payloads, computed))
            passed = (time.monotonic() - began) / seconds
            on_progress(min(passed, 1.0))
            if passed > 1:
                break
    finally:
        runner.close()
    if len(calls) < LEAST_SAMPLES:
        raise ConfigError(f"only {len(calls)} calls were timed in {seconds:g} s; give it more time")
    call, size = fit_calls(calls)
    return ItemProfile(model=config.model, call=call, size=size, calls=calls)


def _timed(runner: ItemRunner, payloads: list[Any], computed: float) -> CallSample:
    began = time.perf_counter()
    results = runner.run(payloads)
    seconds = time.perf_counter() - began
    for result in results:
        if isinstance(result, BaseException):
            raise RequestFailed(f"the model failed at an example: {result}")
    return CallSample(len(payloads), computed, seconds)


def _batches(
    info: ItemInfo, config: ItemConfig, most: int, examples: Sequence[Any], seed: int
) -> Iterator[tuple[list[Any], float]]:
    """Batches of all sizes, and of texts of all lengths, without end; each with its computed size."""
    rng = random.Random(seed)
    sizes = sorted({size for size in (2**power for power in range(most.bit_length())) if size < most} | {most})
    if config.kind == "encoder" and not examples:
        longest = info.max_tokens or max(_LENGTHS)
        within = config.max_batch_tokens or most * longest
        lengths = sorted({min(length, longest) for length in _LENGTHS})
        shapes = [(size, length) for size, length in product(sizes, lengths) if size * length <= within]
        shapes = shapes or [(1, min(longest, within))]
        while True:
            for size, length in rng.sample(shapes, len(shapes)):
                ids = [[rng.randrange(info.vocab_size or 1) for _ in range(length)] for _ in range(size)]
                yield [Encoding(each) for each in ids], float(size * length)
    if not examples:
        raise ConfigError(f"to measure {config.model} takes examples of what it is sent; give it some")
    line = cycle(examples)
    while True:
        for size in rng.sample(sizes, len(sizes)):
            yield list(islice(line, size)), float(size)

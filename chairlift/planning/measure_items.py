"""What a model that answers in one call takes on this machine: batches of many sizes, timed."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any

import numpy as np

from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.errors import ConfigError, RequestFailed
from chairlift.plan.machine_profile import LEAST_SAMPLES, CallSample, ItemProfile
from chairlift.plan.resampler import fit_calls
from chairlift.planning.measure_sequences import check_seconds
from chairlift.runners.function import FunctionRunner
from chairlift.runners.host_cpus import usable_cpus
from chairlift.runners.host_memory import process_bytes
from chairlift.runners.items import Encoding, ItemInfo, ItemRunner, TensorSpec
from chairlift.runners.tensors import dtype_of

_LENGTHS = (8, 32, 128, 512, 2048)
# Tokens of the largest call, where the settings do not say: what is larger takes as much longer as it holds more.
_MOST_TOKENS = 16_384
# What a tensor has where its size is open.
_OPEN_SIZE = 8


def measure_items(
    config: ItemConfig,
    runner: ItemRunner,
    seconds: float = 20.0,
    *,
    examples: Sequence[Any] = (),
    largest: int = DEFAULT_MAX_BATCH_SIZE,
    seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> ItemProfile:
    """Load a model, and time its calls for so many seconds, of which `on_progress` hears the share that has passed.

    Sizes are those of the server: a text's tokens, and 1 for anything else. Texts are made up, and so are tensors of
    which the model tells the shapes; of other payloads there must be `examples`, or one of the class's own. The
    `largest` batch is that of the settings or of the model, if they have one. Raises ConfigError without any example,
    or if there is too little time for enough calls, and RequestFailed if the model fails at one.
    """
    check_seconds(seconds)
    info = runner.load()
    try:
        most = config.max_batch_size or info.max_batch_size or largest
        runner.warm_up(config.warm_up_for(most))
        given = list(examples) or _own_examples(runner, info)
        calls, busy = _timed_calls(runner, _batches(info, config, most, given, seed), seconds, on_progress)
    finally:
        runner.close()
    if len(calls) < LEAST_SAMPLES:
        raise ConfigError(f"only {len(calls)} calls were timed in {seconds:g} s; give it more time")
    call, size = fit_calls(calls)
    return ItemProfile(
        model=config.model,
        call=call,
        size=size,
        calls=calls,
        # Of a GPU's work this sees only that of the process which waits for it.
        cores=0.0 if info.device.startswith("cuda") else busy / sum(each.seconds for each in calls),
        cpus=0 if info.device.startswith("cuda") else usable_cpus(),
        weight_bytes=info.weight_bytes,
        process_bytes=process_bytes(os.getpid()),
        max_tokens=info.max_tokens,
        max_batch_size=info.max_batch_size,
        max_wait_ms=info.max_wait_ms,
    )


def _timed_calls(
    runner: ItemRunner,
    batches: Iterator[tuple[list[Any], float]],
    seconds: float,
    on_progress: Callable[[float], object],
) -> tuple[list[CallSample], float]:
    """Calls for so many seconds, and the seconds of processor time that they took."""
    calls: list[CallSample] = []
    began, busy = time.monotonic(), 0.0
    for payloads, computed in batches:
        before = time.process_time()
        calls.append(_timed(runner, payloads, computed))
        busy += time.process_time() - before
        passed = (time.monotonic() - began) / seconds
        on_progress(min(passed, 1.0))
        if passed > 1:
            break
    return calls, busy


def _timed(runner: ItemRunner, payloads: list[Any], computed: float) -> CallSample:
    began = time.perf_counter()
    results = runner.run(payloads)
    seconds = time.perf_counter() - began
    for result in results:
        if isinstance(result, BaseException):
            raise RequestFailed(f"the model failed at an example: {result}")
    return CallSample(len(payloads), computed, seconds)


def _own_examples(runner: ItemRunner, info: ItemInfo) -> list[Any]:
    """What the model itself tells of its payloads."""
    if isinstance(runner, FunctionRunner) and (own := runner.hooks.example()):
        return list(own)
    return [{spec.name: _made_up(spec) for spec in info.inputs}] if info.inputs else []


def _made_up(spec: TensorSpec) -> np.ndarray[Any, Any]:
    shape = [_OPEN_SIZE if size < 0 else size for size in spec.shape]
    return np.full(shape, b"a", object) if spec.datatype == "BYTES" else np.zeros(shape, dtype_of(spec.datatype))


def _payload(inputs: Sequence[TensorSpec], example: Any) -> Any:
    """An example as it stands in a file, as the payload of a model with these inputs: arrays in place of lists."""
    if not inputs or not isinstance(example, dict):
        return example
    types = {spec.name: spec.datatype for spec in inputs}
    return {name: np.asarray(value, dtype_of(types[name])) for name, value in example.items() if name in types}


def _batches(
    info: ItemInfo, config: ItemConfig, most: int, examples: Sequence[Any], seed: int
) -> Iterator[tuple[list[Any], float]]:
    """Batches of all sizes, and of texts of all lengths, without end; each with its computed size."""
    rng = random.Random(seed)
    sizes = sorted({size for size in (2**power for power in range(most.bit_length())) if size < most} | {most})
    if config.kind == "encoder":
        longest = info.max_tokens or max(_LENGTHS)
        within = config.max_batch_tokens or max(_MOST_TOKENS, longest)
        lengths = sorted({min(length, longest) for length in _LENGTHS})
        shapes = [(size, length) for size, length in product(sizes, lengths) if size * length <= within]
        shapes = shapes or [(1, min(longest, within))]
        while True:
            for size, length in rng.sample(shapes, len(shapes)):
                ids = [[rng.randrange(info.vocab_size or 1) for _ in range(length)] for _ in range(size)]
                yield [Encoding(each) for each in ids], float(size * length)
    if not examples:
        raise ConfigError(f"to measure {config.model} takes examples of what it is sent; give it some")
    line = cycle([_payload(info.inputs, example) for example in examples])
    while True:
        for size in rng.sample(sizes, len(sizes)):
            yield list(islice(line, size)), float(size)

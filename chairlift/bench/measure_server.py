"""What a server that runs already takes, seen from outside: requests of known lengths, and when their answers come."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, pairwise, product
from math import prod
from statistics import median
from typing import Any

import uvloop

from chairlift.bench.completion_stream import Outcome, stream
from chairlift.bench.measure_sequences import check_seconds
from chairlift.bench.running_server import HttpAnswer, RunningServer
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.errors import ConfigError, RequestFailed
from chairlift.plan.machine_profile import (
    LEAST_SAMPLES,
    CallSample,
    FrontCost,
    ItemProfile,
    SequenceProfile,
    StepSample,
)
from chairlift.plan.resampler import fit_calls, fit_steps, line_through

# Prompts that are sent alone, and answers of several at once: how many, after which prompts, of how many tokens.
_PROMPTS = (1, 16, 64, 128, 256, 512)
_LEVELS, _CONTEXTS, _ANSWER, _SHORT = (1, 2, 4, 8, 16, 32), (32, 256), 24, 4
# Token ids that every vocabulary has, and that are no special tokens.
_IDS = range(10, 100)
_LENGTHS, _MOST_TOKENS, _MOST_ITEMS, _OPEN_SIZE = (8, 32, 128, 512), 8_192, 64, 8
_ROUND_TRIPS = 15
# An answer that takes longer is given up.
_PATIENCE_S = 30.0


def measure_served_sequences(
    server: RunningServer,
    about: dict[str, Any],
    config: SequenceConfig,
    seconds: float,
    on_progress: Callable[[float], object],
) -> tuple[SequenceProfile, FrontCost]:
    """Time a language model's server by answers to at most half of its slots at once, for at most so many seconds.

    A step is what passes between two tokens of an answer, so it has the gap after it, and what the front does, in it.
    Raises ConfigError for a server that waits for full batches, and RequestFailed with the first error that it gives.
    """
    check_seconds(seconds)
    strategy = STRATEGIES[config.strategy]
    if strategy.closes_batch and "max_wait_ms" not in strategy.settings:
        raise ConfigError(f"a {config.strategy} server answers full batches only: plan with its folder, or a --profile")
    window = config.max_wait_ms / 1000 if "max_wait_ms" in strategy.settings else 0.0
    name, rng, began = str(about["id"]), random.Random(0), time.monotonic()
    server.check_priority("/v1/completions", {"model": name, "prompt": _ids(rng, 1), "max_tokens": 1})
    trip = _round_trip(server)
    longest = min(int(about["max_model_len"]) - _ANSWER, config.max_num_batched_tokens)
    firsts: dict[int, list[float]] = {}
    steps: list[StepSample] = []
    for jobs in _jobs(longest, max(config.slots // 2, 1)):
        outcomes = _sent(server, name, rng, jobs)
        if len(jobs) == 1:
            firsts.setdefault(jobs[0][0], []).append(outcomes[0].times[0] - outcomes[0].sent - window)
        steps += _decodes(outcomes, jobs)
        passed = (time.monotonic() - began) / seconds
        on_progress(min(passed, 1.0))
        if passed > 1:
            break
    front = _front(firsts, steps, trip)
    steps += _prompts(firsts, front)
    if len(steps) < LEAST_SAMPLES:
        raise ConfigError(f"only {len(steps)} steps were timed in {seconds:g} s; give it more time")
    memory = about["memory"]
    return SequenceProfile(
        model=name,
        max_model_len=int(about["max_model_len"]),
        num_blocks=memory["num_blocks"],
        block_size=memory["block_size"],
        max_num_batched_tokens=config.max_num_batched_tokens,
        cost=fit_steps(steps).coefficients,
        steps=steps,
        weight_bytes=memory["weight_bytes"],
        kv_bytes=memory["kv_bytes"],
    ), front


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(_IDS, k=count)


def _round_trip(server: RunningServer) -> float:
    """Seconds of the shortest request, which the front answers by itself."""
    times = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        server.get("/version")
        times.append(time.perf_counter() - began)
    return median(times)


def _jobs(longest: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """What is sent at once: tokens of prompts and of answers, over and over."""
    prompts = sorted({max(min(length, longest), 1) for length in _PROMPTS})
    contexts = sorted({max(min(length, longest), 1) for length in _CONTEXTS})
    levels = [level for level in _LEVELS if level <= most]
    while True:
        for length in prompts:
            yield [(length, _SHORT)]
        for level, length in product(levels, contexts):
            yield [(length, _ANSWER)] * level


def _sent(server: RunningServer, name: str, rng: random.Random, jobs: Sequence[tuple[int, int]]) -> list[Outcome]:
    """What became of requests that were sent together. Raises RequestFailed if one failed."""
    target = server.target(name)
    requests = [target.request(_ids(rng, prompt), output) for prompt, output in jobs]

    async def together() -> list[Outcome]:
        now = time.perf_counter()
        async with asyncio.timeout(_PATIENCE_S):
            return list(await asyncio.gather(*(stream(target, request, now) for request in requests)))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcomes = runner.run(together())
    except TimeoutError:
        raise RequestFailed(f"{server.url} took longer than {_PATIENCE_S:g} s over {len(jobs)} short answers") from None
    for outcome in outcomes:
        if outcome.error is not None:
            raise RequestFailed(f"{server.url}: {outcome.error}")
    return outcomes


def _decodes(outcomes: Sequence[Outcome], jobs: Sequence[tuple[int, int]]) -> list[StepSample]:
    """The steps in which all of them had a token: what passed between two tokens of the one that began last.

    A text that comes with several tokens at once says only how long they took together.
    """
    count, (prompt, _) = len(jobs), jobs[0]
    last = max(outcomes, key=lambda outcome: outcome.times[0])
    end = min(outcome.times[-1] for outcome in outcomes)
    times = [moment for moment in last.times if moment <= end]
    each = 1.0 if len(last.times) == last.tokens else (last.tokens - 1) / max(len(last.times) - 1, 1)
    samples = []
    for index, (sooner, later) in enumerate(pairwise(times)):
        read = count * int(prompt + 1 + index * each + (each - 1) / 2)
        if later > sooner:
            samples.append(StepSample(count, count, read, read, (later - sooner) / each))
    return samples


def _front(firsts: dict[int, list[float]], steps: Sequence[StepSample], trip: float) -> FrontCost:
    """What a first token of the shortest prompt takes more than a step: in the front, and on the way to the worker."""
    single = [step.seconds for step in steps if step.sequences == 1]
    if not firsts or not single:
        return FrontCost()
    more = max(median(firsts[min(firsts)]) - median(single), 0.0)
    request = min(more, trip)
    return FrontCost(request=request, hop=(more - request) / 2)


def _prompts(firsts: dict[int, list[float]], front: FrontCost) -> Iterator[StepSample]:
    """The steps that computed whole prompts: what their first tokens took without the front and the way there."""
    overhead = front.request + 2 * front.hop
    for length, times in firsts.items():
        for each in times:
            yield StepSample(1, length, length, length * (length + 1) // 2, max(each - overhead, 1e-6))


def measure_served_items(
    server: RunningServer,
    about: dict[str, Any],
    config: ItemConfig,
    examples: Sequence[Any],
    seconds: float,
    on_progress: Callable[[float], object],
) -> tuple[ItemProfile, FrontCost]:
    """Time a server of a model that answers in one call, by requests one after the other, each a batch of its own.

    Calls are as long as the server's own headers say. Raises ConfigError without examples of what can't be made up.
    """
    check_seconds(seconds)
    rng, began = random.Random(0), time.monotonic()
    calls: list[CallSample] = []
    rest: list[tuple[float, float]] = []
    for path, body, count, computed in _requests(server, about, config, examples, rng):
        if not calls:
            server.check_priority(path, body)
        reply = server.post(path, body)
        call, waited = _header(reply, "x-inference-time-ms"), _header(reply, "x-queue-time-ms")
        # Who shared a call with others' requests says nothing of its own size.
        if int(reply.headers.get("x-batch-size", 0)) == count and call > 0:
            calls.append(CallSample(count, computed, call))
            rest.append((float(count), max(reply.seconds - call - waited, 0.0)))
        passed = (time.monotonic() - began) / seconds
        on_progress(min(passed, 1.0))
        if passed > 1:
            break
    if len(calls) < LEAST_SAMPLES:
        raise ConfigError(f"only {len(calls)} calls were timed in {seconds:g} s; give it more time")
    call, size = fit_calls(calls)
    request, item = line_through(rest)
    profile = ItemProfile(
        model=str(about["id"]),
        call=call,
        size=size,
        calls=calls,
        weight_bytes=about["memory"]["weight_bytes"],
        max_tokens=about["max_model_len"],
    )
    return profile, FrontCost(request=request, item=item)


def _header(reply: HttpAnswer, name: str) -> float:
    return float(reply.headers.get(name, 0.0)) / 1000


def _requests(
    server: RunningServer, about: dict[str, Any], config: ItemConfig, examples: Sequence[Any], rng: random.Random
) -> Iterator[tuple[str, Any, int, float]]:
    """Requests of all sizes, without end: path, body, items and their computed size."""
    name, most = str(about["id"]), min(config.limits().max_batch_size, _MOST_ITEMS)
    sizes = sorted({size for size in (2**power for power in range(most.bit_length())) if size < most} | {most})
    if config.kind == "encoder":
        path = "/v1/embeddings" if about["task"] == "embed" else "/pooling"
        longest = about["max_model_len"] or max(_LENGTHS)
        within = config.max_batch_tokens or max(_MOST_TOKENS, longest)
        lengths = sorted({min(length, longest) for length in _LENGTHS})
        shapes = [(size, length) for size, length in product(sizes, lengths) if size * length <= within] or [(1, 1)]
        while True:
            for size, length in rng.sample(shapes, len(shapes)):
                inputs = [_ids(rng, length) for _ in range(size)]
                yield path, {"model": name, "input": inputs}, size, float(size * length)
    if about["task"] == "tensors" and not examples:
        tensors = server.get(f"/v2/models/{name}")["inputs"]
        if server.get(f"/v2/models/{name}/config")["max_batch_size"] == 0:
            sizes = [1]
        while True:
            for size in rng.sample(sizes, len(sizes)):
                body = {"inputs": [_tensor(each, size) for each in tensors]}
                yield f"/v2/models/{name}/infer", body, size, float(size)
    if not examples:
        raise ConfigError(f"to measure {name} takes --examples of what it is sent")
    line = cycle(examples)
    while True:
        for size in rng.sample(sizes, len(sizes)):
            yield f"/v1/models/{name}:predict", {"instances": list(islice(line, size))}, size, float(size)


def _tensor(about: dict[str, Any], size: int) -> dict[str, Any]:
    """A tensor of zeros for so many items, whose first axis, where it is open, is theirs."""
    shape = [int(each) for each in about["shape"]]
    if shape and shape[0] < 0:
        shape[0] = size
    shape = [_OPEN_SIZE if each < 0 else each for each in shape]
    filling = "a" if about["datatype"] == "BYTES" else False if about["datatype"] == "BOOL" else 0
    return {"name": about["name"], "datatype": about["datatype"], "shape": shape, "data": [filling] * prod(shape)}

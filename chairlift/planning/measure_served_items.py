"""What a server of a model that answers in one call takes, seen from outside: what its answers say of their calls."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, product
from math import prod
from typing import Any

from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError
from chairlift.plan.machine_profile import LEAST_SAMPLES, CallSample, FrontCost, ItemProfile
from chairlift.plan.resampler import fit_calls, line_through
from chairlift.planning.measure_sequences import check_seconds
from chairlift.planning.running_server import HttpAnswer, RunningServer

# Token ids that every vocabulary has, and that are no special tokens.
_IDS = range(10, 100)
_LENGTHS, _MOST_TOKENS, _MOST_ITEMS, _OPEN_SIZE = (8, 32, 128, 512), 8_192, 64, 8


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
                inputs = [rng.choices(_IDS, k=length) for _ in range(size)]
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

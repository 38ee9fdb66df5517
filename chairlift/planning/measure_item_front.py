"""What the front takes for requests that are answered in one call, and how it slows its worker down: on a server."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from chairlift.bench.completion_stream import Target
from chairlift.bench.load import Arrival, Load, closed_loop, open_loop
from chairlift.bench.replay import PromptMaker
from chairlift.config.items import ItemConfig
from chairlift.errors import RequestFailed
from chairlift.plan.item_case import ItemCase
from chairlift.plan.machine_profile import FrontCost, ItemProfile
from chairlift.plan.trace import TraceRequest
from chairlift.planning.measured_server import MEASURED, cpu_seconds, measured_server
from chairlift.planning.running_server import RunningServer
from chairlift.planning.served_traffic import served_calls

# Clients at once, and requests of a crowd: so many if there is time, and no fewer. A crowd is sent so many times.
_CLIENTS, _MOST, _LEAST, _CROWDS = 128, 800, 64, 3
# By how much more come by themselves than are answered, and the seconds that the last answers may take.
_TOO_MANY, _PATIENCE_S = 0.3, 60.0
# Words of a short text and of a long one, and items of a request with several; those of a crowd are between the former.
_SHORT, _LONG, _MANY = 8, 200, 8
# Items that may wait, at least: none of a crowd is to be refused.
_ROOM = 4096
# What a tokenizer puts around a text.
_ADDED = 2
# How many times the items of a crowd all crowds together have, those before they count included.
_ALL_CROWDS = 8
# What a request takes at least with its client, for how many there is time; and the least that is said of the front.
_REQUEST_S, _LEAST_S, _LEAST_HOP_S = 1e-3, 1e-6, 2e-5


class ItemRequests(NamedTuple):
    """Where requests go, and the body of one with so many items of so many words; `sized` if these are texts."""

    target: Target
    body: Callable[[int, int], dict[str, Any]]
    sized: bool

    def posted(self, lengths: Sequence[int], items: int = 1) -> list[bytes]:
        """Requests of these lengths."""
        return [self.target.post(self.body(items, length)) for length in lengths]


def measure_item_front(
    config: ItemConfig,
    profile: ItemProfile,
    examples: Sequence[Any],
    seconds: float,
    on_progress: Callable[[float], object],
) -> FrontCost:
    """Serve a model whose calls were measured alone, and see what its front takes, in about so many seconds.

    Where nobody says what time a process takes, for tensors, and where there is no time for a crowd it counts as free.
    Raises Unavailable if the model can't be served, and RequestFailed with the server's error.
    """
    # A word may be two tokens.
    rng, longest = random.Random(0), max(min(_LONG, ((profile.max_tokens or 2 * _LONG) - _ADDED) // 2), 1)
    lengths = [rng.randint(min(_SHORT, longest), longest) for _ in range(_MOST)]
    sized = config.kind == "encoder"
    each = profile.call + profile.size * (fmean(lengths) if sized else 1.0)
    number = min(int(seconds / (_ALL_CROWDS * max(each, _REQUEST_S))), _MOST)
    if number < _LEAST or not (sized or examples) or not Path("/proc/self/stat").exists():
        on_progress(1.0)
        return FrontCost()
    config = msgspec.structs.replace(
        config, max_waiting=max(config.max_waiting, _ROOM), max_queue_ms=None, timeout_ms=None
    )
    with measured_server(config) as server:
        requests = _requests(server.url, sized, examples)
        front, _ = item_front(requests, server.pid, config, profile, lengths[:number], on_progress)
    return front


def item_front(
    requests: ItemRequests,
    pid: int,
    config: ItemConfig,
    profile: ItemProfile,
    lengths: Sequence[int],
    on_progress: Callable[[float], object] = lambda share: None,
) -> tuple[FrontCost, float]:
    """What the front takes, which is process `pid`, for a request, a token and an item, and what slows its worker down.

    `lengths` are those of the traffic, or like them: a crowd of such tells what a request takes while the worker
    computes, which then wants all cores. Also returns the seconds of processor time that a request takes of the client.
    Raises RequestFailed with the server's first error.
    """
    number, token, item = len(lengths), 0.0, 0.0
    longest = max(lengths)
    least = min(_SHORT, longest)
    crowds = _crowds(pid, requests, config, lengths, on_progress)
    mixed = median(held for held, _ in crowds)
    short, _ = _held(pid, requests, requests.posted([least] * number))
    if requests.sized:
        few = max(number // 4, 1)
        long, _ = _held(pid, requests, requests.posted([longest] * few))
        many, _ = _held(pid, requests, requests.posted([least] * few, _MANY))
        token = max((long - short) / max(longest - least, 1), 0.0)
        item = max((many - short) / (_MANY - 1) - token * (least + _ADDED), 0.0)
    on_progress(0.9)
    server = RunningServer(f"http://{requests.target.host}:{requests.target.port}")
    between = _median(call.gap for call in served_calls(server, requests.target.model))
    alone, _ = _held(pid, requests, requests.posted([least] * _LEAST), clients=1)
    lag = _median(call.lag for call in served_calls(server, requests.target.model)[-_LEAST:] if call.gap is None)
    limits = config.limits(profile.max_batch_size, profile.max_wait_ms)
    # Who is alone has a batch of its own, and in a crowd, whose batches are full, a share of one.
    share = 1 / max(min(limits.max_batch_size, (limits.max_batch_tokens or inf) / _mean_size(requests, lengths)), 1)
    shared = mixed - item - token * (fmean(lengths) + _ADDED)
    own = alone - item - token * (least + _ADDED)
    batch = max((own - shared) / (1 - share), 0.0) if share < 1 else 0.0
    request = max(shared - share * batch, _LEAST_S)
    hop = max(lag - batch / 2, _LEAST_HOP_S)
    front = FrontCost(request=request, prompt_token=token, item=item, batch=batch, hop=hop, between=between)
    on_progress(1.0)
    taken = median(_seconds(load) for _, load in crowds)
    trace = tuple(TraceRequest(arrival=0.0, input_length=_tokens(requests, length)) for length in lengths)
    freely = number / ItemCase(profile, trace, front=front).capacity(config, number)
    # What works for a request takes a core each meanwhile: the front, and the client.
    client = fmean(load.cpu / number for _, load in crowds)
    contention = (taken - freely) / (mixed * number)
    return msgspec.structs.replace(front, contention=min(max(contention, 0.0), 1 + client / mixed)), client


def _crowds(
    pid: int,
    requests: ItemRequests,
    config: ItemConfig,
    lengths: Sequence[int],
    on_progress: Callable[[float], object],
) -> list[tuple[float, Load]]:
    """Requests that come by themselves, as traffic does, and faster than they are answered: no worker rests."""
    number = len(lengths)
    _, waiting = _held(pid, requests, requests.posted(lengths))
    # No more than may wait.
    spare = min(_TOO_MANY, config.max_waiting / 2 / number)
    apart = _seconds(waiting) / number / (1 + spare)
    crowds = []
    for done in range(1, _CROWDS + 1):
        crowds.append(_held(pid, requests, requests.posted(lengths), apart=apart))
        on_progress(0.6 * done / _CROWDS)
    return crowds


def _median(lags: Iterable[float | None]) -> float:
    """Of those that are known; 0 if none is."""
    known = [lag for lag in lags if lag is not None]
    return median(known) if known else 0.0


def _mean_size(requests: ItemRequests, lengths: Sequence[int]) -> float:
    return fmean(_tokens(requests, length) for length in lengths)


def _tokens(requests: ItemRequests, length: int) -> int:
    return length + _ADDED if requests.sized else 1


def _held(
    pid: int, requests: ItemRequests, posted: Sequence[bytes], clients: int = _CLIENTS, apart: float | None = None
) -> tuple[float, Load]:
    """The seconds for which each of these requests held the front's thread.

    They come from clients that wait for their answers, or by themselves, so many seconds `apart`.
    """
    closed_loop(requests.target, posted[: 2 * clients], clients, "warm-up")
    before = held_seconds(pid)
    if apart is None:
        load = closed_loop(requests.target, posted, clients, "front")
    else:
        arrivals = [Arrival(number * apart, request) for number, request in enumerate(posted)]
        load = open_loop(requests.target, arrivals, len(posted) * apart, _PATIENCE_S, "front")
    held = held_seconds(pid) - before
    failed = [outcome.error for outcome in load.outcomes if outcome.error]
    if failed:
        raise RequestFailed(f"the server failed {len(failed)} of {len(posted)} requests: {failed[0]}")
    return held / len(posted), load


def held_seconds(pid: int) -> float:
    """For how long a process's first thread has worked, or waited for a core to; where that is not told, all its time.

    While a worker computes on all cores, what the front does takes as much longer as it waits for one.
    """
    try:
        worked, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return cpu_seconds(pid)
    return (int(worked) + int(waited)) / 1e9


def _seconds(load: Load) -> float:
    return max(each.ended for each in load.outcomes) - min(each.due for each in load.outcomes)


def _requests(url: str, sized: bool, examples: Sequence[Any]) -> ItemRequests:
    """What a server of this model is sent."""
    if not sized:
        line = cycle(examples)
        path = f"/v1/models/{MEASURED}:predict"
        return ItemRequests(Target.of(url, MEASURED, path=path), lambda items, length: _instances(line, items), False)
    about = RunningServer(url).model(MEASURED)
    path = "/v1/embeddings" if about["task"] == "embed" else "/pooling"
    prompts, numbers = PromptMaker(seed=1), iter(range(2**62))

    def body(items: int, length: int) -> dict[str, Any]:
        wanted = TraceRequest(arrival=0.0, input_length=length)
        return {"model": MEASURED, "input": [prompts.text(wanted, next(numbers)) for _ in range(items)]}

    return ItemRequests(Target.of(url, MEASURED, path=path), body, True)


def _instances(line: "cycle[Any]", items: int) -> dict[str, Any]:
    return {"instances": list(islice(line, items))}

"""A trace: which requests came when, how long they were, and what they had in common; never what they said."""

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from math import inf

import msgspec

# What one element of `hash_ids` stands for in Mooncake's traces.
TOKENS_PER_HASH = 512
# Token ids that stand for prompts: of hashes, and below zero of what a prompt has for itself.
_OWN = -1
# A beginning that this share of a trace's requests have is no conversation's own.
_COMMON = 0.1


class TraceRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One request. `arrival` is in seconds after the trace begins, lengths are in tokens.

    Prompts whose `hash_ids` begin alike begin with the same text: `block_size` tokens for each of them. `output_length`
    is how many tokens came, `max_tokens` how many might have come, if that is known. `model` is empty where there is
    only one. A request with `items` is to a model that answers in one call: so many inputs of `input_length` each.
    `timeout` is in seconds; one that was given up at it is `late`, and had more to say than its `output_length`.
    `priority` 0 is the default, lower is sooner. With `hold_updates` nobody reads the tokens as they come.
    """

    arrival: float
    input_length: int
    output_length: int = 0
    max_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()
    block_size: int = TOKENS_PER_HASH
    model: str = ""
    tenant: str = ""
    priority: int = 0
    background: bool = False
    timeout: float | None = None
    late: bool = False
    items: int = 0
    shape_key: Hashable = None
    hold_updates: bool = False


def prompt_ids(request: TraceRequest, number: int) -> list[int]:
    """Return token ids with the lengths and the common prefixes of a trace's prompts, for a scheduler to hash.

    `number` tells this request from all others.
    """
    ids: list[int] = []
    for value in request.hash_ids:
        if len(ids) >= request.input_length:
            break
        ids += [value] * min(request.block_size, request.input_length - len(ids))
    return ids + [_OWN - number] * (request.input_length - len(ids))


def duration(trace: Sequence[TraceRequest]) -> float:
    """The seconds from the beginning of a trace to its last arrival."""
    return max((request.arrival for request in trace), default=0.0)


def scaled(trace: Sequence[TraceRequest], speed: float = 1.0, lengths: float = 1.0) -> list[TraceRequest]:
    """Return a trace that comes so many times as fast, with prompts and answers of so many times their lengths."""
    if not (0 < speed < inf and 0 < lengths < inf):
        raise ValueError(f"speed and lengths must be more than 0, and finite, got {speed:g} and {lengths:g}")
    return [
        msgspec.structs.replace(
            request,
            arrival=request.arrival / speed,
            input_length=max(round(request.input_length * lengths), 1),
            output_length=max(round(request.output_length * lengths), min(request.output_length, 1)),
            max_tokens=None if request.max_tokens is None else max(round(request.max_tokens * lengths), 1),
            block_size=max(round(request.block_size * lengths), 1),
        )
        for request in trace
    ]


def repeated(trace: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """Return `count` requests: those of a trace over and over, at its rate.

    What most of its requests share, as they do a system prompt, they share again; whatever else one begins with is new
    each time, as another client's would be.
    """
    if count <= len(trace):
        return list(trace[:count])
    lasts = duration(trace) * len(trace) / max(len(trace) - 1, 1)
    seen = Counter(number for request in trace for number in set(request.hash_ids))
    common = {number for number, times in seen.items() if times >= _COMMON * len(trace)}
    beyond = 1 + max(seen, default=0)
    found = list(trace)
    while len(found) < count:
        turn, place = divmod(len(found), len(trace))
        request = trace[place]
        ids = tuple(number if number in common else number + turn * beyond for number in request.hash_ids)
        found.append(msgspec.structs.replace(request, arrival=request.arrival + turn * lasts, hash_ids=ids))
    return found


def fitted(trace: Sequence[TraceRequest], max_model_len: int) -> list[TraceRequest]:
    """Return a trace in which every prompt and its answer fit.

    Of those that do not, answers are cut to what their prompts leave, or half of it if that is more, and prompts to the
    rest. `max_tokens` is what the prompt leaves at most, as a server would refuse more.
    """
    found = []
    for request in trace:
        output = min(request.output_length, max(max_model_len - request.input_length, max_model_len // 2))
        prompt = min(request.input_length, max_model_len - output)
        most = None if request.max_tokens is None else min(max(request.max_tokens, output), max_model_len - prompt)
        found.append(
            msgspec.structs.replace(request, input_length=prompt, output_length=output, max_tokens=most or None)
        )
    return found


def cut_notes(trace: Sequence[TraceRequest], cut: Sequence[TraceRequest], max_model_len: int) -> list[str]:
    """Return what is to be said of a trace and what was `fitted` of it, which is nothing if all did fit."""
    pairs = zip(trace, cut, strict=True)
    count = sum(
        one.input_length > other.input_length or one.output_length > other.output_length for one, other in pairs
    )
    return [f"{count} of {len(trace)} requests were cut to the model's {max_model_len} tokens"] if count else []


def with_answers(trace: Sequence[TraceRequest], seed: int = 0) -> list[TraceRequest]:
    """Return a trace in which those without an answer of their own get the length of somebody else's.

    These were refused, or given up at their deadline, who get more than they had.
    """
    lengths = [request.output_length for request in trace if request.output_length and not request.late]
    rng = random.Random(f"{seed} answers")

    def answered(request: TraceRequest) -> TraceRequest:
        had = request.output_length
        if request.items or (had and not request.late) or not (lengths or had):
            return request
        length = max(rng.choice(lengths) if lengths else 0, had + request.late)
        most = length if request.max_tokens is None else request.max_tokens
        return msgspec.structs.replace(request, output_length=min(length, most))

    return [answered(request) for request in trace]

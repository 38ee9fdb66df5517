"""The last minutes of a server that runs: what came, and the very steps or calls that it took, for `chairlift plan`."""

from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from chairlift.errors import ConfigError, RequestFailed
from chairlift.plan.advice import rounded
from chairlift.plan.machine_profile import CallSample, FrontCost, ItemProfile, SequenceProfile
from chairlift.plan.seen_traffic import (
    AllArrivals,
    SeenItems,
    SeenSequences,
    item_profile,
    item_trace,
    seen_front,
    sequence_profile,
    sequence_trace,
)
from chairlift.plan.trace import TraceRequest, duration, scaled
from chairlift.planning.running_server import RunningServer

# What a server says of it that has answered too few.
TOO_LITTLE = "too_little_traffic"
_FLAGS = "--trace FILE, or --rate with what requests are like"
# Where so many times as many came as are listed, these are a sample: of less, clients that left may be the cause.
_A_SAMPLE = 1.05


class ServedTraffic(NamedTuple):
    """Requests, as often as they came, the model with what its steps or calls took, and in words how much was seen."""

    trace: list[TraceRequest]
    profile: SequenceProfile | ItemProfile
    front: FrontCost
    about: str


class _Answer(msgspec.Struct):
    """What `GET /v1/traffic` tells."""

    seen: SeenSequences | SeenItems
    window_s: float
    came: AllArrivals | None = None


def served_traffic(server: RunningServer, about: dict[str, Any]) -> ServedTraffic:
    """Ask for the last minutes of a model, of which the server has told this. Raises ConfigError if that is no help."""
    try:
        answer = _asked(server, str(about["id"]))
    except (ConfigError, RequestFailed) as error:
        raise ConfigError(f"say what comes: {_FLAGS}; of the server's own traffic nothing follows: {error}") from None
    seen, minutes = answer.seen, answer.window_s / 60
    if isinstance(seen, SeenItems):
        return _as_often(_of_items(seen, about, minutes), answer.came)
    return _as_often(_of_sequences(seen, about, minutes), answer.came)


def _as_often(traffic: ServedTraffic, came: AllArrivals | None) -> ServedTraffic:
    """The same requests as often as all came, of which they may be a sample: a server keeps few of those it refuses."""
    lasts = duration(traffic.trace)
    if came is None or came.requests <= _A_SAMPLE * came.listed or not lasts:
        return traffic
    rate = came.requests / came.seconds
    sample = "only a sample is known of the requests that were refused or given up"
    note = f"{sample}: {rounded(rate)} came a second in all, which is the rate unless --rate gives another"
    trace = scaled(traffic.trace, rate * lasts / len(traffic.trace))
    return traffic._replace(trace=trace, about=f"{traffic.about}; {note}")


def served_calls(server: RunningServer, name: str) -> list[CallSample]:
    """Ask for the calls of the last minutes of a model that answers in one call. Raises RequestFailed for too few."""
    seen = told_traffic(server, name)
    return seen.calls if isinstance(seen, SeenItems) else []


def told_traffic(server: RunningServer, name: str) -> SeenSequences | SeenItems:
    """What a server tells of a model's last minutes, however little that is.

    Raises RequestFailed if it is nothing, ConfigError if it makes no sense, and Unavailable.
    """
    return _asked(server, name, least_answered=1).seen


def check_tells(server: RunningServer, name: str) -> None:
    """Raise ConfigError if a server does not tell its traffic, to this key or at all."""
    try:
        told_traffic(server, name)
    except RequestFailed as error:
        if TOO_LITTLE not in str(error):
            problem = f"the server does not tell what steps it takes: {error}"
            advice = "use a key with the right admin, or plan with its folder, or a --profile"
            raise ConfigError(f"{problem}; {advice}") from None


def _asked(server: RunningServer, name: str, **query: int) -> _Answer:
    raw = server.get(f"/v1/traffic?{urlencode({'model': name, **query})}")
    try:
        answer = msgspec.convert(raw, _Answer, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{server.url} tells its traffic in another way: {error}") from None
    seen = answer.seen
    samples: list[Any] = seen.calls if isinstance(seen, SeenItems) else seen.steps
    if not seen.requests or not samples:
        raise ConfigError(f"{server.url} tells of no requests, or of nothing that it did for them")
    if isinstance(seen, SeenSequences) and any(step.seconds <= 0 or step.tokens < 1 for step in seen.steps):
        raise ConfigError(f"{server.url} tells of steps that took no time, or had no token")
    return answer


def _of_sequences(seen: SeenSequences, about: dict[str, Any], minutes: float) -> ServedTraffic:
    memory = about["memory"]
    bare = msgspec.structs.replace(
        seen.profile, model=str(about["id"]), weight_bytes=memory["weight_bytes"], kv_bytes=memory["kv_bytes"]
    )
    profile = sequence_profile(seen.steps, seen.requests, seen.cost, bare)
    most = max(step.sequences for step in profile.steps)
    # At another rate, or with other settings, other things happen at a moment.
    timeless = [msgspec.structs.replace(step, began=None) for step in profile.steps]
    return ServedTraffic(
        sequence_trace(seen.requests, bare.block_size, bare.max_model_len),
        msgspec.structs.replace(profile, steps=timeless),
        seen_front(seen.requests),
        f"{_said(seen, minutes)} and {len(timeless)} of its steps; for more than {most} sequences in a step, the most "
        "that it had, times go by the cost model alone",
    )


def _of_items(seen: SeenItems, about: dict[str, Any], minutes: float) -> ServedTraffic:
    profile = item_profile(str(about["id"]), seen.calls)
    most = max(call.items for call in profile.calls)
    timeless = [msgspec.structs.replace(call, began=None) for call in profile.calls]
    profile = msgspec.structs.replace(
        profile, calls=timeless, weight_bytes=about["memory"]["weight_bytes"], max_tokens=about["max_model_len"]
    )
    return ServedTraffic(
        item_trace(seen.requests, seen.sized),
        profile,
        seen_front(seen.requests),
        f"{_said(seen, minutes)} and {len(timeless)} of its calls; for more than {most} items in a call, the most "
        "that it had, times go by a line through these; instances stay as they are",
    )


def _said(seen: SeenSequences | SeenItems, minutes: float) -> str:
    return f"planned with its own last {minutes:g} minutes: {len(seen.requests)} requests"

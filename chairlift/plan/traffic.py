"""Traffic that is described and not recorded: how requests come, how long they are, and what they have in common."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import ceil, cos, exp, inf, log, pi
from pathlib import Path

import msgspec

from chairlift.errors import ConfigError, clip
from chairlift.plan.trace import TraceRequest
from chairlift.plan.trace_files import MOST_REQUESTS, MOST_TOKENS, read_trace

LENGTHS = "constant:N, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:P95 or trace:FILE"
ARRIVALS = "poisson:RATE, gamma:RATE:CV, steps:RATExSECONDS,RATExSECONDS,... or day:MEAN:PEAK:SECONDS"
# The 95th percentile of the standard normal distribution.
_P95 = 1.6448536269514722
_LEAST_CV, _MOST_CV = 1e-3, 100.0


class Traffic(msgspec.Struct, kw_only=True, frozen=True):
    """What comes, in words: `arrivals` as in `ARRIVALS`, with rates a second, and lengths in tokens as in `LENGTHS`.

    `shared_prefix` tokens of each prompt are those of one of `num_prefixes` groups, drawn evenly: they come on top.
    Where it is known when requests come, `arrivals` says nothing.
    """

    arrivals: str = ""
    input_length: str
    output_length: str = "constant:1"
    shared_prefix: int = 0
    num_prefixes: int = 1
    model: str = ""
    items: int = 0


def synthetic(traffic: Traffic, seconds: float, seed: int = 0) -> list[TraceRequest]:
    """Return the requests of so many seconds, the same for the same arguments. Raises ConfigError, saying how it goes.

    Lengths are drawn apart from arrivals: another rate means the same lengths in the same order.
    """
    if not 0 < seconds < inf:
        raise ConfigError(f"traffic must last more than 0 seconds, got {seconds:g}")
    moments = _moments(traffic.arrivals, seconds, random.Random(f"{seed} arrivals"))
    requests = requests_at(islice(moments, MOST_REQUESTS + 1), traffic, seed)
    if len(requests) > MOST_REQUESTS:
        raise ConfigError(f"{traffic.arrivals} for {seconds:g} s is more than {MOST_REQUESTS} requests")
    return requests


def requests_at(moments: Iterable[float], traffic: Traffic, seed: int = 0) -> list[TraceRequest]:
    """Return requests that come at these moments, of the lengths that are described. Raises ConfigError."""
    if traffic.shared_prefix < 0 or traffic.num_prefixes < 1:
        raise ConfigError("shared_prefix must be at least 0, and num_prefixes at least 1")
    rng = random.Random(f"{seed} lengths")
    inputs = length_sampler(traffic.input_length, rng, lambda request: request.input_length)
    outputs = length_sampler(traffic.output_length, rng, lambda request: request.output_length)
    requests: list[TraceRequest] = []
    for arrival in moments:
        prefix = rng.randrange(traffic.num_prefixes)
        requests.append(
            TraceRequest(
                arrival=arrival,
                input_length=traffic.shared_prefix + max(inputs(), 1),
                output_length=max(outputs(), 1),
                hash_ids=(prefix,) if traffic.shared_prefix else (),
                block_size=max(traffic.shared_prefix, 1),
                model=traffic.model,
                items=traffic.items,
            )
        )
    return requests


def length_sampler(form: str, rng: random.Random, column: Callable[[TraceRequest], int]) -> Callable[[], int]:
    """Return what draws lengths; `column` is which length of a trace is meant. Raises ConfigError for other forms."""
    kind, _, rest = form.partition(":")
    try:
        if kind == "constant":
            value = _tokens(rest)
            return lambda: value
        if kind == "uniform":
            low, high = (_tokens(part) for part in rest.split(":"))
            if low > high:
                raise ValueError(f"{low} is more than {high}")
            return lambda: rng.randint(low, high)
        if kind == "exponential":
            scale = 1 / _length(rest)
            return lambda: min(ceil(rng.expovariate(scale)), MOST_TOKENS)
        if kind == "lognormal":
            median, p95 = (_length(part) for part in rest.split(":"))
            if p95 < median:
                raise ValueError(f"{p95:g} is less than {median:g}")
            mu, sigma = log(median), log(p95 / median) / _P95
            return lambda: ceil(exp(min(rng.normalvariate(mu, sigma), log(MOST_TOKENS))))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"length {form!r} is not {LENGTHS}: {error}") from None
    if kind == "trace":
        # Whoever was refused has no answer.
        lengths = [length for request in read_trace(Path(rest)) if (length := column(request)) > 0]
        if not lengths:
            raise ConfigError(f"{rest} has no request with such a length")
        return lambda: rng.choice(lengths)
    raise ConfigError(f"length {form!r} is not {LENGTHS}")


def _moments(form: str, seconds: float, rng: random.Random) -> Iterator[float]:
    """When requests come, up to so many seconds."""
    kind, _, rest = form.partition(":")
    try:
        if kind == "poisson":
            steady = _positive(rest)
            return _varying(rng, seconds, lambda now: steady, steady)
        if kind == "gamma":
            mean, cv = (_positive(part) for part in rest.split(":"))
            if not _LEAST_CV <= cv <= _MOST_CV:
                raise ValueError(f"a coefficient of variation is between {_LEAST_CV:g} and {_MOST_CV:g}")
            return _gamma(rng, seconds, mean, cv)
        if kind == "steps":
            steps = [_step(each) for each in rest.split(",")]
            return _varying(rng, seconds, _stairs(steps), max(rate for rate, _ in steps))
        if kind == "day":
            mean, peak, length = (_positive(part) for part in rest.split(":"))
            if peak < mean or peak > 2 * mean:
                raise ValueError("the peak is between the mean and twice the mean")
            return _varying(rng, seconds, lambda now: mean - (peak - mean) * cos(2 * pi * now / length), peak)
    except ValueError as error:
        raise ConfigError(f"arrivals {form!r} are not {ARRIVALS}: {error}") from None
    raise ConfigError(f"arrivals {form!r} are not {ARRIVALS}")


def _tokens(text: str) -> int:
    found = int(text)
    if found > MOST_TOKENS:
        raise ValueError(f"{clip(text, 40)} is more than {MOST_TOKENS} tokens")
    return found


def _length(text: str) -> float:
    found = _positive(text)
    if found > MOST_TOKENS:
        raise ValueError(f"{found:g} is more than {MOST_TOKENS} tokens")
    return found


def _step(text: str) -> tuple[float, float]:
    rate, length = (_positive(part) for part in text.split("x"))
    return rate, length


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < inf:
        raise ValueError(f"{text!r} is not a positive number")
    return value


def _varying(rng: random.Random, seconds: float, rate: Callable[[float], float], most: float) -> Iterator[float]:
    """A Poisson process whose rate follows the time, by thinning one of the highest rate."""
    now = 0.0
    while (now := now + rng.expovariate(1.0) / most) < seconds:
        if rng.random() * most <= rate(now):
            yield now


def _gamma(rng: random.Random, seconds: float, rate: float, cv: float) -> Iterator[float]:
    """Gaps of a gamma distribution: with a coefficient of variation below 1 evener than a Poisson process's."""
    shape, now = 1 / cv**2, 0.0
    while (now := now + rng.gammavariate(shape, 1 / (shape * rate))) < seconds:
        yield now


def _stairs(steps: list[tuple[float, float]]) -> Callable[[float], float]:
    """Rates one after the other, each for its seconds, and from the start again."""
    total = sum(length for _, length in steps)

    def rate(now: float) -> float:
        left = now % total
        for height, length in steps:
            if left < length:
                return height
            left -= length
        return steps[-1][0]

    return rate

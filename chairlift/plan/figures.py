"""What a simulation amounts to: rates, percentiles, what was refused, and how full the machine was."""

from collections import Counter
from collections.abc import Sequence
from math import inf

import msgspec
import numpy as np

from chairlift.plan.simulated_run import SimulatedRequest, SimulatedRun, SimulatedSteps, within

_QUANTILES = (50, 90, 95, 99)


class Targets(msgspec.Struct, kw_only=True, frozen=True):
    """What a request must keep to count, in seconds: first token, mean time of a token after it, and end."""

    ttft: float = inf
    tpot: float = inf
    e2e: float = inf

    def met_by(self, request: SimulatedRequest) -> bool:
        """Whether a request was answered, and in time."""
        if request.end is None or request.ttft is None or request.e2e is None:
            return False
        return request.ttft <= self.ttft and (request.tpot or 0.0) <= self.tpot and request.e2e <= self.e2e


class Percentiles(msgspec.Struct, kw_only=True, frozen=True):
    """Of some samples in seconds; all are 0 if there was none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, samples: "Sequence[float] | np.ndarray") -> "Percentiles":
        """Sum up samples."""
        if not len(samples):
            return cls()
        found = np.percentile(samples, _QUANTILES).tolist()
        names = (f"p{q}" for q in _QUANTILES)
        return cls(count=len(samples), mean=float(np.mean(samples)), **dict(zip(names, found, strict=True)))


class Gauges(msgspec.Struct, kw_only=True, frozen=True):
    """How full one replica of a model was.

    `mean_batch` is of its steps, or calls, and `busy` the share of the time that these took. `mean_running` and
    `mean_waiting` are of the time in which it was busy. The blocks are those of its KV cache that were held.
    """

    steps: int = 0
    mean_batch: float = 0.0
    most_running: int = 0
    mean_running: float = 0.0
    mean_waiting: float = 0.0
    most_waiting: int = 0
    mean_kv_blocks: float = 0.0
    most_kv_blocks: int = 0
    busy: float = 0.0


class Report(msgspec.Struct, kw_only=True, frozen=True):
    """A simulation in figures. Times are in seconds, rates a second, over the time from the first arrival to the end.

    `offered` and `goodput` are of the time in which requests came, so that a long drain hides nothing: goodput counts
    those within the targets, `inside` is their share of all. `itl` is of the times between any two tokens, `tpot` of
    their means for each request. Percentiles are of answered requests.
    """

    requests: int
    answered: int
    shed: dict[str, int]
    refused: int
    seconds: float
    offered: float
    throughput: float
    output_tokens: float
    prompt_tokens: float
    goodput: float
    inside: float
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    queue: Percentiles
    preemptions: int
    cached_tokens: int
    gauges: dict[str, Gauges]


def report(outcome: SimulatedRun, targets: Targets | None = None, model: str | None = None) -> Report:
    """Sum up an outcome, or one model's part of it."""
    targets = targets or Targets()
    lives = [life for life in outcome.requests if model is None or life.model == model]
    done = [life for life in lives if life.end is not None]
    began = min((life.request.arrival for life in lives), default=0.0)
    arriving = max((life.request.arrival for life in lives), default=0.0) - began
    # Whoever was given up had steps until then.
    last = (life.shed_at if life.end is None else life.end for life in lives)
    seconds = max((moment for moment in last if moment is not None), default=began) - began
    good = sum(targets.met_by(life) for life in done)
    steps = {key: each for key, each in outcome.steps.items() if model is None or key[0] == model}
    return Report(
        requests=len(lives),
        answered=len(done),
        shed=dict(Counter(life.shed.value for life in lives if life.shed is not None)),
        refused=sum(life.refusal is not None for life in lives),
        seconds=seconds,
        offered=_rate(len(lives), arriving),
        throughput=_rate(len(done), seconds),
        output_tokens=_rate(sum(life.num_tokens for life in done), seconds),
        prompt_tokens=_rate(sum(life.request.input_length for life in done), seconds),
        goodput=_rate(good, arriving),
        inside=good / len(lives) if lives else 0.0,
        ttft=Percentiles.of([life.ttft for life in done if life.ttft is not None]),
        itl=Percentiles.of(_gaps(outcome, done)),
        tpot=Percentiles.of([life.tpot for life in done if life.tpot is not None]),
        e2e=Percentiles.of([life.e2e for life in done if life.e2e is not None]),
        queue=Percentiles.of([life.scheduled - life.request.arrival for life in done if life.scheduled is not None]),
        preemptions=sum(life.preemptions for life in lives),
        cached_tokens=sum(life.cached_tokens for life in lives),
        gauges={f"{name}/{number}": _gauges(each, seconds) for (name, number), each in steps.items()},
    )


class Latencies(msgspec.Struct, kw_only=True, frozen=True):
    """Seconds at one percentile of requests: to the first token, between two of their tokens, and to the end.

    Between two tokens a request has what so many percent of its own gaps are within: many long answers in time do not
    make up for a few that falter. Whoever was not answered waits for ever for the first token and the end.
    """

    ttft: float = 0.0
    itl: float = 0.0
    e2e: float = 0.0


def latencies(outcome: SimulatedRun, percentile: float) -> Latencies:
    """Return what so many percent of the live requests are within; `itl` is of those answered with several tokens."""
    lives = [life for life in outcome.requests if not life.request.background]
    done = [life for life in lives if life.end is not None]
    never = [inf] * (len(lives) - len(done))
    return Latencies(
        ttft=within([life.ttft for life in done if life.ttft is not None] + never, percentile),
        itl=within([outcome.felt_itl(life, percentile) for life in done if life.num_tokens > 1], percentile),
        e2e=within([life.e2e for life in done if life.e2e is not None] + never, percentile),
    )


def _gaps(outcome: SimulatedRun, lives: Sequence[SimulatedRequest]) -> "np.ndarray":
    """The seconds between any two tokens of each of these requests."""
    delivered = {key: np.array(steps.delivered) for key, steps in outcome.steps.items()}
    gaps = [np.empty(0)]
    for life in lives:
        times = delivered[life.model, life.replica]
        spans = [times[first : last + 1] for first, last in life.spans]
        if spans:
            gaps.append(np.diff(spans[0] if len(spans) == 1 else np.concatenate(spans)))
    return np.concatenate(gaps)


def _gauges(steps: SimulatedSteps, seconds: float) -> Gauges:
    if not len(steps):
        return Gauges()
    lengths, running, waiting = np.array(steps.seconds), np.array(steps.running), np.array(steps.waiting)
    blocks, busy = np.array(steps.kv_blocks), float(lengths.sum())
    return Gauges(
        steps=len(steps),
        mean_batch=float(running.mean()),
        most_running=int(running.max()),
        mean_running=_rate(float((running * lengths).sum()), busy),
        mean_waiting=_rate(float((waiting * lengths).sum()), busy),
        most_waiting=int(waiting.max()),
        mean_kv_blocks=_rate(float((blocks * lengths).sum()), busy),
        most_kv_blocks=int(blocks.max()),
        busy=_rate(busy, seconds),
    )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0

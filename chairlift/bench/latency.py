"""What a user of the server felt: figures of a load, and the columns in which people read them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from chairlift.bench.completion_stream import Outcome
from chairlift.bench.load import Load
from chairlift.bench.raw_results import Column

COLUMNS = (
    Column("offered", "offered", "{:.2f}"),
    Column("achieved", "achieved", "{:.2f}"),
    Column("ttft_ms.p50", "TTFT p50 ms"),
    Column("ttft_ms.p95", "p95"),
    Column("ttft_ms.p99", "p99"),
    Column("tpot_ms.p50", "TPOT p50 ms"),
    Column("tpot_ms.p95", "p95"),
    Column("itl_ms.p50", "ITL p50 ms"),
    Column("itl_ms.p99", "p99"),
    Column("e2e_ms.p50", "E2E p50 ms"),
    Column("e2e_ms.p99", "p99"),
    Column("output_tok_s", "tok/s"),
    Column("share_percent", "of limit", "{:.0f}%"),
    Column("goodput", "goodput/s", "{:.2f}"),
    Column("inside_percent", "inside", "{:.0f}%"),
    Column("failed", "failed"),
    Column("late_ms", "client late p99 ms", "{:.1f}"),
    Column("client_us_token", "client us/tok"),
)
RATE = Column("rate", "rate/s", "{:.2f}")
QUANTILES = {"ttft_ms": (50, 95, 99), "tpot_ms": (50, 95), "itl_ms": (50, 95, 99), "e2e_ms": (50, 99)}


@dataclass(frozen=True, slots=True)
class Slo:
    """The latency that a request must stay below to count, in milliseconds."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 120.0


def ttft(outcome: Outcome) -> float:
    """Seconds to the first text, from when the request was due: a client that is late does not flatter the server."""
    return outcome.times[0] - outcome.due


def tpot(outcome: Outcome) -> float | None:
    """Mean seconds of a token after the first, if there was more than one."""
    return (outcome.ended - outcome.times[0]) / (outcome.tokens - 1) if outcome.tokens > 1 else None


def inside(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request was answered, and in time; one of a single token has no TPOT to miss."""
    if outcome.error is not None:
        return False
    return ttft(outcome) * 1000 < slo.ttft_ms and (tpot(outcome) or 0.0) * 1000 < slo.tpot_ms


def figures(load: Load, slo: Slo, rate: float | None = None) -> dict[str, Any]:
    """Sum up a load. Rates are of what happened while requests were sent, so that a long drain hides nothing.

    Where that took less time than half of the answers did, as where all come at once, they are of the time until the
    last answer.

    `goodput` counts the requests inside the target. `itl_ms` is of the gaps between events with text. Percentiles are
    of answered requests only; `failed` and `errors` tell of the others, which are outside the target.
    """
    answered = [outcome for outcome in load.outcomes if outcome.error is None]
    good = sum(inside(outcome, slo) for outcome in answered)
    seconds = _seconds_of(load, answered)
    end = load.began + seconds
    made = sum(outcome.tokens for outcome in answered)
    tpots = [value for value in map(tpot, answered) if value is not None]
    gaps = [np.diff(outcome.times) for outcome in answered if len(outcome.times) > 1]
    samples = {
        "ttft_ms": [ttft(outcome) for outcome in answered],
        "tpot_ms": tpots,
        "itl_ms": np.concatenate(gaps) if gaps else [],
        "e2e_ms": [outcome.ended - outcome.due for outcome in answered],
    }
    lateness = [outcome.sent - outcome.due for outcome in load.outcomes]
    return {
        "rate": rate,
        "requests": len(load.outcomes),
        "seconds": round(seconds, 3),
        "offered": len(load.outcomes) / seconds,
        "achieved": sum(outcome.ended <= end for outcome in answered) / seconds,
        **{name: percentiles(values, QUANTILES[name]) for name, values in samples.items()},
        "output_tok_s": sum(_tokens_until(end, outcome) for outcome in answered) / seconds,
        "goodput": good / seconds,
        "inside_percent": 100 * good / len(load.outcomes) if load.outcomes else 0.0,
        "failed": len(load.outcomes) - len(answered),
        "errors": dict(Counter(outcome.error for outcome in load.outcomes if outcome.error).most_common(3)),
        "tokens": made,
        "late_ms": percentiles(lateness, (99,))["p99"],
        "client_us_token": 1e6 * load.cpu / made if made else 0.0,
    }


def _seconds_of(load: Load, answered: Sequence[Outcome]) -> float:
    """The seconds that rates are of; 1 where nothing took any time."""
    took = [outcome.ended - outcome.due for outcome in answered]
    if took and load.seconds < median(took):
        return max(outcome.ended for outcome in answered) - load.began
    return load.seconds or 1.0


def percentiles(seconds: Any, wanted: tuple[int, ...]) -> dict[str, float]:
    """Percentiles in milliseconds; zeros of nothing."""
    return {f"p{q}": float(np.percentile(seconds, q)) * 1000 if len(seconds) else 0.0 for q in wanted}


def _tokens_until(end: float, outcome: Outcome) -> float:
    """Tokens made until `end`, where an event may carry several."""
    if outcome.ended <= end:
        return outcome.tokens
    return outcome.tokens * sum(moment <= end for moment in outcome.times) / len(outcome.times)

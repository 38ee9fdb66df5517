"""What a shared prompt prefix saves: 64 requests at once, with the prefix in the cache and with nothing shared.

Both passes send the same tokens. In the first each request has a `cache_salt` of its own, which Chairlift and vLLM
honour, so that none can use what another computed; in the second all share one, and a warm request has gone before.
"""

import random
import re
import statistics
import urllib.error
import urllib.request
from typing import Any

from workloads import random_ids

from chairlift.bench.completion_stream import Target
from chairlift.bench.latency import ttft
from chairlift.bench.load import closed_loop
from chairlift.bench.raw_results import Column, spread, table

REQUESTS, PREFIX, UNIQUE, OUTPUT = 64, 512, 32, 16
ALONE, SHARED = "nothing shared", "prefix shared"
COLUMNS = (
    Column("ttft_p50_ms", "TTFT p50 ms"),
    Column("ttft_p95_ms", "TTFT p95 ms"),
    Column("computed", "prefill computed"),
    Column("cached", "prefill cached"),
)
COUNTERS = ("prompt_tokens_total", "prefix_cache_hit_tokens_total")


def measure(target: Target, vocab: int, seed: int, repeats: int) -> list[dict[str, Any]]:
    """Run both passes `repeats` times, each time with new tokens, and return a row for each."""
    rows = []
    for repeat in range(repeats):
        rng = random.Random(f"{seed} prefix {repeat}")
        prefix = random_ids(rng, PREFIX, vocab)
        prompts = [prefix + random_ids(rng, UNIQUE, vocab) for _ in range(REQUESTS + 1)]
        for name in (ALONE, SHARED):
            alone = name == ALONE
            salts = [f"{seed} {repeat} {index if alone else 'all'}" for index in range(len(prompts))]
            requests = [
                target.request(prompt, OUTPUT, cache_salt=salt) for prompt, salt in zip(prompts, salts, strict=True)
            ]
            closed_loop(target, requests[:1], 1, f"{name}: warm-up")
            rows.append({"pass": name, "round": repeat + 1} | _pass(target, requests[1:], name))
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """The table, and what the shared prefix saved, round by round."""
    text = table(rows, [Column("pass", f"{REQUESTS} requests at once")], COLUMNS)
    pairs = list(zip(_of(rows, ALONE), _of(rows, SHARED), strict=True))
    faster = [alone["ttft_p50_ms"] / shared["ttft_p50_ms"] for alone, shared in pairs]
    lines = [text, "", f"TTFT p50: {spread(faster, '{:.2f}')} times faster."]
    if all(row["computed"] for row in _of(rows, ALONE)):
        less = [100 * (1 - shared["computed"] / alone["computed"]) for alone, shared in pairs]
        lines.append(f"Prefill work: {spread(less, '{:.1f}%')} less.")
    return "\n".join(lines)


def _of(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["pass"] == name]


def _pass(target: Target, requests: list[bytes], title: str) -> dict[str, Any]:
    before = _counters(target)
    load = closed_loop(target, requests, len(requests), title)
    after = _counters(target)
    failed = [outcome.error for outcome in load.outcomes if outcome.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(requests)} requests failed: {failed[0]}")
    waits = sorted(1000 * ttft(outcome) for outcome in load.outcomes)
    row: dict[str, Any] = {
        "ttft_p50_ms": statistics.median(waits),
        "ttft_p95_ms": statistics.quantiles(waits, n=20)[-1],
        "computed": None,
        "cached": None,
    }
    if before and after:
        prompt, cached = (after[name] - before[name] for name in COUNTERS)
        row |= {"computed": prompt - cached, "cached": cached}
    return row


def _counters(target: Target) -> dict[str, float] | None:
    """Chairlift's counters; None from another server."""
    try:
        with urllib.request.urlopen(f"http://{target.host}:{target.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None
    found = {name: re.search(rf"^chairlift_{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE) for name in COUNTERS}
    return {name: float(match[1]) for name, match in found.items() if match} if all(found.values()) else None

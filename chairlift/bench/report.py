"""Figures of a run, and the table that people read."""

from typing import Any

import numpy as np

from chairlift.bench.raw_results import Column, Results, caption, spread
from chairlift.bench.raw_results import table as table_of
from chairlift.bench.strategies import StrategyRun

QUANTILES = (50, 95, 99)
COLUMNS = (
    Column("output_tok_s", "tok/s"),
    Column("requests_s", "req/s", "{:.1f}"),
    Column("steps", "steps"),
    Column("mean_batch", "mean batch", "{:.2f}"),
    Column("idle_slots_percent", "idle slots", "{:.0f}%"),
    Column("padding_percent", "padding", "{:.1f}%"),
    Column("kv_waste_tokens", "KV waste/seq", "{:.1f}"),
    *(Column(f"ttft_ms.p{q}", f"TTFT p{q} ms", "{:.1f}") for q in QUANTILES),
    *(Column(f"tpot_ms.p{q}", f"TPOT p{q} ms", "{:.1f}") for q in QUANTILES),
)


def figures(run: StrategyRun) -> dict[str, Any]:
    """Sum up a run.

    `idle_slots_percent`: slots that were empty, over all steps. `padding_percent`: of the rows that the model computed,
    those that hold no token. `kv_waste_tokens`: mean unused KV tokens per running sequence. Times in
    milliseconds.
    """
    lives, steps = list(run.lives.values()), run.recorder.steps
    tokens = sum(life.num_tokens for life in lives)
    rows = sum(step.num_seqs for step in steps)
    ttft = [life.first_token - life.arrival for life in lives]
    tpot = [(life.finished - life.first_token) / (life.num_tokens - 1) for life in lives if life.num_tokens > 1]
    return {
        "strategy": run.strategy,
        "slots": run.slots,
        "requests": len(lives),
        "seconds": run.seconds,
        "output_tok_s": tokens / run.seconds,
        "requests_s": len(lives) / run.seconds,
        "steps": len(steps),
        "mean_batch": rows / len(steps),
        "idle_slots_percent": 100 * (1 - rows / (len(steps) * run.slots)),
        "padding_percent": 100 * (1 - sum(s.num_tokens for s in steps) / sum(s.num_rows for s in steps)),
        "kv_waste_tokens": sum(step.unused_kv_tokens for step in steps) / rows,
        "ttft_ms": _quantiles(ttft),
        "tpot_ms": _quantiles(tpot),
    }


def bars(run: StrategyRun) -> list[list[float]]:
    """Each request's time in its slot: the slot, and when its prompt began, its tokens began and it ended."""
    start = min(life.arrival for life in run.lives.values())
    return [
        [each.slot, *(round(moment - start, 4) for moment in (each.began, each.prefill_ended, each.ended))]
        for each in run.recorder.placements.values()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Lay figures out as Markdown, which a terminal shows as well."""
    return table_of(rows, [Column("strategy", "strategy")], COLUMNS)


def markdown(results: Results) -> str:
    """The table, with how it was measured and what continuous batching gains over each strategy."""
    settings, rows = results["settings"], results["runs"]
    about = f"{settings['slots']} slots, {_requests(settings, rows)}"
    gains = "\n".join(f"- {each}" for each in ratios(rows))
    return "\n\n".join(part for part in (f"{caption(results)}; {about}:", table(rows), gains) if part)


def _requests(settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """What was served, and when it came."""
    count, rate = rows[0]["requests"], f"{settings['rate']:g} arrivals a second" if settings["rate"] else None
    if settings.get("trace"):
        return f"{count} requests of {settings['trace']}, {rate or 'at the times at which they were recorded'}"
    lengths = f"prompts {settings['prompt_len']}, outputs {settings['output_len']} tokens"
    return f"{count} requests in {rate or 'a closed loop'}, {lengths}"


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Compare each strategy with continuous in the same round, if that was among them."""
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["strategy"], {})[row.get("round", 1)] = row
    best = by_name.pop("continuous", {})
    lines = []
    for name, others in by_name.items():
        pairs = [(best[number], other) for number, other in others.items() if number in best]
        if pairs:
            steps = spread([other["steps"] / one["steps"] for one, other in pairs], "{:.2f}")
            rate = spread([one["output_tok_s"] / other["output_tok_s"] for one, other in pairs], "{:.2f}")
            lines.append(f"continuous against {name}: {steps} times fewer steps, {rate} times the tokens a second")
    return lines


def _quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {f"p{q}": 0.0 for q in QUANTILES}
    return {f"p{q}": float(np.percentile(seconds, q)) * 1000 for q in QUANTILES}

"""Figures of a run, and the table that people read."""

from typing import Any

import numpy as np

from chairlift.bench.strategies import StrategyRun

QUANTILES = (50, 95, 99)
COLUMNS = (
    ("strategy", "strategy", "{}"),
    ("output_tok_s", "tok/s", "{:.0f}"),
    ("requests_s", "req/s", "{:.1f}"),
    ("steps", "steps", "{}"),
    ("mean_batch", "mean batch", "{:.2f}"),
    ("idle_slots_percent", "idle slots", "{:.0f}%"),
    ("padding_percent", "padding", "{:.1f}%"),
    ("kv_waste_tokens", "KV waste/seq", "{:.1f}"),
    ("ttft_ms", "TTFT p50/95/99 ms", "{}"),
    ("tpot_ms", "TPOT p50/95/99 ms", "{}"),
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


def table(rows: list[dict[str, Any]]) -> str:
    """Lay figures out as Markdown, which a terminal shows as well."""
    cells = [[title for _, title, _ in COLUMNS]]
    for row in rows:
        values = {**row, "ttft_ms": _joined(row["ttft_ms"]), "tpot_ms": _joined(row["tpot_ms"])}
        cells.append([form.format(values[key]) for key, _, form in COLUMNS])
    return layout(cells)


def layout(cells: list[list[str]]) -> str:
    """Markdown of a table whose first line is the header, padded so that it can be read as it is."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    lines = ["| " + " | ".join(line) + " |" for line in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {f"p{q}": 0.0 for q in QUANTILES}
    return {f"p{q}": float(np.percentile(seconds, q)) * 1000 for q in QUANTILES}


def _joined(quantiles: dict[str, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in quantiles.values())

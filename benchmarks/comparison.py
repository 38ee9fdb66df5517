"""Results of a comparison: medians, ratios, the table and the picture."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workloads

from chairlift.bench.report import layout

OURS = "Chairlift"
COLOURS = {"Chairlift": "#1f78b4", "vLLM": "#ff7f00", "OpenVINO GenAI": "#33a02c", "llama.cpp": "#6a3d9a"}
Rates = dict[str, dict[str, float]]


def by_precision(results: dict[str, Any]) -> dict[str, Rates]:
    """Medians over the rounds: precision, engine, then workload, `share of` it where it was taken, and `load_s`."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run in results["runs"]:
        columns = found.setdefault(run["precision"], {}).setdefault(run["name"], {})
        columns.setdefault(run["workload"], []).append(run["output_tok_s"])
        columns.setdefault("load_s", []).append(run["load_s"])
        if "share_percent" in run:
            columns.setdefault(f"share of {run['workload']}", []).append(run["share_percent"])
    return {
        precision: {
            name: {column: statistics.median(values) for column, values in columns.items()}
            for name, columns in engines.items()
        }
        for precision, engines in found.items()
    }


def ratios(engines: Rates) -> dict[str, float]:
    """Chairlift's rate over the best peer's, for each workload that both have."""
    best: dict[str, float] = {}
    for name, columns in engines.items():
        for workload, rate in columns.items():
            if name != OURS and workload in workloads.NAMES:
                best[workload] = max(best.get(workload, 0.0), rate)
    ours = engines.get(OURS, {})
    return {workload: ours[workload] / rate for workload, rate in best.items() if workload in ours}


def markdown(results: dict[str, Any]) -> str:
    """The table of one model, with what was measured and what failed around it."""
    measured = [name for name in workloads.NAMES if any(run["workload"] == name for run in results["runs"])]
    cells = [["", "engine", *measured, "load, s"]]
    for precision, engines in by_precision(results).items():
        for name, columns in engines.items():
            rates = [f"{columns[workload]:.0f}" if workload in columns else "-" for workload in measured]
            cells.append([precision, name, *rates, f"{columns['load_s']:.1f}"])
        ours = engines.get(OURS, {})
        if limits := {name: f"{ours[key]:.0f}%" for name in measured if (key := f"share of {name}") in ours}:
            cells.append([precision, "Chairlift / machine's limit", *(limits.get(name, "-") for name in measured), ""])
        if shares := ratios(engines):
            cells.append([precision, "**Chairlift / best peer**", *(_ratio(shares.get(name)) for name in measured), ""])
    rounds = f"{results['rounds']} round{'s' if results['rounds'] > 1 else ''}"
    where = f"{results['machine']}, {results['date']}"
    about = f"{results['model']}, output tokens a second, {where}, medians over {rounds}:"
    lines = [about, "", layout(cells)]
    for name, numbers in _failures(results).items():
        lines += ["", f"{name} failed in round {', '.join(map(str, numbers))}."]
    return "\n".join(lines)


def draw(every: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a row of panels for each model, one panel a precision, one group of bars a workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [(results["model"], by_precision(results)) for results in every]
    columns = max(1, *(len(table) for _, table in tables))
    figure, panels = pyplot.subplots(len(tables), columns, squeeze=False, figsize=(5.5 * columns, 3.2 * len(tables)))
    for row, (model, table) in zip(panels, tables, strict=True):
        for axes in row[len(table) :]:
            axes.set_visible(False)
        for axes, (precision, engines) in zip(row, table.items(), strict=False):
            _bars(axes, engines)
            axes.set_title(f"{model}, {precision}", loc="left", fontsize=10)
        row[0].set_ylabel("output tokens a second")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def replace_between(path: Path, name: str, text: str) -> None:
    """Put text between a document's marker comments. Raises ValueError if they are not there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def _bars(axes: Any, engines: Rates) -> None:
    measured = [name for name in workloads.NAMES if any(name in columns for columns in engines.values())]
    width = 0.8 / len(engines)
    for index, (name, columns) in enumerate(engines.items()):
        places = [group + (index - (len(engines) - 1) / 2) * width for group in range(len(measured))]
        # No bar is not the same as a bar of nothing.
        rates = [columns.get(workload, math.nan) for workload in measured]
        bars = axes.bar(places, rates, width, color=COLOURS[name], label=name, linewidth=0)
        axes.bar_label(bars, ["" if math.isnan(rate) else f"{rate:.0f}" for rate in rates], fontsize=7)
    axes.set_xticks(range(len(measured)), measured)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"**{value:.2f}**"


def _failures(results: dict[str, Any]) -> dict[str, list[int]]:
    failed: dict[str, list[int]] = {}
    for failure in results["failures"]:
        failed.setdefault(f"{failure['name']}, {failure['precision']},", []).append(failure["round"])
    return failed

"""Results of a comparison: medians, ratios, the table and the picture."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workloads
from engines import BEFORE, OURS

from chairlift.bench.raw_results import Results, caption, failures, layout, num_rounds, spread

COLOURS = {
    OURS: "#1f78b4",
    BEFORE: "#a6cee3",
    "vLLM": "#ff7f00",
    "OpenVINO GenAI": "#33a02c",
    "llama.cpp": "#6a3d9a",
}
# What an engine's rows say of how it was measured otherwise than the rest.
DIFFERENCES = {"llama.cpp": "over HTTP, as it batches only in its server; its cache is float16 with any weights"}
LIMIT = (
    "the limit is what this machine's memory and warm products allowed these kernels right after the run "
    "(`benchmarks/roofline.py`); other kernels may have another"
)
BEYOND = (
    "A share above 100% is beyond what memory was taken to give, by reading 1 GiB: of a model's weights a large cache "
    "holds a part from one step to the next. The roofline has read as much as the weights are since then"
)
# Precision, engine, then workload, `share of` it where it was taken, and `load_s`: a value for each round.
Rates = dict[str, dict[str, list[float]]]


def by_precision(results: Results) -> dict[str, Rates]:
    """All values of each engine's columns, by precision."""
    found: dict[str, Rates] = {}
    for run in results["runs"]:
        columns = found.setdefault(run["precision"], {}).setdefault(run["name"], {})
        columns.setdefault(run["workload"], []).append(run["output_tok_s"])
        columns.setdefault("load_s", []).append(run["load_s"])
        if "share_percent" in run:
            columns.setdefault(f"share of {run['workload']}", []).append(run["share_percent"])
    return found


def ratios(engines: Rates) -> dict[str, float]:
    """Chairlift's median over the best peer's, for each workload that both have; its own past is no peer."""
    peers = [columns for name, columns in engines.items() if name not in (OURS, BEFORE)]
    ours = engines.get(OURS, {})
    found = {}
    for workload in workloads.NAMES:
        best = max((statistics.median(columns[workload]) for columns in peers if workload in columns), default=0.0)
        if best and workload in ours:
            found[workload] = statistics.median(ours[workload]) / best
    return found


def progress(results: Results, precision: str) -> dict[str, list[float]]:
    """Chairlift's rate over that of the older checkout in the same round, for each workload and round that has both."""
    rates = {
        (run["name"], run["round"], run["workload"]): run["output_tok_s"]
        for run in results["runs"]
        if run["precision"] == precision
    }
    found: dict[str, list[float]] = {}
    for (name, number, workload), rate in rates.items():
        if name == OURS and (BEFORE, number, workload) in rates:
            found.setdefault(workload, []).append(rate / rates[BEFORE, number, workload])
    return found


def markdown(results: Results) -> str:
    """The table of one model, with what was measured and what failed around it."""
    measured = [name for name in workloads.NAMES if any(run["workload"] == name for run in results["runs"])]
    rounds = num_rounds(results["runs"])
    cells = [["", "engine", *measured, "load, s"]]
    names: set[str] = set()
    for precision, engines in by_precision(results).items():
        names |= engines.keys()
        for name, columns in engines.items():
            rates = [spread(columns.get(workload, []), "{:.0f}", rounds) for workload in measured]
            cells.append([precision, f"{name} *" if name in DIFFERENCES else name, *rates,
                          spread(columns["load_s"], "{:.1f}")])  # fmt: skip
        ours = engines.get(OURS, {})
        if any(f"share of {name}" in ours for name in measured):
            shares = [spread(ours.get(f"share of {name}", []), "{:.0f}%", rounds) for name in measured]
            cells.append([precision, f"{OURS} / limit with these kernels", *shares, ""])
        if gains := progress(results, precision):
            cells.append([precision, f"{OURS} / before", *(spread(gains.get(n, []), "{:.2f}") for n in measured), ""])
        if best := ratios(engines):
            cells.append([precision, f"**{OURS} / best peer**", *(_ratio(best.get(name)) for name in measured), ""])
    notes = [f"\\* {name}: {about}." for name, about in DIFFERENCES.items() if name in names]
    if any("limit with" in row[1] for row in cells):
        notes.append(LIMIT[0].upper() + LIMIT[1:] + ".")
    if any(run.get("share_percent", 0) > 100 for run in results["runs"]):
        notes.append(BEYOND + ".")
    lines = [f"Output tokens a second. {caption(results)}:", "", layout(cells)]
    for note in (*notes, *failures(results)):
        lines += ["", note]
    return "\n".join(lines)


def draw(every: Sequence[Results], path: Path) -> None:
    """Draw a row of panels for each model, one panel a precision, one group of bars a workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [(f"{results['machine']}\n{results['model']}", by_precision(results)) for results in every]
    columns = max(1, *(len(table) for _, table in tables))
    figure, panels = pyplot.subplots(len(tables), columns, squeeze=False, figsize=(5.5 * columns, 3.4 * len(tables)))
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


def _bars(axes: Any, engines: Rates) -> None:
    measured = [name for name in workloads.NAMES if any(name in columns for columns in engines.values())]
    width = 0.8 / len(engines)
    for index, (name, columns) in enumerate(engines.items()):
        places = [group + (index - (len(engines) - 1) / 2) * width for group in range(len(measured))]
        # No bar is not the same as a bar of nothing.
        each = [columns.get(workload, [math.nan]) for workload in measured]
        rates = [statistics.median(values) for values in each]
        reach = [
            [rate - min(values) for rate, values in zip(rates, each, strict=True)],
            [max(values) - rate for rate, values in zip(rates, each, strict=True)],
        ]
        bars = axes.bar(places, rates, width, yerr=reach, color=COLOURS[name], label=name, linewidth=0,
                        error_kw={"linewidth": 0.8})  # fmt: skip
        axes.bar_label(bars, ["" if math.isnan(rate) else f"{rate:.0f}" for rate in rates], fontsize=7)
    axes.set_xticks(range(len(measured)), measured)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"**{value:.2f}**"

"""Results of a comparison: medians, ratios to the best peer, the table and the picture."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import workloads
from engines import BEFORE, BF16, INT4, INT8, OURS, SETTINGS

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
BEYOND = "A share above 100%: the limit was measured after the run, in a slower moment of the machine"
# The same for results from before the roofline read as much as the weights are.
BEYOND_A_GIB = (
    "A share above 100% is beyond what memory was taken to give, by reading 1 GiB: of a model's weights a large cache "
    "holds a part from one step to the next. The roofline has read as much as the weights are since then"
)
READ_A_GIB_UNTIL = "2026-11-22 23:25"
# The peers that a precision is held against: those of the same one, and of more exact ones.
AS_EXACT = {BF16: (BF16,), INT8: (INT8, BF16), INT4: (INT4, INT8, BF16)}
BEST_PEER = "The best peer, named behind the ratio, is the fastest of all in the row's precision or a more exact one"
# When results were begun whose llama.cpp was built without AMX on a machine that has it, since with it its server
# ended in a segmentation fault there. Later ones have it in `--llama-build`.
WITHOUT_AMX = ("2026-11-23 12:53", "2026-11-23 13:01", "2026-11-23 15:32", "2026-11-23 16:08", "2026-11-26 03:28")
SHORT = {"OpenVINO GenAI": "OpenVINO"}
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


class Ratio(NamedTuple):
    """Chairlift's median over that of the best peer, and who that is."""

    value: float
    peer: str
    precision: str

    @property
    def named(self) -> str:
        """The peer, as a cell has it."""
        return f"({SHORT.get(self.peer, self.peer)} {self.precision})"


def ratios(tables: dict[str, Rates], precision: str) -> dict[str, Ratio]:
    """Chairlift's ratio in a precision for each workload that it and a peer have; its own past is no peer."""
    peers = [
        (name, each, columns)
        for each in AS_EXACT[precision]
        for name, columns in tables.get(each, {}).items()
        if name not in (OURS, BEFORE)
    ]
    ours = tables.get(precision, {}).get(OURS, {})
    found = {}
    for workload in workloads.NAMES:
        rates = [
            (statistics.median(columns[workload]), name, each) for name, each, columns in peers if workload in columns
        ]
        if rates and workload in ours:
            best, name, each = max(rates, key=lambda rate: rate[0])
            found[workload] = Ratio(statistics.median(ours[workload]) / best, name, each)
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
    cells = [["", "engine", *measured, "load, s"]]
    tables = by_precision(results)
    for precision in tables:
        cells += _rows_of(results, tables, precision, measured)
    notes = [f"\\* {note}" for note in _differences(results)]
    notes.append(_settings(results))
    if any("best peer" in row[1] for row in cells):
        notes.append(BEST_PEER + ".")
    if any("limit with" in row[1] for row in cells):
        notes.append(LIMIT[0].upper() + LIMIT[1:] + ".")
    if any(run.get("share_percent", 0) > 100 for run in results["runs"]):
        notes.append((BEYOND_A_GIB if results["started"] < READ_A_GIB_UNTIL else BEYOND) + ".")
    lines = [f"Output tokens a second. {caption(results)}:", "", layout(cells)]
    for note in (*notes, *failures(results)):
        lines += ["", note]
    return "\n".join(lines)


def _rows_of(results: Results, tables: dict[str, Rates], precision: str, measured: list[str]) -> list[list[str]]:
    """The rows of a precision: its engines, then how Chairlift stands to the limit, its past and the best peer."""
    engines, rounds = tables[precision], num_rounds(results["runs"])
    cells = []
    for name, columns in engines.items():
        rates = [spread(columns.get(workload, []), "{:.0f}", rounds) for workload in measured]
        load = spread(columns["load_s"], "{:.1f}")
        cells.append([precision, f"{name} *" if name in DIFFERENCES else name, *rates, load])
    ours = engines.get(OURS, {})
    if any(f"share of {name}" in ours for name in measured):
        shares = [spread(ours.get(f"share of {name}", []), "{:.0f}%", rounds) for name in measured]
        cells.append([precision, f"{OURS} / limit with these kernels", *shares, ""])
    if gains := progress(results, precision):
        cells.append([precision, f"{OURS} / before", *(spread(gains.get(n, []), "{:.2f}") for n in measured), ""])
    if best := ratios(tables, precision):
        found = [best.get(name) for name in measured]
        named = [f"**{ratio.value:.2f}** {ratio.named}" if ratio else "-" for ratio in found]
        cells.append([precision, f"**{OURS} / best peer**", *named, ""])
    return cells


def _differences(results: Results) -> list[str]:
    """A sentence for each engine that was measured otherwise than the rest."""
    names = {run["name"] for run in results["runs"]}
    return [
        f"{name}: {about}{_build(results) if name == 'llama.cpp' else ''}."
        for name, about in DIFFERENCES.items()
        if name in names
    ]


def _build(results: Results) -> str:
    """How llama.cpp was built, where that matters or is known."""
    if said := results["settings"].get("llama_build"):
        return f"; built {said}"
    if not any("amx" in run.get("ops", "") for run in results["runs"]):
        return ""
    if results["started"] in WITHOUT_AMX:
        return "; built without AMX, with which its server ended in a segmentation fault here"
    return "; whether it was built with AMX was not saved"


def _settings(results: Results) -> str:
    """What was set of each engine."""
    names = dict.fromkeys(run["name"] for run in results["runs"])
    return "Settings: " + "; ".join(f"{name} {SETTINGS[name]}" for name in names if name in SETTINGS) + "."


def draw(every: Sequence[Results], path: Path) -> None:
    """Draw a row of panels for each model, one panel a precision, one group of bars a workload.

    Below them is what the tables say: the ratios, when and how it was measured, and what was measured otherwise.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [(results, by_precision(results)) for results in every]
    columns = max(1, *(len(table) for _, table in tables))
    notes = [textwrap.fill(each, 95 * columns) for results in every for each in _notes(results)]
    room = 0.16 * sum(note.count("\n") + 1 for note in notes) + 0.1
    height = 3.8 * len(tables) + room
    figure, panels = pyplot.subplots(len(tables), columns, squeeze=False, figsize=(5.5 * columns, height))
    for row, (results, table) in zip(panels, tables, strict=True):
        for axes in row[len(table) :]:
            axes.set_visible(False)
        for axes, (precision, engines) in zip(row, table.items(), strict=False):
            _bars(axes, engines)
            axes.set_title(f"{results['machine']}\n{results['model']}, {precision}", loc="left", fontsize=10)
            best = ratios(table, precision)
            said = [f"{name}: {OURS} / best peer {each.value:.2f} {each.named}" for name, each in best.items()]
            axes.set_xlabel("\n".join(said), fontsize=7)
        row[0].set_ylabel("output tokens a second")
    figure.tight_layout(rect=(0, room / height, 1, 1))
    figure.text(0.01, 0.05 / height, "\n".join(notes), fontsize=7, va="bottom")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _notes(results: Results) -> list[str]:
    """What stands below the bars of a model."""
    bars = "Bars are medians, lines reach from the lowest round to the highest"
    return [f"{caption(results)}. {bars}. {_settings(results)}", *_differences(results), *failures(results)]


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

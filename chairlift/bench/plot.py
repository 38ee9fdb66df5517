"""Pictures: who had which slot when, one bar a request; and latency over throughput, one line a strategy."""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.bench.raw_results import Results
from chairlift.errors import ConfigError
from chairlift.plan.case import Point
from chairlift.plan.planner import ServingPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUES = 12


def check_plot() -> None:
    """Get ready to draw into files. Raises ConfigError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install 'chairlift[plot]' ({error})") from None
    matplotlib.use("Agg")


def plot(results: Results, path: Path) -> None:
    """Draw the first round below one another on one time axis. Raises ConfigError if matplotlib is missing."""
    check_plot()
    from matplotlib import pyplot

    runs = [run for run in results["runs"] if "bars" in run]
    figure, panels = pyplot.subplots(
        len(runs), 1, sharex=True, squeeze=False, figsize=(12, 0.9 + sum(0.9 + 0.14 * run["slots"] for run in runs))
    )
    longest = max(run["seconds"] for run in runs)
    for run, axes in zip(runs, panels[:, 0], strict=True):
        _draw(axes, run, longest)
    panels[-1, 0].set_xlabel("seconds since the first request")
    figure.suptitle("Who is where: one row a slot, one bar a request (dark: prompt, light: decoding)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axes: "Axes", run: dict[str, Any], longest: float) -> None:
    from matplotlib import colormaps

    colours = colormaps["Paired"]
    slots = run["slots"]
    for index, (slot, began, turned, ended) in enumerate(run["bars"]):
        # "Paired" alternates light and dark shades of one hue.
        hue = index % (HUES // 2)
        box: dict[str, Any] = {"height": 0.86, "linewidth": 0}
        axes.barh(slot, ended - turned, left=turned, color=colours(2 * hue), **box)
        axes.barh(slot, turned - began, left=began, color=colours(2 * hue + 1), **box)
    axes.axvline(run["seconds"], color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, longest * 1.02)
    axes.set_ylim(-0.6, slots - 0.4)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_ylabel(f"{slots} slot{'s' if slots > 1 else ''}")
    taken = f"{run['mean_batch']:.2f} of {slots} slots taken"
    title = f"{run['strategy']}: {run['seconds']:.2f} s, {run['steps']} steps, {taken}"
    axes.set_title(title, loc="left", fontsize=10)


def plot_formats(results: Results, path: Path) -> None:
    """Draw the speed of each format over the memory of its weights, a panel for each number of sequences.

    Raises ConfigError if matplotlib is missing.
    """
    check_plot()
    from matplotlib import pyplot

    counts = results["settings"]["sequences"]
    figure, panels = pyplot.subplots(1, len(counts), squeeze=False, figsize=(4.2 * len(counts), 3.6))
    for count, axes in zip(counts, panels[0], strict=True):
        for name in dict.fromkeys(run["format"] for run in results["runs"]):
            runs = [run for run in results["runs"] if run["format"] == name]
            speeds = [run["tok_s"][str(count)] for run in runs]
            about = f"{name}, perplexity x{runs[0]['ratio']:.3f}"
            axes.plot([run["weight_mb"] for run in runs], speeds, "o", markersize=7, label=about)
        axes.set_xlim(0, None)
        axes.set_ylim(0, None)
        axes.set_xlabel("MB of weights")
        axes.set_title("1 sequence" if count == 1 else f"{count} sequences", loc="left", fontsize=10)
    panels[0][0].set_ylabel("output tokens a second")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"{results['model']}: what each format takes and gives", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_curves(plan: ServingPlan, path: Path) -> None:
    """Draw what each strategy's best settings make of rising rates, with the knee of each line.

    Raises ConfigError if matplotlib is missing.
    """
    check_plot()
    from matplotlib import pyplot

    items = any(point.items for each in plan.strategies for point in each.curve)

    def speed(point: Point) -> float:
        return point.items if items else point.output_tokens

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for each in plan.strategies:
        seen = [point for point in each.curve if isfinite(point.latencies.e2e)]
        speeds, times = [speed(point) for point in seen], [point.latencies.e2e for point in seen]
        (line,) = axes.plot(speeds, times, marker="o", markersize=3, label=each.strategy)
        knee = each.curve[each.knee]
        axes.plot(speed(knee), knee.latencies.e2e, marker="D", markersize=8, color=line.get_color())
    axes.set_yscale("log")
    axes.set_xlabel("items a second" if items else "output tokens a second")
    axes.set_ylabel(f"seconds from arrival to the end of the answer, p{plan.targets.percentile:g}")
    axes.set_title("Throughput against latency (diamond: the knee)", loc="left", fontsize=10)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

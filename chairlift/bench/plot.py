"""The picture: one row a slot, one bar a request, time to the right."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.bench.raw_results import Results
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUES = 12


def plot(results: Results, path: Path) -> None:
    """Draw the first round below one another on one time axis. Raises ConfigError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'chairlift[plot]'") from None
    matplotlib.use("Agg")
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

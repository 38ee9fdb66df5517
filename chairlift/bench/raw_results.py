"""Raw results of a benchmark: what was measured where, when and how, and an entry of `runs` for each run of each round.

Tables, captions and pictures are made of these alone, so that none of them says more than was measured.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.bench.output_files import saving
from chairlift.errors import ConfigError

Results = dict[str, Any]
_MOMENT = "%Y-%m-%d %H:%M"
_PACKAGES = ("torch", "numpy")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells each flag's default, if there is one and the words do not tell it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "") or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Column(NamedTuple):
    """A column of a table: where a run has it (`ttft_ms.p50` is within `ttft_ms`), its title, and a number's form."""

    key: str
    title: str
    form: str = "{:.0f}"


def start(
    benchmark: str,
    settings: Mapping[str, Any],
    model: str | None = None,
    secret: str | None = None,
    peers: Mapping[str, str] | None = None,
) -> Results:
    """Results without runs. `benchmark` is the module whose `markdown` shows them; paths are cut to their last part.

    The `secret` that the command has is left out. `peers` are the versions of other engines that are measured.
    """
    arguments = [each.replace(secret, "***") if secret else each for each in sys.argv[1:]]
    return {
        "benchmark": benchmark,
        "model": Path(model).name if model else None,
        "command": [Path(sys.argv[0]).name, *map(_last_part, arguments)],
        "settings": {name: _plain(value) for name, value in settings.items() if not callable(value)},
        "commit": _commit(),
        "machine": machine_in_words(),
        "versions": {"python": platform.python_version()} | _versions() | dict(peers or {}),
        "started": time.strftime(_MOMENT),
        "runs": [],
        "failures": [],
    }


def save(results: Results, path: Path) -> None:
    """Write results as JSON, a line for each run, with the moment of the last."""
    results["ended"] = time.strftime(_MOMENT)
    head = json.dumps({name: value for name, value in results.items() if name != "runs"}, indent=1)
    runs = ",\n  ".join(json.dumps(run) for run in results["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.removesuffix("\n}") + f',\n "runs": [\n  {runs}\n ]\n}}\n')


def add_result_flags(parser: argparse.ArgumentParser, saves: str, draws: str) -> None:
    """Give a benchmark's parser the flags for what becomes of its results; the texts say what it saves and draws."""
    parser.add_argument("--rounds", type=int, default=1, help="every other one goes backwards")
    parser.add_argument("--out", type=Path, metavar="FILE", help=saves)
    parser.add_argument("--saved", type=Path, metavar="FILE", help="show saved results instead of measuring")
    parser.add_argument("--plot", type=Path, metavar="PNG", help=f"{draws} (needs chairlift[plot])")
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")


def saved(path: Path, benchmark: str, command: str) -> Results:
    """Read results of a benchmark. Raises ConfigError, which calls it by its command, if they are none."""
    try:
        results: Results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--saved {path}: {error}") from None
    if not isinstance(results, dict) or results.get("benchmark") != benchmark:
        raise ConfigError(f"--saved {path}: these are not results of `{command}`")
    if not results.get("runs") or "settings" not in results:
        raise ConfigError(f"--saved {path}: there are no runs in it")
    return results


class Recording:
    """Results as they come: each run is saved at once, if there is a file to save it in."""

    def __init__(self, results: Results, path: Path | None) -> None:
        self.results = results
        self._path = path

    def add(self, run: Mapping[str, Any]) -> None:
        """Keep what was measured."""
        self.results["runs"].append(run)
        self.save()

    def fail(self, about: Mapping[str, Any], error: str) -> None:
        """Keep why something could not be measured."""
        self.results["failures"].append({**about, "error": error})
        self.save()

    def save(self) -> None:
        """Save what is known by now; `add` and `fail` do. Raises ConfigError if that can't be written."""
        if self._path is not None:
            with saving("--out", self._path):
                save(self.results, self._path)


def caption(results: Results) -> str:
    """Say what was measured, when, where, with which code and how often, as far as it was saved."""
    versions = ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items())
    parts = [
        results.get("model"),
        results.get("machine", "machine not saved"),
        _span(results),
        f"commit {results['commit']}" if "commit" in results else "commit not saved",
        versions or None,
        _rounds_in_words(results["runs"]),
    ]
    return "; ".join(part for part in parts if part)


def failures(results: Results) -> list[str]:
    """A sentence for each thing that failed."""
    failed: dict[str, list[int]] = {}
    for failure in results["failures"]:
        about = ", ".join(str(failure[key]) for key in ("name", "precision", "executor") if key in failure)
        failed.setdefault(about, []).append(failure.get("round", 1))
    return [f"{about} failed in round {', '.join(map(str, numbers))}." for about, numbers in failed.items()]


def num_rounds(runs: Sequence[Mapping[str, Any]]) -> int:
    """How many rounds there are."""
    return len({run.get("round", 1) for run in runs})


def spread(values: Sequence[float], form: str = "{:.0f}", rounds: int | None = None) -> str:
    """The median, with the lowest and the highest of several, and how many there are if not one of each round."""
    if not values:
        return "-"
    text = form.format(statistics.median(values))
    low, high = form.format(min(values)), form.format(max(values))
    notes = [f"{low}-{high}"] if low != high else []
    if rounds is not None and len(values) < rounds:
        notes.append(f"{len(values)} of {rounds} rounds")
    return f"{text} ({', '.join(notes)})" if notes else text


def table(runs: Sequence[Mapping[str, Any]], names: Sequence[Column], figures: Sequence[Column]) -> str:
    """A row for all runs that have the same `names`, in the order in which they came; figures as `spread` shows them.

    A figure that no run has, has no column.
    """
    figures = [each for each in figures if any(_at(run, each.key) is not None for run in runs)]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(tuple(_name(_at(run, each.key), each.form) for each in names), []).append(run)
    rounds = num_rounds(runs)
    cells = [[each.title for each in (*names, *figures)]]
    for group, members in groups.items():
        columns = [[value for run in members if (value := _at(run, each.key)) is not None] for each in figures]
        shown = (spread(values, each.form, rounds) for values, each in zip(columns, figures, strict=True))
        cells.append([*group, *shown])
    return layout(cells)


def layout(cells: list[list[str]]) -> str:
    """Markdown of a table whose first line is the header, padded so that it can be read as it is."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    lines = ["| " + " | ".join(line) + " |" for line in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _at(run: Mapping[str, Any], key: str) -> Any:
    value: Any = run
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _name(value: Any, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else form.format(value)


def _rounds_in_words(runs: Sequence[Mapping[str, Any]]) -> str:
    rounds = num_rounds(runs)
    return f"medians of {rounds} rounds, the lowest and highest behind them" if rounds > 1 else "one round"


def machine_in_words() -> str:
    """Say what this machine is."""
    return f"{os.cpu_count()} cores of {_processor()}, {_memory_gb():.0f} GB"


def _span(results: Results) -> str:
    started, ended = results.get("started", "date not saved"), results.get("ended", "")
    same_day = ended.startswith(started[:10])
    return f"{started} to {ended[11:] if same_day else ended}" if ended else started


def _last_part(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if value.startswith(("/", "~", ".")) else argument


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (Path, str)):
        return _last_part(str(value))
    return value


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit of this checkout, marked where files differ from it; of an installed package its version."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        said = ""
    return said or importlib.metadata.version("chairlift")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gb() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2**30

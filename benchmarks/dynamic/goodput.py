"""Batching servers side by side under more load than they can take: python benchmarks/dynamic/goodput.py SERVERS
--settings-of SWEEP --out FILE

Every server runs a model that takes alpha + beta * b ms for at most 32 items, in turn and alone, with open-loop Poisson
arrivals (open_loop.py, or another --client with the same arguments and output). A search finds the highest rate at
which 99% are inside the SLO, without any limits, with a fresh server after each rate that failed; then comes 130% of
capacity, with the defaults and with whatever the server has of its own against overload, of which the best counts. A
server whose interpreter (--peers-python, --triton-python) is not given is left out.

`--sweep` only searches, coarsely, with each of a server's batching windows; `--settings-of` that file takes the window
that held the highest rate. So a window is chosen at rates that its server can hold.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

from peer_versions import package_versions
from server_process import free_port, running

from chairlift.bench.raw_results import Column, Recording, Results, caption, failures, start, table

HERE = Path(__file__).parent
MOST = 32
SHARE = 99.0
# Of the capacity: how near the search comes to the highest rate, and that of a sweep.
PRECISION, SWEEP_PRECISION = 0.02, 0.05
EXECUTORS = {"fast": (8.0, 0.25, 50.0), "slow": (1.0, 4.0, 60.0)}
Figures = dict[str, float]
_NUMBERS = re.compile(
    r"sent (?P<sent>\d+) .*failed (?P<refused>\d+) in SLO (?P<inside>[\d.]+)% "
    r"p50 (?P<p50>[\d.]+|-) p99 (?P<p99>[\d.]+|-) ms goodput (?P<goodput>\d+)/s"
)


@dataclass
class Limits:
    """A server's own means against overload; 0 is its default."""

    limit_ms: float = 0.0
    max_waiting: int = 0


@dataclass
class Peer:
    """How a server is started and asked. `limits` follow from the SLO."""

    name: str
    module: str
    path: str
    ready: str
    body: str = '{"x": [1, 2, 3, 4]}'
    waits: Sequence[float] = (0.0, 2.0, 5.0, 10.0)
    limits: Callable[[float], Sequence[Limits]] = field(default=lambda slo: ())


_TENSOR = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
PEERS = {
    "chairlift": Peer(
        "Chairlift",
        "",
        "/v1/models/sleeper:predict",
        "/health/ready",
        '{"instances": [[1, 2, 3, 4]]}',
        waits=(0.0,),
        limits=lambda slo: (Limits(limit_ms=slo),),
    ),
    "mosec": Peer(
        "mosec",
        "mosec_server.py",
        "/inference",
        "/",
        waits=(1.0, 2.0, 5.0, 10.0),
        limits=lambda slo: (Limits(limit_ms=slo), Limits(max_waiting=2 * MOST), Limits(slo, 2 * MOST)),
    ),
    "litserve": Peer(
        "LitServe",
        "litserve_server.py",
        "/predict",
        "/health",
        waits=(1.0, 2.0, 5.0, 10.0),
        limits=lambda slo: (Limits(limit_ms=slo),),
    ),
    "bentoml": Peer(
        "BentoML",
        "bentoml_server:Sleep",
        "/predict",
        "/readyz",
        '{"x": [[1, 2, 3, 4]]}',
        # Its bound on latency, for it has no window.
        waits=(25.0, 50.0, 100.0, 1000.0),
    ),
    "ray": Peer(
        "Ray Serve",
        "ray_server.py",
        "/",
        "/",
        limits=lambda slo: (Limits(max_waiting=MOST), Limits(max_waiting=2 * MOST)),
    ),
    "triton": Peer(
        "Triton",
        "triton_server.py",
        "/v2/models/sleep/infer",
        "/v2/models/sleep/ready",
        _TENSOR,
        limits=lambda slo: (Limits(limit_ms=slo / 2), Limits(limit_ms=slo / 2, max_waiting=2 * MOST)),
    ),
}


class Trial:
    """One server with one executor, its settings to be found."""

    def __init__(self, peer: Peer, python: str, executor: tuple[float, float, float], args: argparse.Namespace) -> None:
        self.peer = peer
        self.alpha, self.beta, self.slo = executor
        self.capacity = MOST / (self.alpha + MOST * self.beta) * 1e3
        self.rows: list[dict[str, Any]] = []
        self._python = python
        self._args = args

    def sweep(self) -> Iterator[dict[str, Any]]:
        """The highest rate that each window holds."""
        for wait in self.peer.waits:
            self.rows = []
            yield self._search(wait, SWEEP_PRECISION) | {"wait_ms": wait, "rows": self.rows}

    def run(self, wait: float) -> dict[str, Any]:
        """All of it with one window; returns what there is to say."""
        found = self._search(wait, PRECISION) | {"wait_ms": wait}
        goodputs = []
        for limits in (Limits(), *self.peer.limits(self.slo)):
            with self._serving(wait, limits) as ask:
                goodputs.append((ask(1.3 * self.capacity)["goodput"], limits))
        found["overload"] = goodputs[0][0]
        best, limits = max(goodputs, key=lambda each: each[0])
        return found | {"best_overload": best, "best_limits": vars(limits), "rows": self.rows}

    def _search(self, wait: float, precision: float) -> dict[str, Any]:
        """The highest rate that the server holds with this window, and its P99 there; None if it holds none."""
        found: dict[str, Any] = {"holds": None, "p99": None, "search_limits": vars(Limits())}
        low, high = 0.0, 1.1 * self.capacity
        while high - low > precision * self.capacity:
            # One that was given too much may have a queue yet when the lower rates come.
            with self._serving(wait, Limits()) as ask:
                failed = False
                while not failed and high - low > precision * self.capacity:
                    rate = (low + high) / 2
                    figures = ask(rate)
                    failed = figures["inside"] < SHARE
                    if failed:
                        high = rate
                    else:
                        low = rate
                        found.update(holds=rate, p99=figures["p99"])
        return found

    @contextmanager
    def _serving(self, wait: float, limits: Limits) -> Iterator[Callable[[float], Figures]]:
        """The server with these settings, warm; gives what puts a rate on it and notes the figures."""
        port = free_port()

        def ask(rate: float) -> Figures:
            figures = self._load(port, rate, self._args.seconds)
            row = {"wait_ms": wait} | vars(limits) | {"rate": rate} | figures
            self.rows.append(row)
            print(" ".join(f"{name}={value:g}" for name, value in row.items()), file=sys.stderr, flush=True)
            return figures

        with tempfile.TemporaryDirectory() as folder:
            environment = self._environment(port, wait, limits)
            with running(self._command(port, folder, limits), port, self.peer.ready, environment, 60):
                self._load(port, self.capacity / 8, 2)
                yield ask

    def _command(self, port: int, folder: str, limits: Limits) -> list[str]:
        """How the server is started."""
        if self.peer.module == "":
            settings = Path(folder) / "chairlift.toml"
            limit = f"timeout_ms = {limits.limit_ms:g}\n" if limits.limit_ms else ""
            settings.write_text(
                f'[models.sleeper]\nmodel = "{HERE / "sleeper.py"}:Sleeper"\n{limit}'
                f"options = {{ alpha_ms = {self.alpha}, beta_ms = {self.beta} }}\n"
            )
            return [self._python, "-m", "chairlift.cli", "serve", str(settings), "--port", str(port)]
        if self.peer.module.endswith(".py"):
            return [self._python, str(HERE / "peers" / self.peer.module)]
        return [self._python, "-m", "bentoml", "serve", self.peer.module, "--port", str(port)]

    def _environment(self, port: int, wait: float, limits: Limits) -> dict[str, str]:
        """What the peers' servers read."""
        numbers = {
            "ALPHA_MS": self.alpha,
            "BETA_MS": self.beta,
            "WAIT_MS": wait,
            "LIMIT_MS": limits.limit_ms,
            "MAX_WAITING": limits.max_waiting,
            "PORT": port,
        }
        if not self.peer.module:
            return {}
        path = os.pathsep.join(map(str, (HERE / "peers", HERE, HERE.parent)))
        return {f"SLEEP_{name}": str(value) for name, value in numbers.items()} | {"PYTHONPATH": path}

    def _load(self, port: int, rate: float, seconds: float) -> Figures:
        """Put load on the server."""
        command = [self._args.client, f"http://127.0.0.1:{port}{self.peer.path}", f"{rate:.0f}", f"{seconds:g}"]
        command += [f"{self.slo:g}", "--body", self.peer.body]
        line = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
        match = _NUMBERS.search(line)
        if match is None:
            raise RuntimeError(f"the client says {line!r}")
        return {name: float("inf" if value == "-" else value) for name, value in match.groupdict().items()}


def main() -> None:
    args = _parser().parse_args()
    print(markdown(measure(args)))


def measure(args: argparse.Namespace) -> Results:
    """Serve and measure with every server, saving as they end."""
    recording = Recording(start("goodput", vars(args), peers=_versions(args)), args.out)
    swept = json.loads(args.settings_of.read_text()) if args.settings_of else None
    pythons = {"chairlift": sys.executable, "triton": args.triton_python}
    for number in range(1, args.rounds + 1):
        for name in args.servers:
            python = pythons.get(name, args.peers_python)
            for executor in args.executors:
                about = {"name": PEERS[name].name, "executor": executor, "round": number}
                print(f"{about}", file=sys.stderr)
                try:
                    if python is None:
                        raise RuntimeError("no interpreter was given for it")
                    trial = Trial(PEERS[name], python, EXECUTORS[executor], args)
                    for row in trial.sweep() if args.sweep else [trial.run(best_wait(PEERS[name], executor, swept))]:
                        recording.add(about | row)
                except (RuntimeError, OSError) as error:
                    recording.fail(about, str(error))
                    print(f"failed: {error}", file=sys.stderr)
    return recording.results


def _versions(args: argparse.Namespace) -> dict[str, str]:
    """Those of the peers that are measured."""
    packages = {
        "mosec": "mosec",
        "litserve": "litserve",
        "bentoml": "bentoml",
        "ray": "ray",
        "triton": "nvidia-pytriton",
    }
    pythons = {"triton": args.triton_python}
    return package_versions(
        {PEERS[name].name: (pythons.get(name, args.peers_python), packages[name])
         for name in args.servers if name in packages}
    )  # fmt: skip


def best_wait(peer: Peer, executor: str, swept: Results | None) -> float:
    """The window with which a server held the highest rate of a sweep. Raises RuntimeError if it was not in one."""
    if len(peer.waits) == 1:
        return peer.waits[0]
    runs = [run for run in (swept or {"runs": []})["runs"] if (run["name"], run["executor"]) == (peer.name, executor)]
    if not runs:
        raise RuntimeError("its settings were not swept: --settings-of names the results of --sweep")
    return float(max(runs, key=lambda run: run["holds"] or 0.0)["wait_ms"])


def markdown(results: Results) -> str:
    """A table for each executor."""
    settings = results["settings"]
    parts = [
        f"{caption(results)}; {settings['seconds']:g} s a rate, client ({settings['client']}) and server on the same "
        "cores:"
    ]
    for executor, (alpha, beta, slo) in EXECUTORS.items():
        capacity = MOST / (alpha + MOST * beta) * 1e3
        runs = _with_all_limits([_shown(run) for run in results["runs"] if run["executor"] == executor])
        columns = (
            Column("holds", f"99% inside {slo:g} ms up to, /s"),
            Column("p99", "p99 there, ms"),
            Column("overload", f"goodput at {1.3 * capacity:.0f}/s"),
            Column("best_overload", "with its own limits"),
        )
        names = (Column("name", f"{alpha:g} + {beta:g} b ms, capacity {capacity:.0f}/s"), Column("window", "window"),
                 Column("limits", "its own limits"))  # fmt: skip
        if runs:
            parts.append(table(runs, names, columns))
    return "\n\n".join([*parts, *failures(results)])


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    """The run with its settings in words; one that holds no rate holds 0."""
    limits = run.get("best_limits", {})
    words = [f"{limits['limit_ms']:g} ms"] if limits.get("limit_ms") else []
    words += [f"{limits['max_waiting']} waiting"] if limits.get("max_waiting") else []
    ours = run["name"] == PEERS["chairlift"].name
    window = "-" if ours else f"{run['wait_ms']:g} ms"
    if ours and "search_limits" not in run:
        # Results from before the search said its limits: Chairlift's server always had one.
        words = [f"{EXECUTORS[run['executor']][2]:g} ms, in all columns"]
    return run | {"window": window, "limits": ", ".join(words) or "-", "holds": run["holds"] or 0.0}


def _with_all_limits(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs, each with the limits that were best in any round of the same server and window: they share a row."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for run in runs:
        found.setdefault((run["name"], run["window"]), {})[run["limits"]] = None
    return [run | {"limits": " or ".join(found[run["name"], run["window"]])} for run in runs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", choices=PEERS, metavar="SERVERS", help=", ".join(PEERS))
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS))
    parser.add_argument("--seconds", type=float, default=5.0, help="for each rate")
    parser.add_argument("--peers-python", help="an interpreter with mosec, litserve, bentoml and ray[serve]")
    parser.add_argument("--triton-python", help="one with nvidia-pytriton")
    parser.add_argument("--client", default=str(HERE / "open_loop.py"))
    parser.add_argument("--sweep", action="store_true", help="search with each batching window")
    parser.add_argument("--settings-of", type=Path, metavar="FILE", help="a saved sweep to take the windows from")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()

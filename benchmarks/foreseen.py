"""Whether first tokens come within the band that was told on arrival.

    python benchmarks/foreseen.py MODEL_DIR [--trace FILE] --rates 2 3 4 [--rounds 3] [--out FILE] [-- SETTINGS]

A server of its own (SETTINGS are flags of `chairlift serve`) meets a trace, sped up or slowed down to each of the
`--rates`, and each round takes another part of it. Meanwhile `/v1/requests` is asked every 30 ms what it foresees of
those who wait. The first that it says of a request counts, as soon as it has a band; when the first token came,
`/v1/requests/{id}` says afterwards. The server has learned nothing before it starts.
"""

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from engines import SERVED_NAME
from fidelity import NO_TARGET, add_trace_options, wanted
from server_process import free_port, running

from chairlift.bench.completion_stream import Target
from chairlift.bench.latency import figures
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.bench.replay import PromptMaker, replay
from chairlift.plan.trace import TraceRequest, duration, scaled

NAMES = (Column("trace", "trace", "{}"), Column("rate", "requests/s", "{:g}"))
COLUMNS = (
    Column("requests", "requests"),
    Column("waited", "had a band"),
    Column("within", "first token within it", "{:.0%}"),
    Column("early", "sooner", "{:.0%}"),
    Column("late", "later", "{:.0%}"),
    Column("width_s", "band, median s", "{:.2f}"),
    Column("wait_s", "wait, median s", "{:.2f}"),
    Column("ttft_p95_s", "TTFT p95 s", "{:.2f}"),
)
EVERY_S = 0.03


class Told(NamedTuple):
    """What was told of a request first, and when: seconds since 1970, the others from then on."""

    at: float
    expected: float
    early: float
    late: float


class Listener:
    """Asks a server what it foresees, until it is closed."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/requests"
        self.told: dict[str, Told] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=10) as answer:
            return json.load(answer)

    def _listen(self) -> None:
        while not self._closed.wait(EVERY_S):
            with suppress(OSError):
                asked = time.time()
                page = self._get("?limit=100")
                at = (asked + time.time()) / 2
                for each in page["data"]:
                    first = (each["predicted"] or {}).get("first_token")
                    if first and first["late_s"] is not None and each["state"] == "waiting":
                        told = Told(at, first["in_s"], first["early_s"], first["late_s"])
                        self.told.setdefault(each["id"], told)

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._thread.join()

    def first_token(self, request_id: str) -> float | None:
        """When it had its first token, in seconds since 1970."""
        (part,) = self._get(f"/{request_id}")["parts"]
        phases = part["phases"]
        if phases.get("prefill_s") is None:
            return None
        return float(part["created"] + phases["queued_s"] + phases["prefill_s"])


def run(args: argparse.Namespace, flags: list[str]) -> Results:
    """A server for each round and rate; each is saved as it comes."""
    recording = Recording(start("foreseen", {**vars(args), "server": flags}, args.model), args.out)
    checkout = {"PYTHONPATH": str(Path(__file__).parents[1])}
    trace = wanted(args, args.max_model_len)
    for number in range(args.rounds):
        for rate in args.rates:
            port = free_port()
            command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
            with running([*command, "--port", str(port), "--data-dir", "", *flags], port, "/health/ready", checkout):
                row = one_run(args, port, part_of(trace, rate, args.seconds, number))
            about = {"round": number + 1, "trace": args.trace.stem if args.trace else "bursty", "rate": rate}
            recording.add(about | row)
    return recording.results


def one_run(args: argparse.Namespace, port: int, sent: list[TraceRequest]) -> dict[str, Any]:
    """What became of what was foreseen."""
    target = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))
    listener = Listener(port)
    try:
        load = replay(target, sent, "completions", PromptMaker(args.vocab, args.seed), args.drain)
    finally:
        listener.close()
    seen = [(told, first - told.at) for each, told in listener.told.items() if (first := listener.first_token(each))]
    within = [told.early <= came <= told.late for told, came in seen]
    return {
        "requests": len(load.outcomes),
        "waited": len(seen),
        "within": statistics.fmean(within) if seen else None,
        "early": statistics.fmean(came < told.early for told, came in seen) if seen else None,
        "late": statistics.fmean(came > told.late for told, came in seen) if seen else None,
        "width_s": statistics.median(told.late - told.early for told, _ in seen) if seen else None,
        "wait_s": statistics.median(came for _, came in seen) if seen else None,
        "ttft_p95_s": figures(load, NO_TARGET)["ttft_ms"]["p95"] / 1000,
        "pairs": [[round(each, 4) for each in (*told[1:], came)] for told, came in seen],
    }


def part_of(trace: list[TraceRequest], rate: float, seconds: float, number: int) -> list[TraceRequest]:
    """A part of a trace, so many requests as come in so many seconds at that rate, from its beginning on."""
    count = round(rate * seconds)
    first = number * count % max(len(trace) - count, 1)
    part = trace[first : first + count]
    began = part[0].arrival
    shifted = [msgspec.structs.replace(each, arrival=each.arrival - began) for each in part]
    return scaled(shifted, duration(shifted) / (count / rate))


def markdown(results: Results) -> str:
    """A row for each rate."""
    return f"{caption(results)}:\n\n{table(results['runs'], NAMES, COLUMNS)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser)
    parser.add_argument("--rates", type=float, nargs="+", required=True, help="requests a second")
    parser.add_argument("--seconds", type=float, default=100.0, help="how long requests come at each rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    print(markdown(run(_parser().parse_args(given[:cut]), given[cut + 1 :])))


if __name__ == "__main__":
    main()

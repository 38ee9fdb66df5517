"""What the live page costs a server: python benchmarks/page_cost.py MODEL_DIR [--rounds 10] [--out FILE] [-- SETTINGS]

64 streams over HTTP, without an end. In each round the processor time of the server's front is taken for some seconds
while nobody watches, and for as many while somebody reads `/v1/live`, as the page does; which of the two is first
changes from round to round. What a token costs differs from run to run, so the page's cost is what is more than the
same tokens cost while nobody watched, in the same round.
"""

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from engines import SERVED_NAME
from server_process import free_port, front_pid, running

from chairlift.bench.completion_stream import Target
from chairlift.bench.load import closed_loop
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.planning.measured_server import cpu_seconds

STREAMS = 64
COLUMNS = (
    Column("tok_s", "tok/s"),
    Column("alone_percent", "front, nobody watching", "{:.1f}%"),
    Column("watched_percent", "front, page open", "{:.1f}%"),
    Column("page_percent", "the page, of a core", "{:.2f}%"),
)
NAMES = (Column("streams", "streams", "{}"),)


class Watcher:
    """Reads the live feed as the page does, as long as the block lasts."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/live"
        self._left = threading.Event()
        self.events = 0

    def __enter__(self) -> "Watcher":
        self._answer = urllib.request.urlopen(self._url, timeout=30)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def _read(self) -> None:
        while not self._left.is_set() and (line := self._answer.readline()):
            self.events += line.startswith(b"data:")

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        self._answer.close()


def tokens_made(port: int) -> float:
    """The tokens that the server has generated so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("chairlift_generation_tokens_total"):
                return float(line.split()[-1])
    raise SystemExit("the server does not count its tokens")


def spent(port: int, pid: int, seconds: float) -> tuple[float, float, float]:
    """Processor seconds of the front, tokens, and seconds, of a while."""
    tokens, cpu, began = tokens_made(port), cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    cpu = cpu_seconds(pid) - cpu
    took = time.monotonic() - began
    return cpu, tokens_made(port) - tokens, took


def one_round(port: int, pid: int, seconds: float, watched_first: bool) -> dict[str, Any]:
    """A while with the page and one without."""
    found = {}
    for watched in (True, False) if watched_first else (False, True):
        if watched:
            with Watcher(port) as watcher:
                time.sleep(1)
                found[True] = spent(port, pid, seconds)
                events = watcher.events
        else:
            found[False] = spent(port, pid, seconds)
    (cpu, tokens, took), (alone, alone_tokens, alone_took) = found[True], found[False]
    return {
        "streams": STREAMS,
        "tok_s": tokens / took,
        "alone_percent": 100 * alone / alone_took,
        "watched_percent": 100 * cpu / took,
        "page_percent": 100 * (cpu - alone * tokens / alone_tokens) / took,
        "events_s": events / (took + 1),
    }


def run(args: argparse.Namespace, flags: list[str]) -> Results:
    """One server for all rounds."""
    recording = Recording(start("page_cost", {**vars(args), "server": flags}, args.model), args.out)
    checkout = {"PYTHONPATH": str(Path(__file__).parents[1])}
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
    with running([*command, "--port", str(port), "--data-dir", "", *flags], port, "/health/ready", checkout):
        pid = front_pid(port)
        target = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME, json.loads(args.extra))
        # More than can be answered meanwhile; what is left ends with the server.
        requests = [target.request([number % 1000 + 10] * 32, args.output) for number in range(100_000)]
        threading.Thread(target=closed_loop, args=(target, requests, STREAMS, "streams"), daemon=True).start()
        time.sleep(args.warm_up)
        for number in range(args.rounds):
            row = one_round(port, pid, args.seconds, bool(number % 2))
            recording.add({"round": number + 1} | row)
    return recording.results


def markdown(results: Results) -> str:
    """One row: all rounds have the same load."""
    costs = [run["page_percent"] for run in results["runs"]]
    mean = f"on average {statistics.fmean(costs):.2f}% of a core"
    return f"{caption(results)}; {mean}:\n\n{table(results['runs'], NAMES, COLUMNS)}"


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each while")
    parser.add_argument("--output", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--warm-up", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--extra", default='{"logit_bias": {"1000": 100}}', metavar="JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    print(markdown(run(parser.parse_args(given[:cut]), given[cut + 1 :])))


if __name__ == "__main__":
    main()

"""Three models on one machine: python benchmarks/sharing.py --llm FOLDER --embedder FOLDER [--weights 2 1 1]

Starts one server with a language model, an encoder and a Python function that computes, and keeps each of them
backlogged: first each alone, then all three. Prints what each did in the second case as a share of the first, which
should be the share that its weight gives it, and at most a tenth less. Alone it should do what it does in a server of
its own (`--own` measures that too).
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop
import workloads
from keepalive import Connection, post
from server_process import free_port, running
from tqdm import tqdm

from chairlift.bench.completion_stream import Target, stream
from chairlift.bench.raw_results import Recording, Results, caption, layout, spread, start

NAMES = ("llm", "embedder", "function")
HOST = "127.0.0.1"
WARM_UP_SECONDS = 2.0
FUNCTION = '''
import numpy as np

class Squares:
    """Some milliseconds of arithmetic for each item."""

    max_batch_size = 16

    def load(self):
        self.matrix = np.random.default_rng(0).standard_normal((600, 600)).astype(np.float32)

    def predict(self, items):
        return [float((self.matrix @ self.matrix * item).sum()) for item in items]
'''
EMBED = {"model": "embedder", "encoding_format": "base64"}
OWN, ALONE, TOGETHER = "own server", "alone", "together"
Rates = dict[str, float]
Got = TypeVar("Got")


def main() -> None:
    args = _parser().parse_args()
    weights = dict(zip(NAMES, args.weights, strict=True))
    recording = Recording(start("sharing", vars(args), str(args.llm)), args.out)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.repeat + 1):
            for name in NAMES if args.own else ():
                own = serve(args, Path(folder), {name: 1.0}, lambda port: measure(args, port, [name]))  # noqa: B023
                recording.add({"round": number, "phase": OWN, "rates": own})
            for phase, rates in serve(args, Path(folder), weights, lambda port: alone_and_together(args, port)).items():
                recording.add({"round": number, "phase": phase, "rates": rates})
    print(markdown(recording.results))


def alone_and_together(args: argparse.Namespace, port: int) -> dict[str, Rates]:
    """Measure each model alone, and then all of them together."""
    alone = {name: measure(args, port, [name])[name] for name in NAMES}
    return {ALONE: alone, TOGETHER: measure(args, port, NAMES)}


def serve(args: argparse.Namespace, folder: Path, weights: dict[str, float], work: Callable[[int], Got]) -> Got:
    """Run a server with these models while `work`, given its port, measures."""
    (folder / "squares.py").write_text(FUNCTION)
    where = {"llm": args.llm.resolve(), "embedder": args.embedder.resolve(), "function": folder / "squares.py:Squares"}
    more = {"llm": "enable_prefix_caching = false", "embedder": "max_batch_tokens = 2048", "function": ""}
    tables = [f'[models.{name}]\nmodel = "{where[name]}"\nweight = {weights[name]}\n{more[name]}\n' for name in weights]
    (folder / "all.toml").write_text("\n".join(tables))
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", str(folder / "all.toml"), "--port", str(port)]
    with running(command, port, "/health/ready", {}):
        return work(port)


def measure(args: argparse.Namespace, port: int, names: Sequence[str]) -> Rates:
    """Units of work a second of each model (tokens, texts' tokens, items) while all the named are backlogged."""
    clients = {"llm": generate, "embedder": embed, "function": square}

    async def drive() -> Rates:
        done = dict.fromkeys(names, 0)

        async def client(name: str, number: int) -> None:
            async for units in clients[name](port, number):
                done[name] += units

        tasks = [asyncio.create_task(client(name, number)) for name in names for number in range(args.clients)]
        await asyncio.sleep(WARM_UP_SECONDS)
        before, began = dict(done), time.perf_counter()
        for _ in tqdm(range(int(args.seconds)), desc=" + ".join(names), leave=False, unit="s"):
            await asyncio.sleep(1)
            if failed := [task for task in tasks if task.done()]:
                await failed[0]
        seconds = time.perf_counter() - began
        rates = {name: (done[name] - before[name]) / seconds for name in names}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return rates

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(drive())


async def generate(port: int, number: int) -> AsyncIterator[int]:
    """Tokens of one short completion after the other."""
    target, rng = Target.of(f"http://{HOST}:{port}", "llm"), random.Random(number)
    while True:
        outcome = await stream(target, target.request(workloads.random_ids(rng, 32, 1000), 16), time.perf_counter())
        if outcome.error:
            raise RuntimeError(outcome.error)
        yield outcome.tokens


async def embed(port: int, number: int) -> AsyncIterator[int]:
    """Tokens of one text after the other."""
    rng = random.Random(number)
    ids = workloads.random_ids(rng, 64, 1000)
    async for _ in repeat(post(HOST, port, "/v1/embeddings", EMBED | {"input": ids})):
        yield len(ids)


async def square(port: int, number: int) -> AsyncIterator[int]:
    """One item after the other."""
    async for _ in repeat(post(HOST, port, "/v1/models/function:predict", {"instances": [number]})):
        yield 1


async def repeat(request: bytes) -> AsyncIterator[None]:
    """Send the same request over and over. Raises RuntimeError if it is not answered well."""
    connection = Connection(HOST, int(request.partition(b"Host: ")[2].split(b"\r", 1)[0].rpartition(b":")[2]))
    try:
        while True:
            status, body = await connection.send(request)
            if status != 200:
                raise RuntimeError(f"HTTP {status}: {body[:200].decode(errors='replace')}")
            yield
    finally:
        connection.close()


def markdown(results: Results) -> str:
    """One row a model: its due, and what it got of what it does alone, round by round."""
    weights = dict(zip(NAMES, results["settings"]["weights"], strict=True))
    by_phase: dict[str, list[Rates]] = {}
    for run in results["runs"]:
        by_phase.setdefault(run["phase"], []).append(run["rates"])
    pairs = list(zip(by_phase[ALONE], by_phase[TOGETHER], strict=True))
    rows = [["model", "weight", "own server/s", "alone/s", "together/s", "due", "got", "got / due"]]
    for name, weight in weights.items():
        due = weight / sum(weights.values())
        got = [together[name] / alone[name] for alone, together in pairs]
        rates = [[each[name] for each in by_phase.get(phase, []) if name in each] for phase in (OWN, ALONE, TOGETHER)]
        shares = [f"{due:.0%}", spread(got, "{:.0%}"), spread([each / due for each in got], "{:.2f}")]
        rows.append([name, f"{weight:g}", *map(spread, rates), *shares])
    return f"{caption(results)}; {results['settings']['seconds']:g} s each:\n\n{layout(rows)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--embedder", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--weights", type=float, nargs=3, default=[1, 1, 1], metavar="X", help="in this order: " + ", ".join(NAMES)
    )
    parser.add_argument("--clients", type=int, default=48, help="of each model")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, each with a server of its own")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("--own", action="store_true", help="measure each in a server of its own, too")
    return parser


if __name__ == "__main__":
    main()

"""Background requests beside live traffic: python benchmarks/background.py MODEL [--load 0.5] [-- SETTINGS OF THE
SERVER]

One process starts the model as `chairlift serve` does, and calls the application without sockets: there is no other way
to send background requests. First come plain requests, `--in-flight` at a time, with nothing else: the machine's own
best. Then live requests come by themselves (Poisson) at `--load` of that, alone, and then again, at the same moments
and of the same lengths, beside background requests, `--in-flight` at all times. All have prompts of 16 to 384 tokens
and exponential outputs (mean 64), as in benchmarks/serving.py. Tokens are prompt tokens read and tokens generated.

Times are those that the server's metrics count, from when a request has been read until a token is there: random
prompts make text that begins in the middle of a character, of which a client would see nothing for a while.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import workloads
from starlette.types import ASGIApp, Message
from tqdm import tqdm

from chairlift.bench.raw_results import Column, Recording, Results, caption, spread, start, table
from chairlift.config.flags import add_flags
from chairlift.config.settings import load
from chairlift.engine.sequences.messages import EngineStats
from chairlift.server.app import create_app
from chairlift.server.http.exchange import BACKGROUND
from chairlift.server.metrics.families import LONG, Histogram
from chairlift.server.models.host import host
from chairlift.server.models.registry import Models
from chairlift.server.models.sequence_host import SequenceHost
from chairlift.server.models.sequence_service import SequenceService


@dataclass
class Phase:
    """What was seen while something ran; seconds, and tokens of all requests as the server counts them."""

    seconds: float = 0.0
    tokens: int = 0
    live_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    preemptions: int = 0


class Kept(Histogram):
    """A histogram that hands on each value."""

    def __init__(self, keep: Callable[[float], None]) -> None:
        super().__init__(LONG)
        self._keep = keep

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, and hand it on as often as it counts."""
        super().observe(value, times)
        for _ in range(times):
            self._keep(value)


class Server:
    """One language model behind the application, in this process."""

    def __init__(self, app: ASGIApp, service: SequenceService) -> None:
        self.app = app
        self.service = service
        self.phase = Phase()
        self._counted = service.client.on_step
        service.client.on_step = self._on_step
        service.metrics.time_to_first_token = Kept(lambda seconds: self.phase.ttft.append(seconds))
        service.metrics.inter_token = Kept(lambda seconds: self.phase.itl.append(seconds))

    def _on_step(self, stats: EngineStats) -> None:
        assert self._counted is not None
        self._counted(stats)
        if stats.step_requests:
            self.phase.steps.append(stats.step_seconds)

    @property
    def tokens(self) -> int:
        """Prompt tokens read and tokens generated since the start."""
        metrics = self.service.metrics
        return metrics.prompt_tokens + metrics.generation_tokens

    async def complete(self, prompt: list[int], length: int, stream: bool, background: bool) -> None:
        """Send one greedy completion of so many tokens, and wait for its end."""
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": stream}
        raw = json.dumps(body).encode()
        sent: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]
        status = 0

        async def receive() -> Message:
            if sent:
                return sent.pop()
            return await asyncio.get_running_loop().create_future()  # the client never hangs up

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
            BACKGROUND: background,
        }
        await self.app(scope, receive, send)
        if status != 200:
            raise SystemExit(f"a request was answered with status {status}")

    async def follow(self, prompt: list[int], length: int, due: float, phase: Phase) -> None:
        """Send a live request, and note by how much it was late."""
        phase.late.append(time.perf_counter() - due)
        phase.live_tokens += len(prompt) + length
        await self.complete(prompt, length, stream=True, background=False)

    async def keep(self, requests: Iterator[tuple[list[int], int]], in_flight: int, background: bool) -> None:
        """Keep so many requests in flight until cancelled."""

        async def sender() -> None:
            for prompt, length in requests:
                await self.complete(prompt, length, stream=False, background=background)

        async with asyncio.TaskGroup() as senders:
            for _ in range(in_flight):
                senders.create_task(sender())

    async def measure(self, seconds: float, arrivals: list[workloads.TimedRequest], title: str) -> Phase:
        """Count what happens in so many seconds, in which live requests come at their moments."""
        phase = self.phase = Phase()
        before, preempted, began = self.tokens, self.service.client.stats.preemptions, time.perf_counter()
        tasks = []
        with tqdm(total=round(seconds), desc=title, unit="s", leave=False, dynamic_ncols=True) as bar:
            for offset, prompt, length in [*arrivals, workloads.TimedRequest(seconds, [], 0)]:
                await asyncio.sleep(began + offset - time.perf_counter())
                bar.update(int(offset) - bar.n)
                if prompt:
                    tasks.append(asyncio.create_task(self.follow(prompt, length, began + offset, phase)))
        phase.seconds = time.perf_counter() - began
        phase.tokens = self.tokens - before
        phase.preemptions = self.service.client.stats.preemptions - preempted
        await asyncio.gather(*tasks)
        return phase


def endless(seed: str, vocab: int) -> Iterator[tuple[list[int], int]]:
    """Requests like the live ones, none of them twice."""
    rng = random.Random(seed)
    while True:
        length = max(1, min(256, round(rng.expovariate(1 / 64) + 0.5)))
        yield workloads.random_ids(rng, rng.randint(16, 384), vocab), length


async def run(args: argparse.Namespace, settings: list[str]) -> None:
    served, config = settings_of(args.model, settings)
    model = host(served, config, None)
    if not isinstance(model, SequenceHost):
        raise SystemExit(f"{args.model} is not a language model")
    await model.start()
    try:
        service = model.prepare()
        server = Server(create_app(Models([service]), config), service)
        await model.wait_ready()
        recording = Recording(start("background", vars(args) | {"server": settings}, args.model), args.out)
        for number, seed in enumerate(args.seed, 1):
            for row in rows_of(await phases(server, args, seed)):
                recording.add({"round": number, "seed": seed} | row)
        print(markdown(recording.results))
    finally:
        await model.stop()


async def phases(server: Server, args: argparse.Namespace, seed: int) -> list[Phase]:
    """The machine's best, live alone, live and background."""
    best = await beside(server, args, "best", args.best_seconds, [], background=False)
    rate = args.rate or args.load * best.tokens / best.seconds / MEAN_TOKENS
    print(f"best {best.tokens / best.seconds:.0f} tokens/s; live {rate:.2f} requests/s", file=sys.stderr)
    alone = workloads.arrivals(rate, args.seconds, args.vocab, seed)
    # The same lengths at the same moments, but prompts that no cache knows.
    rng = random.Random(seed + 1)
    again = [each._replace(prompt=workloads.random_ids(rng, len(each.prompt), args.vocab)) for each in alone]
    first = await server.measure(args.seconds, alone, "live alone")
    return [best, first, await beside(server, args, "live and background", args.seconds, again, background=True)]


BEST, ALONE, BESIDE = "plain requests alone", "live alone", "live and background"
# Of a request: (16 + 384) / 2 of prompt and some 63 generated.
MEAN_TOKENS = 263.0


async def beside(
    server: Server,
    args: argparse.Namespace,
    title: str,
    seconds: float,
    arrivals: list[workloads.TimedRequest],
    background: bool,
) -> Phase:
    """Measure beside requests of the other kind, once those are under way."""
    keeping = asyncio.create_task(server.keep(endless(title, args.vocab), args.in_flight, background))
    await asyncio.sleep(args.settle)
    phase = await server.measure(seconds, arrivals, title)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await asyncio.sleep(0.5)
    return phase


def settings_of(model: str, settings: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    loaded = load(vars(parser.parse_args([model, *settings])), {}, Path.cwd(), model)
    return loaded.models[0], loaded.server


def percentiles(seconds: list[float], unit: float = 1000) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(seconds, q)) * unit, 1) for q in (50, 95, 99)}


def rows_of(found: list[Phase]) -> Iterator[dict[str, Any]]:
    """What there is to say of each phase of a round."""
    best = found[0].tokens / found[0].seconds
    for name, phase in zip((BEST, ALONE, BESIDE), found, strict=True):
        rate = phase.tokens / phase.seconds
        row: dict[str, Any] = {"phase": name, "tokens_s": round(rate, 1), "of_best": round(rate / best, 3)}
        row["step_ms"] = percentiles(phase.steps)
        row["preemptions"] = phase.preemptions
        if phase.late:
            row |= {"live_requests": len(phase.ttft), "live_tokens_s": round(phase.live_tokens / phase.seconds, 1)}
            row |= {"ttft_ms": percentiles(phase.ttft), "itl_ms": percentiles(phase.itl)}
            row["late_ms"] = percentiles(phase.late)
        yield row


def markdown(results: Results) -> str:
    """A row for each phase, and how much later live requests got their first token beside background ones."""
    columns = (
        Column("tokens_s", "tokens/s"),
        Column("of_best", "of the best", "{:.1%}"),
        Column("live_requests", "live requests"),
        Column("ttft_ms.p50", "live TTFT p50 ms"),
        Column("ttft_ms.p95", "p95"),
        Column("ttft_ms.p99", "p99"),
        Column("itl_ms.p50", "live ITL p50 ms"),
        Column("itl_ms.p99", "p99"),
    )
    runs = results["runs"]
    alone, beside = ([run for run in runs if run["phase"] == phase] for phase in (ALONE, BESIDE))
    changes = [
        f"{q} {spread([b['ttft_ms'][q] / a['ttft_ms'][q] - 1 for a, b in zip(alone, beside, strict=True)], '{:+.1%}')}"
        for q in ("p50", "p95", "p99")
    ]
    return (
        f"{caption(results)}; server: {' '.join(results['settings']['server']) or 'its defaults'}:\n\n"
        f"{table(runs, [Column('phase', 'phase')], columns)}\n\n"
        f"TTFT of live requests beside background ones, round by round: {', '.join(changes)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder of a language model")
    parser.add_argument("--load", type=float, default=0.5, help="share of the best throughput that is live")
    parser.add_argument("--rate", type=float, help="live requests a second, instead of --load")
    parser.add_argument("--in-flight", type=int, default=128, help="background requests, and plain ones for the best")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase with live requests")
    parser.add_argument("--best-seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=4.0, help="seconds until others are under way")
    parser.add_argument("--vocab", type=int, default=30000, help="prompts use the token ids below")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of arrivals and lengths; a round for each")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, settings = parser.parse_args(given[:cut]), given[cut + 1 :]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(args, settings))


if __name__ == "__main__":
    main()

"""Long prompts amid decodes: what they do to the time between tokens of everyone else, with and without a target.

    python benchmarks/interference.py MODEL [--target-itl-ms 40 60 100] [-- SETTINGS OF chairlift serve]
    python benchmarks/interference.py --url http://127.0.0.1:8000 [--target-itl-ms 40]

16 streams decode; in every other window a prompt of 1,500 fresh random tokens arrives every 2 seconds. The windows
alternate, so that both kinds see contexts of the same length and the same machine. With MODEL a server is started for
each target, and one without any; with --url the target only labels a running server's figures. A gap is the time
between two events of a stream that hold one token each; the table shows percentiles over all gaps of a kind, and
under "p99 by window" the median of the windows' own 99th percentiles, which a neighbour's burst disturbs less.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from chairlift.bench.raw_results import Recording, Results, caption, layout, spread, start

COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
VOCAB = (1000, 30000)
# Seconds in which a timer of 20 ms did not fire.
PAUSE = 0.15
Span = tuple[float, float]


class Client:
    """Requests to one server, over plain sockets, so that 16 streams cost little beside it."""

    def __init__(self, url: str, seed: int, token: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.rng = random.Random(seed)
        self.token = token

    async def get(self, path: str) -> bytes | None:
        """The answer's body, or None unless the status is 200."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return None
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return body if b" 200 " in head.partition(b"\r\n")[0] else None

    async def complete(self, prompt: int, max_tokens: int) -> AsyncIterator[tuple[float, int]]:
        """When each event of a stream came, and how many tokens there were then; the prompt is random."""
        body = {
            "prompt": [self.rng.randrange(*VOCAB) for _ in range(prompt)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            # One token that is text by itself: part of a character would give no event until the rest has come.
            "logit_bias": {str(self.token): 100},
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"{status.decode().strip()}: {(await reader.read(2000)).decode()}")
            while line := await reader.readline():
                if found := COMPLETION_TOKENS.search(line):
                    yield time.monotonic(), int(found[1])
                elif line.startswith(b"data: [DONE]"):
                    return
        finally:
            writer.close()


class Run:
    """One server under load; `gaps[kind][window]` holds when each began and ended, kind 1 with long prompts."""

    def __init__(self, client: Client, args: argparse.Namespace) -> None:
        self.client, self.args = client, args
        self.gaps: tuple[list[list[Span]], list[list[Span]]] = ([], [])
        self.pauses: list[Span] = []
        self.ttft: list[float] = []
        self.current: list[Span] | None = None
        self.unresolved = 0

    async def stream(self, ready: asyncio.Event) -> None:
        """Decode for ever; a sequence that has reached its length is followed by another."""
        while True:
            before, count = 0.0, 0
            async for now, tokens in self.client.complete(64, self.args.max_tokens):
                ready.set()
                # Text may wait for the rest of a character, and then several tokens come in one event.
                if before and tokens == count + 1 and self.current is not None:
                    self.current.append((before, now))
                self.unresolved += tokens > count + 1
                before, count = now, tokens

    async def watch(self) -> None:
        """Note when this process itself was kept from running: gaps of such moments say nothing of the server."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            if now - before > PAUSE:
                self.pauses.append((before, now))
            before = now

    def seconds(self, kind: int) -> list[list[float]]:
        """The gaps of each window that no pause overlaps."""
        return [
            [end - begin for begin, end in window if not any(p < end and begin < q for p, q in self.pauses)]
            for window in self.gaps[kind]
        ]

    async def long_prompt(self) -> None:
        """Send one and note when its token comes."""
        began = time.monotonic()
        async for now, _ in self.client.complete(self.args.prompt, 1):
            self.ttft.append(now - began)
            return

    async def window(self, long: bool, bar: Any) -> None:
        """Watch for some seconds; one with long prompts ends when the last of them is answered."""
        self.current = []
        self.gaps[long].append(self.current)
        waiting: list[asyncio.Task[None]] = []
        end = time.monotonic() + self.args.seconds
        following = time.monotonic()
        while (now := time.monotonic()) < end:
            if long and now >= following:
                waiting.append(asyncio.create_task(self.long_prompt()))
                following += self.args.every
            bar.n = min(bar.n + 0.25, bar.total)
            bar.refresh()
            await asyncio.sleep(0.25)
        await asyncio.gather(*waiting)
        self.current = None

    async def go(self, label: str) -> None:
        """All windows, with the streams under way before the first."""
        ready = [asyncio.Event() for _ in range(self.args.streams)]
        streams = [asyncio.create_task(self.stream(event)) for event in ready]
        streams.append(asyncio.create_task(self.watch()))
        await asyncio.gather(*(event.wait() for event in ready))
        with tqdm(total=2 * self.args.rounds * self.args.seconds, unit="s", desc=label, dynamic_ncols=True) as bar:
            for _ in range(self.args.rounds):
                for long in (False, True):
                    await self.window(long, bar)
        for task in streams:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(seconds, q)) * 1000, 1) for q in (50, 95, 99)}


def metrics(text: str) -> dict[str, float]:
    """The samples that say what the target allowed, if there is one."""
    found = {}
    for name, value in re.findall(r"^chairlift_(step_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
        found[name] = float(value)
    terms = dict(re.findall(r'^chairlift_step_cost_seconds\{.*term="(\w+)"\} (\S+)$', text, re.MULTILINE))
    wanted = ("step_token_budget", "step_predicted_seconds_total", "step_timed_seconds_total")
    return {name: found[name] for name in wanted if terms and name in found} | {t: float(v) for t, v in terms.items()}


async def measure(
    url: str, target: float | None, args: argparse.Namespace, server: subprocess.Popen[str] | None = None
) -> dict[str, Any]:
    client = Client(url, args.seed, args.token)
    with tqdm(desc="waiting for the model", bar_format="{desc} {elapsed}", leave=False) as bar:
        while await client.get("/health/ready") is None:
            if server is not None and server.poll() is not None:
                raise SystemExit("the server did not start")
            bar.refresh()
            await asyncio.sleep(0.2)
    run = Run(client, args)
    await run.go("no target" if target is None else f"target {target:g} ms")
    row: dict[str, Any] = {"target_itl_ms": target, "streams": args.streams, "prompt": args.prompt}
    for kind, name in enumerate(("alone", "with_long")):
        windows = run.seconds(kind)
        if not any(windows):
            raise SystemExit("the machine is too busy: there was no gap without a pause")
        row[f"itl_ms_{name}"] = milliseconds([gap for window in windows for gap in window])
        row[f"itl_ms_{name}"]["p99_by_window"] = [milliseconds(window)["p99"] for window in windows if window]
        row[f"gaps_{name}"] = sum(map(len, windows))
    row["ttft_ms_long"] = milliseconds(run.ttft)
    row["long_prompts"], row["unresolved_gaps"], row["pauses"] = len(run.ttft), run.unresolved, len(run.pauses)
    row["server"] = metrics((await client.get("/metrics") or b"").decode())
    return row


def serve_and_measure(target: float | None, args: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--port", "0", *settings]
    if target is not None:
        command += ["--target-itl-ms", f"{target:g}"]
    checkout = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=checkout) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"http://[^/\s]+:\d+", line)
            if not found:
                raise SystemExit(f"no server: {line}")
            return asyncio.run(measure(found[0], target, args, server))
        finally:
            server.terminate()


def markdown(results: Results) -> str:
    """A row for each target; windows are what is repeated, so the last columns show their range."""
    windows = results["settings"]["rounds"]
    cells = [["target", "ITL p50/95/99 ms alone", "with long prompts", "p99 by window alone", "with long prompts",
              "over the target", "TTFT p50/95 ms of long prompts", "long prompts"]]  # fmt: skip
    for row in results["runs"]:
        target, by_window = row["target_itl_ms"], row["itl_ms_with_long"]["p99_by_window"]
        cells.append(
            [
                "none" if target is None else f"{target:g} ms",
                *(_joined(row[f"itl_ms_{kind}"], "p50", "p95", "p99") for kind in ("alone", "with_long")),
                *(spread(row[f"itl_ms_{kind}"]["p99_by_window"], "{:.1f}") for kind in ("alone", "with_long")),
                "-" if target is None else spread([each / target for each in by_window], "{:.2f}"),
                _joined(row["ttft_ms_long"], "p50", "p95"),
                str(row["long_prompts"]),
            ]
        )
    settings = results["settings"]
    about = (
        f"{settings['streams']} streams, a prompt of {settings['prompt']} tokens every {settings['every']:g} s in "
        f"every other window, {windows} windows of {settings['seconds']:g} s of each kind"
    )
    return f"{caption(results)}; {about}:\n\n{layout(cells)}"


def _joined(values: dict[str, float], *quantiles: str) -> str:
    return " / ".join(f"{values[q]:.1f}" for q in quantiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--url", help="a running server, instead of MODEL")
    parser.add_argument("--target-itl-ms", type=float, nargs="*", default=[], help="one server for each")
    parser.add_argument("--no-baseline", action="store_true", help="leave out the server without a target")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=2000, help="of each stream, before another follows")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=3, help="windows of each kind")
    parser.add_argument("--token", type=int, default=1000, help="what all generate: any token that is a whole word")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, settings = parser.parse_args(given[:cut]), given[cut + 1 :]
    if bool(args.model) == bool(args.url):
        parser.error("name a MODEL, or the --url of a running server")
    recording = Recording(start("interference", vars(args) | {"server": settings}, args.model), args.out)
    if args.url:
        recording.add(asyncio.run(measure(args.url, next(iter(args.target_itl_ms), None), args)))
    else:
        for target in ([] if args.no_baseline else [None]) + args.target_itl_ms:
            recording.add(serve_and_measure(target, args, settings))
    print(markdown(recording.results))


if __name__ == "__main__":
    main()

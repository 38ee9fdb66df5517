"""Open-loop Poisson load on one HTTP endpoint: python benchmarks/dynamic/open_loop.py URL RATE SECONDS SLO_MS [--body
JSON]

Latency counts from the intended arrival, so a slow server can't hide, nor can a slow client. Prints what was sent,
answered and refused, the share inside the SLO, percentiles, goodput, and the client's own CPU time a request. The
protocol is parsed by hand, which is what lets one core offer some 10,000 requests a second.
"""

import argparse
import asyncio
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import uvloop

DRAIN_SECONDS = 10.0


@dataclass
class Tally:
    """Latencies of all that were answered with 200, in seconds, and how many were not."""

    latencies: list[float] = field(default_factory=list)
    failed: int = 0
    sent: int = 0


class Connection(asyncio.Protocol):
    """One keep-alive connection, with one request at a time."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._received = b""
        self._arrival: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be ready for a request."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes, arrival: float) -> None:
        """Send one."""
        self._arrival = arrival
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Take in an answer, or a part of it."""
        self._received += data
        if (end := _end_of_answer(self._received)) is None:
            return
        status, keep = self._received[9:12], b"connection: close" not in self._received[:end].lower()
        self._received = b""
        self._finish(status == b"200")
        if keep:
            self._pool.idle.append(self)
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever still waits gets no answer."""
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        self._finish(False)

    def _finish(self, answered: bool) -> None:
        if self._arrival is not None:
            self._pool.note(self._arrival, answered)
            self._arrival = None


def _end_of_answer(received: bytes) -> int | None:
    """Where the headers end, if all of the answer is there."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = received[:end].lower()
    _, found, length = head.partition(b"content-length:")
    if found:
        return end if len(received) >= end + 4 + int(length.split(b"\r\n", 1)[0]) else None
    return end if received.endswith(b"0\r\n\r\n") else None


class Pool:
    """Connections, as many as it takes."""

    def __init__(self, host: str, port: int) -> None:
        self.idle: list[Connection] = []
        self.tally = Tally()
        self.open = 0
        self._address = host, port
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: bytes, arrival: float) -> None:
        """Send a request now, or as soon as there is a connection."""
        self.tally.sent += 1
        self.open += 1
        if self.idle:
            self.idle.pop().send(request, arrival)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(request, arrival))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def note(self, arrival: float, answered: bool) -> None:
        """Count what became of a request."""
        self.open -= 1
        if answered:
            self.tally.latencies.append(time.perf_counter() - arrival)
        else:
            self.tally.failed += 1

    async def _connect(self, request: bytes, arrival: float) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(self), *self._address)
        except OSError:
            self.note(arrival, False)
        else:
            connection.send(request, arrival)


async def drive(send: Callable[[float], None], rate: float, seconds: float, seed: int) -> None:
    """Call `send` with each intended arrival, as near to it as the loop can."""
    rng = random.Random(seed)
    began = arrival = time.perf_counter()
    while (arrival := arrival + rng.expovariate(rate)) < began + seconds:
        if (delay := arrival - time.perf_counter()) > 0:
            await asyncio.sleep(delay)
        send(arrival)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("rate", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("slo_ms", type=float)
    parser.add_argument("--body", default='{"instances": [[1, 2, 3, 4]]}')
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    json.loads(args.body)
    url = urlsplit(args.url)
    assert url.hostname, args.url
    request = (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(args.body)}\r\n\r\n{args.body}"
    ).encode()
    pool = Pool(url.hostname, url.port or 80)
    gc.freeze()
    cpu = time.process_time()
    await drive(lambda arrival: pool.send(request, arrival), args.rate, args.seconds, args.seed)
    deadline = time.perf_counter() + DRAIN_SECONDS
    while pool.open and time.perf_counter() < deadline:
        await asyncio.sleep(0.01)
    cpu = time.process_time() - cpu
    print(
        report(pool.tally, args.rate, args.seconds, args.slo_ms / 1e3), f"client {cpu / pool.tally.sent * 1e6:.0f} us"
    )


def report(tally: Tally, rate: float, seconds: float, slo: float) -> str:
    """One line of figures."""
    latencies = sorted(tally.latencies)
    inside = sum(latency <= slo for latency in latencies)

    def at(q: float) -> str:
        return f"{latencies[int(q * (len(latencies) - 1))] * 1e3:.1f}" if latencies else "-"

    return (
        f"rate {rate:.0f}/s sent {tally.sent} answered {len(latencies)} refused or failed {tally.failed} "
        f"in SLO {100 * inside / tally.sent:.1f}% p50 {at(0.5)} p99 {at(0.99)} ms goodput {inside / seconds:.0f}/s"
    )


if __name__ == "__main__":
    uvloop.run(main())

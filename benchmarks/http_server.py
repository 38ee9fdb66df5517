"""CPU time of the HTTP front under uvicorn and under granian, with an engine that costs next to nothing.

`python benchmarks/http_server.py` runs every server in a process of its own, with the clients in another. CPU time is
reported rather than wall time, since it does not depend on what else the machine does. Tokens come from within the
server's process; under "worker" from one of its own, as a model's do, so that reading its messages is counted too.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table

sys.path.append(str(Path(__file__).parents[1] / "tests"))

TOKENS = 200
# What a step of the scripted worker takes: long enough for the front to be done with the one before.
STEP_SECONDS = 0.005
REPLY = "hello world! "


def _app(client: Any) -> Any:
    from support.server_harness import tokenizer

    from chairlift.config.server import ServerConfig
    from chairlift.server.app import create_app
    from chairlift.server.models.registry import Models
    from chairlift.server.models.sequence_service import SequenceService

    config = ServerConfig()
    return create_app(Models([SequenceService(client, tokenizer(), "tiny", config)]), config)


def _fake_client() -> Any:
    from support.server_harness import FakeClient, tokenizer

    client = FakeClient(tokenizer().encode(REPLY))
    assert client.info is not None
    client.info.max_model_len = 4 * TOKENS
    return client


async def _uvicorn(port: int, end: Any) -> None:
    await _serve(_fake_client(), port, end)


async def _worker(port: int, end: Any) -> None:
    from support.server_harness import tokenizer

    from chairlift.config.sequences import SequenceConfig
    from chairlift.engine.sequences.client import SequenceClient

    config = SequenceConfig(model="none")
    client = SequenceClient(config)
    script = ",".join(map(str, tokenizer().encode(REPLY))), str(STEP_SECONDS)
    client._worker._command = "scripted_worker", (msgspec.json.encode(config).decode(), *script)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    await client.start()
    await client.wait_ready()
    await _serve(client, port, end)
    await client.stop()


async def _serve(client: Any, port: int, end: Any) -> None:
    from chairlift.config.server import ServerConfig
    from chairlift.server.http.protocol import make_server

    server = make_server(_app(client), ServerConfig())
    server.config.port = port
    task = asyncio.create_task(server.serve())
    await asyncio.to_thread(end.wait)
    server.should_exit = True
    await task


async def _granian(port: int, end: Any) -> None:
    from granian.server.embed import Server

    server = Server(_app(_fake_client()), address="127.0.0.1", port=port, interface="asgi", log_enabled=False)
    task = asyncio.create_task(server.serve())
    await asyncio.to_thread(end.wait)
    server.stop()
    await task


def serve(kind: str, port: int, marks: Any, end: Any) -> None:
    import threading

    import uvloop

    def report() -> None:
        while True:
            marks.recv()
            used = resource.getrusage(resource.RUSAGE_SELF)
            marks.send((used.ru_utime + used.ru_stime, used.ru_maxrss))

    threading.Thread(target=report, daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run({"uvicorn": _uvicorn, "granian": _granian, "worker": _worker}[kind](port, end))


async def _client(port: int, path: str, body: bytes, count: int, first: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    about = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head = f"POST {path} HTTP/1.1\r\n{about}\r\n"
    for _ in range(count):
        began = time.perf_counter()
        writer.write(head.encode() + body)
        headers = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in headers, headers
        first.append(time.perf_counter() - began)
        if b"chunked" in headers.lower():
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            length = headers.lower().partition(b"content-length:")[2].split()[0]
            await reader.readexactly(int(length))
    writer.close()


def load(port: int, body: dict[str, Any], clients: int, count: int) -> list[float]:
    first: list[float] = []

    async def go() -> None:
        raw = json.dumps(body).encode()
        await asyncio.gather(*(_client(port, "/v1/completions", raw, count, first) for _ in range(clients)))

    import uvloop

    uvloop.run(go())
    return first


def measure(kind: str) -> dict[str, float]:
    """Microseconds of CPU a streamed token and a short request, the median milliseconds of those, and MiB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    marks, far = spawn.Pipe()
    end = spawn.Event()
    server = spawn.Process(target=serve, args=(kind, port, far, end))
    server.start()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            if not server.is_alive():
                raise SystemExit("the server did not start") from None
            time.sleep(0.05)

    def used() -> tuple[float, int]:
        marks.send(None)
        answer: tuple[float, int] = marks.recv()
        return answer

    found: dict[str, float] = {}
    streamed = {"prompt": "hello", "max_tokens": TOKENS, "stream": True}
    load(port, streamed, 8, 4)
    for clients in (1, 64):
        # Nobody waits for half an hour for one stream that is as slow as a model's.
        count = 8 if kind == "worker" else 512 // clients
        before = used()[0]
        load(port, streamed, clients, count)
        found[f"token_us_{clients}"] = (used()[0] - before) / (clients * count * TOKENS) * 1e6
    before = used()[0]
    first = sorted(load(port, {"prompt": "hello", "max_tokens": 1}, 16, 250))
    cpu, memory = used()
    found |= {"request_us": (cpu - before) / 4000 * 1e6, "request_ms": first[len(first) // 2] * 1e3}
    found["memory_mib"] = memory / 1024
    end.set()
    server.join(10)
    if server.is_alive():
        server.kill()
    return found


def markdown(results: Results) -> str:
    """A row for each server."""
    columns = (
        Column("token_us_1", "us CPU a token, 1 stream", "{:.1f}"),
        Column("token_us_64", "64 streams", "{:.1f}"),
        Column("request_us", "us CPU a short request"),
        Column("request_ms", "its median ms", "{:.1f}"),
        Column("memory_mib", "MiB"),
    )
    return f"{caption(results)}:\n\n{table(results['runs'], [Column('server', 'server')], columns)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["uvicorn", "worker", "granian"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    args = parser.parse_args()
    recording = Recording(start("http_server", vars(args)), args.out)
    for number in range(1, args.rounds + 1):
        for kind in args.kinds:
            recording.add({"round": number, "server": kind} | measure(kind))
    print(markdown(recording.results))


if __name__ == "__main__":
    main()

"""Whether memory stays flat under mixed load: python benchmarks/soak.py --out FILE.json [--minutes 30] [SERVE FLAG ...]

Starts a server, keeps it busy with completions of all kinds (streams, samples, stop strings, shared and new prefixes,
clients that go away) and notes the memory of the front and of its workers every few seconds. What is said at the end
compares the first minutes after the warm-up with the last ones.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare import save, start_results
from server_process import free_port, running
from tqdm import tqdm

from chairlift.bench.report import layout
from chairlift.demo import demo_path

EVERY_SECONDS = 5.0
WORDS = ("the", "of", "batch", "slot", "queue", "rider", "chair", "token", "model", "memory", "wait", "time", "never")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default=str(demo_path()))
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--render-only", type=Path, metavar="FILE")
    args, flags = parser.parse_known_args()
    if args.render_only:
        print(report(json.loads(args.render_only.read_text())))
        return
    if args.out is None:
        raise SystemExit("--out is needed, or --render-only")
    results = start_results(args.model, rounds=1) | {"minutes": args.minutes, "flags": flags, "clients": args.clients}
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "chairlift.cli",
        "serve",
        args.model,
        "--port",
        str(port),
        "--data-dir",
        "",
        *flags,
    ]
    with running(command, port, "/health/ready", {}):
        asyncio.run(soak(port, args.minutes * 60, args.clients, results))
    save(results, args.out)
    print(report(results))


async def soak(port: int, seconds: float, clients: int, results: dict[str, Any]) -> None:
    """Keep the clients going, and note memory beside them."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    tasks = [asyncio.create_task(client(port, random.Random(seed), lambda: time.monotonic() < until, counts))
             for seed in range(clients)]  # fmt: skip
    with tqdm(total=round(seconds), unit="s", dynamic_ncols=True) as bar:
        began = time.monotonic()
        while (now := time.monotonic()) < until:
            results["runs"].append({"s": round(now - began, 1)} | memory())
            bar.set_postfix(requests=sum(counts.values()))
            bar.update(round(now - began) - bar.n)
            await asyncio.sleep(EVERY_SECONDS)
    await asyncio.gather(*tasks)
    results["answers"] = dict(counts)


def memory() -> dict[str, float]:
    """MB of the front and of all workers: resident, and of that what is no file and not shared."""
    found: dict[str, float] = {}
    for name, pids in processes().items():
        resident = private = 0
        for pid in pids:
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            resident += int(fields["VmRSS"].split()[0])
            private += int(fields["RssAnon"].split()[0])
        found |= {f"{name}_mb": round(resident / 1024, 1), f"{name}_private_mb": round(private / 1024, 1)}
    return found


def processes() -> dict[str, list[int]]:
    """The server, this process's only child, and what it started itself."""

    def children(pid: int) -> list[int]:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    front = children(os.getpid())[0]
    return {"front": [front], "workers": children(front)}


async def client(port: int, rng: random.Random, go_on: Callable[[], bool], counts: Counter[str]) -> None:
    """One request after another; every tenth is left in the middle."""
    while go_on():
        raw, leaves = request(rng), rng.random() < 0.1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        head = await reader.readline()
        if leaves:
            await reader.read(300)
        else:
            await reader.read(-1)
        writer.close()
        counts["left" if leaves else head[9:12].decode() or "closed"] += 1


def request(rng: random.Random) -> bytes:
    """Text of any length, new or with a prefix that others have."""
    words = rng.choices(WORDS, k=rng.randint(3, 150))
    shared = " ".join(WORDS * 6) if rng.random() < 0.3 else ""
    body: dict[str, Any] = {
        "prompt": f"{shared} {' '.join(words)} {rng.random()}",
        "max_tokens": rng.randint(1, 120),
        "temperature": rng.choice((0, 0.7, 1.2)),
        "stream": rng.random() < 0.6,
        "n": rng.choice((1, 1, 1, 3)),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        body |= {"stop": ["token", "zz"], "logprobs": 3}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + raw


def report(results: dict[str, Any]) -> str:
    """Memory over tenths of the time: medians, so that one moment's peak does not count."""
    runs = results["runs"]
    names = [name for name in runs[-1] if name != "s"]
    cells = [["minutes", *names]]
    for tenth in range(10):
        part = runs[len(runs) * tenth // 10 : len(runs) * (tenth + 1) // 10]
        if part:
            span = f"{part[0]['s'] / 60:.1f}-{part[-1]['s'] / 60:.1f}"
            cells.append([span, *(f"{statistics.median(run[name] for run in part):.0f}" for name in names)])
    return f"{results['machine']}, {results['date']}, answers {results.get('answers')}\n\n{layout(cells)}"


if __name__ == "__main__":
    main()

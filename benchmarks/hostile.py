"""What small hostile requests do to everyone else: python benchmarks/hostile.py --out FILE.json [--before CHECKOUT]

For each attack a fresh server with the demo model: the longest that `/health/live`, asked again and again, took to
answer while the attack went on, the longest of a victim's small chats, the front's peak memory, and what the attacker
was answered. With `--before`, an older checkout (its native library built) is attacked too.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from server_process import free_port, running
from tqdm import tqdm

from chairlift.bench.raw_results import Recording, Results, caption, layout, start
from chairlift.demo import demo_path

HERE = Path(__file__).resolve().parent
PAUSE_SECONDS = 0.02
MOST_SECONDS = 240.0
VICTIM_AFTER_SECONDS = 1.0


class Attack(NamedTuple):
    """Requests that are sent at once; where `chats`, a victim sends a chat of so many bytes once they are under way."""

    name: str
    path: str
    bodies: Callable[[], list[dict[str, Any]]]
    chat_bytes: int = 0


def _stop() -> list[dict[str, Any]]:
    return [{"prompt": ["a"] * 16, "n": 64, "max_tokens": 1, "stop": "x" * 10_000}]


def _stop_token_ids() -> list[dict[str, Any]]:
    return [{"prompt": "a", "n": 64, "max_tokens": 512, "ignore_eos": True, "stop_token_ids": [1] * 100_000}]


def _large_chats() -> list[dict[str, Any]]:
    # Words that no tokenizer has seen, so that it can't remember them.
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=3_900_000)) for _ in range(8)]
    return [{"messages": [{"role": "user", "content": text}], "max_tokens": 1} for text in texts]


def _nested() -> list[dict[str, Any]]:
    value: Any = 1
    for _ in range(900):
        value = [value]
    return [{"messages": [{"role": "user", "content": "a", "x": value}], "chat_template_kwargs": {"a": value}}] * 8


ATTACKS = (
    Attack("stop: 10,000 characters, 16 prompts, n = 64", "/v1/completions", _stop),
    Attack("100,000 stop_token_ids, n = 64", "/v1/completions", _stop_token_ids, chat_bytes=100),
    Attack("eight chats of 3.9 MB", "/v1/chat/completions", _large_chats, chat_bytes=18_000),
    Attack("JSON nested 900 deep", "/v1/chat/completions", _nested, chat_bytes=100),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    args = parser.parse_args()
    recording = Recording(start("hostile", vars(args), str(demo_path())), args.out)
    sides = {"after": HERE.parent} | ({"before": args.before.resolve()} if args.before else {})
    for attack in tqdm(ATTACKS, unit="attack", dynamic_ncols=True):
        for side, checkout in sides.items():
            recording.add({"attack": attack.name, "side": side} | attacked(attack, checkout))
    print(markdown(recording.results))


def attacked(attack: Attack, checkout: Path) -> dict[str, Any]:
    """Attack a server of a checkout once."""
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", "--port", str(port), "--data-dir", ""]
    with running(command, port, "/health/ready", {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}):
        pid = int(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()[-1])
        found = asyncio.run(_measure(port, attack))
        status = Path(f"/proc/{pid}/status").read_text()
        return found | {"peak_mb": int(status.partition("VmHWM:")[2].split()[0]) // 1024}


async def _measure(port: int, attack: Attack) -> dict[str, Any]:
    raw = [_post(attack.path, body) for body in attack.bodies()]
    tasks = [asyncio.create_task(_ask(port, request)) for request in raw]
    prober = asyncio.create_task(_probe(port))
    victim = 0.0
    if attack.chat_bytes:
        await asyncio.sleep(VICTIM_AFTER_SECONDS)
        text = ("a small question " * attack.chat_bytes)[: attack.chat_bytes]
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        began = time.perf_counter()
        await _ask(port, _post("/v1/chat/completions", body))
        victim = time.perf_counter() - began
    answers = Counter(await asyncio.gather(*tasks))
    prober.cancel()
    (longest,) = await asyncio.gather(prober)
    return {"live_s": round(longest, 3), "victim_s": round(victim, 3), "answers": dict(answers)}


async def _probe(port: int) -> float:
    """Ask whether the server lives until cancelled; returns the longest that an answer took."""
    longest = 0.0
    raw = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    while True:
        began = time.perf_counter()
        try:
            await _ask(port, raw)
            longest = max(longest, time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)
        except asyncio.CancelledError:
            return max(longest, time.perf_counter() - began)


async def _ask(port: int, raw: bytes) -> str:
    """Send a request; returns the status of the answer, or what came instead."""
    try:
        async with asyncio.timeout(MOST_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(raw)
                return (await reader.read(-1))[9:12].decode() or "closed"
            finally:
                writer.close()
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "none"


def _post(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def markdown(results: Results) -> str:
    """A row for each attack and side."""
    cells = [["attack", "", "longest /health/live, s", "victim's chat, s", "front's peak, MB", "attacker's answers"]]
    for run in results["runs"]:
        answers = ", ".join(f"{count} x {status}" for status, count in run["answers"].items())
        victim = f"{run['victim_s']:.2f}" if run["victim_s"] else "-"
        cells.append([run["attack"], run["side"], f"{run['live_s']:.2f}", victim, str(run["peak_mb"]), answers])
    return f"{caption(results)}:\n\n{layout(cells)}"


if __name__ == "__main__":
    main()

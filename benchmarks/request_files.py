"""Through which of the project's files one warm request goes: python benchmarks/request_files.py

Starts a server, sends a streamed chat completion and, to another server, an embedding, each after two of its like, and
prints the files of the front's process and of the worker's in the order in which they were first entered, with the
first function that ran there.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server_process import free_port, running

from chairlift.demo import demo_path

HERE = Path(__file__).resolve().parent
# What still happens after the answer's last byte belongs to the request too.
SETTLE_SECONDS = 0.2
# Twice a second a worker says that it lives, whatever is asked of it.
IDLE_SECONDS = 1.0

Entry = tuple[float, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(demo_path()), help="a language model's folder (default: the demo)")
    parser.add_argument("--encoder", default=str(demo_path()), help="an encoder's, or one that embeds (default: same)")
    args = parser.parse_args()
    chat = {"messages": [{"role": "user", "content": "What is batching?"}], "max_tokens": 8, "stream": True}
    trace("chat completion", [args.model], "/v1/chat/completions", chat)
    trace("embedding", [args.encoder, "--kind", "encoder"], "/v1/embeddings", {"input": "What is batching?"})


def trace(title: str, flags: list[str], path: str, body: dict[str, Any]) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        search = os.pathsep.join([str(HERE / "traced"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "chairlift.cli", "serve", *flags, "--port", str(port), "--data-dir", ""]
        with running(command, port, "/health/ready", {"REQUEST_FILES": folder, "PYTHONPATH": search}):
            for _ in range(2):
                post(port, path, body)
            time.sleep(SETTLE_SECONDS)
            processes = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
            idle = noted(processes, lambda: time.sleep(IDLE_SECONDS))
            busy = noted(processes, lambda: post(port, path, body))
            entered = [first(entries, ignored) for entries, ignored in zip(busy, idle, strict=True)]
            show(title, dict(zip(("front", "worker"), entered, strict=True)))


def noted(processes: list[Path], work: Callable[[], None]) -> list[list[Entry]]:
    """The functions that each process enters while some work is done, and a moment longer."""
    for process in processes:
        ask(process, b"start")
    work()
    time.sleep(SETTLE_SECONDS)
    return [ask(process, b"stop") for process in processes]


def first(entries: list[Entry], idle: list[Entry]) -> list[Entry]:
    """The first function of each file, without those that run anyway while nothing is asked of the server."""
    ignored = {entry[1:] for entry in idle}
    found: dict[str, Entry] = {}
    for entry in sorted(entries):
        if entry[1:] not in ignored:
            found.setdefault(entry[1], entry)
    return list(found.values())


def post(port: int, path: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        answer.read()


def ask(process: Path, command: bytes) -> list[Entry]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(process))
        connection.sendall(command)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    return [(moment, name, function) for moment, name, function in json.loads(raw)]


def show(title: str, entered: dict[str, list[Entry]]) -> None:
    files: set[str] = set()
    for process, entries in entered.items():
        print(f"\n{title}, {process}")
        for number, (_, name, function) in enumerate(entries, 1):
            shown = name.rpartition("/chairlift/")[2]
            files.add(shown)
            print(f"{number:3}  {shown:45} {function}")
    counts = ", ".join(f"{process} {len(entries)}" for process, entries in entered.items())
    print(f"\n{title}: {len(files)} files ({counts})")


if __name__ == "__main__":
    main()

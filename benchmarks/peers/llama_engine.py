"""llama.cpp's rates over HTTP, as it batches only in its server: llama_engine.py --binary FILE GGUF WORKLOADS"""

import argparse
import http.client
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from engines import llama_command
from offline_run import add_arguments, report
from server_process import free_port, running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    add_arguments(parser)
    args = parser.parse_args()
    port = free_port()
    command = [*llama_command(args.binary, args.model), "--port", str(port)]
    # Whoever kills this program for being late must get the server, too.
    with running(command, port, "/health", {}, own_group=False) as load:
        report("llama.cpp", args, load, lambda jobs: prepare(port, jobs))


def prepare(port: int, jobs: list[tuple[list[int], int]]) -> Callable[[], int]:
    bodies = [json.dumps({"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True}) for ids, n in jobs]

    def complete(body: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1800)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {text[:200]!r}")
        return int(json.loads(text)["usage"]["completion_tokens"])

    def run() -> int:
        with ThreadPoolExecutor(64) as threads:
            return sum(threads.map(complete, bodies))

    return run


if __name__ == "__main__":
    main()

"""llama.cpp's embedding rate, best of batch sizes.

python benchmarks/dynamic/peers/llama_embed.py MODEL --binary LLAMA_SERVER --gguf FILE --precision NAME

It embeds in its server, which gets many texts a request, several requests at a time, so that no batch waits for the
client. MODEL is a folder with the vocab.txt of the file. Prints one line of JSON for each setting.
"""

import argparse
import http.client
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

import texts
from server_process import free_port, running

# Of a request, and how many are under way: each of them alone fills the largest batch.
TEXTS, REQUESTS = 64, 4
SLOTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_arguments(parser)
    parser.add_argument("--binary", required=True, help="llama-server")
    parser.add_argument("--gguf", required=True, metavar="FILE")
    parser.add_argument("--precision", required=True, help="what the file is in")
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[512, 2048])
    args = parser.parse_args()
    strings, lengths = texts.make_texts(args.model, args.texts)
    for batch_tokens in args.batch_tokens:
        seconds = measure(args, strings, lengths, batch_tokens)
        report = {"engine": "llama.cpp", "dtype": args.precision, "batch_tokens": batch_tokens}
        report |= {"tokens": sum(lengths), "seconds": round(seconds, 3), "tok_s": round(sum(lengths) / seconds)}
        print(json.dumps(report), flush=True)


def measure(args: argparse.Namespace, strings: list[str], lengths: list[int], batch_tokens: int) -> float:
    """Seconds of the best round. Raises RuntimeError where it makes other tokens of the texts than all others."""
    port, batch = free_port(), str(batch_tokens)
    command = [args.binary, "-m", args.gguf, "--embeddings", "--port", str(port), "-t", str(os.cpu_count())]
    command += ["-b", batch, "-ub", batch, "-np", str(SLOTS), "-c", str(SLOTS * texts.CAP)]
    parts = [strings[first : first + TEXTS] for first in range(0, len(strings), TEXTS)]
    best = float("inf")
    with running(command, port, "/health", {}, own_group=False):
        embed(port, parts[0])
        for _ in range(args.rounds):
            began = time.perf_counter()
            with ThreadPoolExecutor(REQUESTS) as threads:
                counted = sum(threads.map(lambda part: embed(port, part), parts))
            best = min(best, time.perf_counter() - began)
            if counted != sum(lengths):
                raise RuntimeError(f"the texts are {sum(lengths)} tokens, and llama.cpp counts {counted}")
    return best


def embed(port: int, part: list[str]) -> int:
    """Embed some texts; gives how many tokens they were."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1800)
    connection.request("POST", "/v1/embeddings", json.dumps({"input": part}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"HTTP {answer.status}: {text[:200]!r}")
    found: dict[str, Any] = json.loads(text)
    assert len(found["data"]) == len(part)
    return int(found["usage"]["prompt_tokens"])


if __name__ == "__main__":
    main()

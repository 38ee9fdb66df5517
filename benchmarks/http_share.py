"""What HTTP leaves of the rate in process: python benchmarks/http_share.py MODEL --out FILE.json

`--answers` greedy completions of `--tokens` tokens, all at once: streamed over HTTP, whole over HTTP, and with `LLM` in
this process, in turn. The client is a process of its own on the same cores, which counts bytes and decodes nothing. CPU
of the server's front and of the client is that of their processes, divided by all tokens. The round before the first
warms up all of them and is not kept. What follows `--` are flags of `chairlift serve`; of `--quantization` and
`--kv-cache-gb` (1) `LLM` gets the same.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from engines import SERVED_NAME
from fidelity import front_pid, settings_of
from server_process import free_port, running

from chairlift import LLM, SamplingParams
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table

PROMPT = 64


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE")
    args, flags = parser.parse_args(given[:cut]), ["--kv-cache-gb", "1", *given[cut + 1 :]]
    if args.port:
        import uvloop

        print(json.dumps(uvloop.run(load(args))))
    else:
        print(markdown(measure(args, flags)))


def markdown(results: Results) -> str:
    """A row for answers that are streamed, and one for those that come as a whole."""
    names = [Column(key, key, "{}") for key in ("model", "answers")]
    columns = (
        Column("http_tok_s", "tok/s over HTTP"),
        Column("in_process_tok_s", "in process"),
        Column("share", "share", "{:.3f}"),
        Column("front_us", "front, us a token", "{:.1f}"),
        Column("client_us", "client, us a token", "{:.1f}"),
    )
    return f"{caption(results)}; {' '.join(results['settings']['server'])}\n\n{table(results['runs'], names, columns)}"


def measure(args: argparse.Namespace, flags: list[str]) -> Results:
    """Serve, and have all three in turn."""
    record = Recording(start("http_share", {**vars(args), "model": Path(args.model).name, "server": flags}), args.out)
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
    command += ["--port", str(port), "--data-dir", "", *flags]
    ask = [sys.executable, __file__, args.model, "--port", str(port)]
    ask += ["--answers", str(args.answers), "--tokens", str(args.tokens)]
    with running(command, port, "/health/ready", {"PYTHONPATH": str(Path(__file__).parents[1])}):
        front, settings = front_pid(port), settings_of(args.model, flags)
        llm = LLM(args.model, quantization=settings.quantization, kv_cache_gb=settings.kv_cache_gb or 1.0)
        for number in range(args.rounds + 1):
            found = {"streamed": over_http(ask, front), "whole": over_http([*ask, "--whole"], front)}
            alone, count = in_process(llm, args), args.answers * args.tokens
            for kind, seen in found.items() if number else ():
                rates = {"http_tok_s": count / seen["seconds"], "in_process_tok_s": count / alone}
                costs = {f"{who}_us": 1e6 * seen[who] / count for who in ("front", "client")}
                about = {"model": Path(args.model).name, "answers": f"{args.answers} {kind}", "round": number}
                record.add({**about, **rates, "share": alone / seen["seconds"], **costs})
        llm.close()
    return record.results


def over_http(ask: list[str], front: int) -> dict[str, float]:
    """The seconds that the client took, and the CPU of both sides."""
    before = cpu_seconds(front)
    seen: dict[str, float] = json.loads(subprocess.run(ask, check=True, capture_output=True, text=True).stdout)
    return seen | {"front": cpu_seconds(front) - before}


def prompts(count: int) -> list[list[int]]:
    """One for each stream, none with the beginning of another."""
    return [[100 + index] * PROMPT for index in range(count)]


def in_process(llm: LLM, args: argparse.Namespace) -> float:
    """The seconds that the same takes without HTTP."""
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts(args.answers), params, use_tqdm=False)
    return time.perf_counter() - began


def cpu_seconds(pid: int) -> float:
    """Of one process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(args: argparse.Namespace) -> dict[str, float]:
    """Ask for all at once; the seconds until the last has ended, and this process's CPU for it."""
    used, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one(args, prompt) for prompt in prompts(args.answers)))
    return {"seconds": time.perf_counter() - began, "client": time.process_time() - used}


async def one(args: argparse.Namespace, prompt: list[int]) -> None:
    """One completion, read to its end."""
    wanted = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(wanted | {"stream": not args.whole}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", args.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    last = first = b""
    while part := await reader.read(65536):
        first, last = first or part, last[-64:] + part
    writer.close()
    end = b'"usage"' if args.whole else b"data: [DONE]"
    if not first.startswith(b"HTTP/1.1 200") or end not in last:
        raise SystemExit(f"not answered: {first[:300]!r} ... {last[-300:]!r}")


if __name__ == "__main__":
    main()

"""What HTTP leaves of the rate in process: python benchmarks/http_share.py MODEL --out FILE.json

`--answers` greedy completions of `--tokens` tokens, all at once: streamed over HTTP, whole over HTTP, and with `LLM` in
this process, in turn. The client is a process of its own on the same cores, which counts events and decodes nothing.
CPU of the server's front and of the client is that of their processes, divided by all tokens. Prompts are those after
which greedy tokens have text, which not all tokens of a model with random weights have: without text there is no event.
The round before the first warms up all of them and is not kept. What follows `--` are flags of `chairlift serve`; of
`--quantization` and `--kv-cache-gb` (1) `LLM` gets the same.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from engines import SERVED_NAME
from fidelity import settings_of
from server_process import free_port, front_pid, running

from chairlift import LLM, SamplingParams
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.planning.measured_server import cpu_seconds

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
    parser.add_argument("--prompts", type=int, nargs="+", help=argparse.SUPPRESS)
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
        Column("events", "events a token", "{:.2f}"),
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
        args.prompts = with_text(llm, args.answers)
        ask += ["--prompts", *map(str, args.prompts)]
        for number in range(args.rounds + 1):
            found = {"streamed": over_http(ask, front), "whole": over_http([*ask, "--whole"], front)}
            (alone, _), count = in_process(llm, args.prompts, args.tokens), args.answers * args.tokens
            for kind, seen in found.items() if number else ():
                rates = {"http_tok_s": count / seen["seconds"], "in_process_tok_s": count / alone}
                costs = {"events": seen["events"] / count}
                costs |= {f"{who}_us": 1e6 * seen[who] / count for who in ("front", "client")}
                about = {"model": Path(args.model).name, "answers": f"{args.answers} {kind}", "round": number}
                record.add({**about, **rates, "share": alone / seen["seconds"], **costs})
        llm.close()
    return record.results


def over_http(ask: list[str], front: int) -> dict[str, float]:
    """The seconds that the client took, and the CPU of both sides."""
    before = cpu_seconds(front)
    seen: dict[str, float] = json.loads(subprocess.run(ask, check=True, capture_output=True, text=True).stdout)
    return seen | {"front": cpu_seconds(front) - before}


def prompt(token_id: int) -> list[int]:
    """One that no other begins with."""
    return [token_id] * PROMPT


def with_text(llm: LLM, count: int) -> list[int]:
    """The first token ids of which prompts are made so that the answers to them begin with text alone."""
    candidates = [100 + index for index in range(8 * count)]
    _, texts = in_process(llm, candidates, 16)
    found = [each for each, text in zip(candidates, texts, strict=True) if "" not in text]
    if len(found) < count:
        raise SystemExit(f"of {len(candidates)} prompts only {len(found)} have answers whose tokens all have text")
    return found[:count]


def in_process(llm: LLM, prompts: list[int], tokens: int) -> tuple[float, list[list[str]]]:
    """The seconds that the same takes without HTTP, and the texts of all tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([prompt(each) for each in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert llm.tokenizer is not None
    return seconds, [[llm.tokenizer.decode([each]) for each in output.outputs[0].token_ids] for output in outputs]


async def load(args: argparse.Namespace) -> dict[str, float]:
    """Ask for all at once; the seconds until the last has ended, its CPU for it, and how many events came."""
    used, began = time.process_time(), time.perf_counter()
    events = await asyncio.gather(*(one(args, each) for each in args.prompts))
    seconds, client = time.perf_counter() - began, time.process_time() - used
    return {"seconds": seconds, "client": client, "events": sum(events)}


async def one(args: argparse.Namespace, token_id: int) -> int:
    """One completion, read to its end; how many events came."""
    wanted = {"model": SERVED_NAME, "prompt": prompt(token_id), "max_tokens": args.tokens}
    wanted |= {"temperature": 0, "ignore_eos": True, "stream": not args.whole}
    body, events = json.dumps(wanted).encode(), 0
    reader, writer = await asyncio.open_connection("127.0.0.1", args.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    last = first = b""
    while part := await reader.read(65536):
        first, last = first or part, last[-64:] + part
        events += part.count(b"data: ")
    writer.close()
    end = b'"usage"' if args.whole else b"data: [DONE]"
    if not first.startswith(b"HTTP/1.1 200") or end not in last:
        raise SystemExit(f"not answered: {first[:300]!r} ... {last[-300:]!r}")
    return events


if __name__ == "__main__":
    main()

"""What a new schema costs its request, and a hostile one everybody else.

    python benchmarks/structured_http.py MODEL --out FILE.json

One server. First the time to the first text of requests one at a time: with no schema, with one that the server has
seen, and with one that it has not. Then `--streams` streams decode: with nothing else, and with a short answer or a
hostile grammar that another process asks for twice a second, in turn. A gap is the time between two events of a stream.
The hostile ones are what took longest to compile or to follow: nested repetition, references in a chain, thousands of
keys, a long constant, a pattern that ends in a guess, and twelve answers at once under many kinds of lists.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from itertools import cycle, pairwise
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event as EventOfProcesses
from pathlib import Path
from typing import Any

import workloads
from engines import SERVED_NAME
from server_process import free_port, running
from tqdm import tqdm

from chairlift.bench.completion_stream import Outcome, Target, stream
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table

NAMES = (Column("what", "", "{}"),)
SETTLE_SECONDS = 4.0
BEGIN_SECONDS = 60.0
# Bodies of each attack, which differ a little.
VARIANTS = 7
COLUMNS = (
    Column("p50_ms", "p50 ms", "{:.1f}"),
    Column("p95_ms", "p95 ms", "{:.1f}"),
    Column("p99_ms", "p99 ms", "{:.1f}"),
    Column("highest_ms", "highest ms", "{:.1f}"),
    Column("count", "of"),
)


def references(count: int) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "string"}}}


def lists(count: int) -> dict[str, Any]:
    """Each token of one may take 15 ms, of which a sequence alone would tell only after it has."""
    kinds = ({"type": ["number", "integer", "string"], "minimum": i, "maxLength": 50 + i} for i in range(count))
    return {"anyOf": [{"type": "array", "items": kind, "maxItems": 300 + i} for i, kind in enumerate(kinds)]}


HOSTILE: dict[str, dict[str, Any]] = {
    "nested repetition": {"regex": "((((((a{50}){50}){50}){50}){50}){50})"},
    "nested repetition behind a choice": {"regex": "[xy]((((((a{50}){50}){50}){50}){50}){50})"},
    "repetition behind a guess": {"regex": "[xy](a?){1000}a{1000}"},
    "900 references": {"json": references(900)},
    "900 optional keys": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}},
    "3,000 keys": {
        "json": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(3000)},
            "required": [f"p{i}" for i in range(3000)],
        }
    },
    "a constant of 100 KB": {"json": {"const": "a" * 100_000}},
    "200 patterns of keys": {
        "json": {"type": "object", "patternProperties": {f"^p{i}.*x{i}$": {"type": "string"} for i in range(200)}}
    },
    "twelve answers at once, 60 kinds of lists": {"json": lists(60), "n": 12},
}


PLAIN: dict[str, dict[str, Any]] = {
    "short answers without a grammar": {},
    "twelve such answers at once": {"n": 12},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schemas", type=int, default=20, help="new schemas in each round")
    parser.add_argument("--vocab", type=int, default=30_000, help="prompts use the token ids below")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    args = parser.parse_args()
    record = Recording(start("structured_http", vars(args)), args.out)
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
    with running([*command, "--port", str(port), "--kv-cache-gb", "1"], port, "/health/ready", {}):
        target = Target.of(f"http://127.0.0.1:{port}", SERVED_NAME)
        asyncio.run(measure(target, args, record))
    print(markdown(record.results))


def markdown(results: Results) -> str:
    return f"{caption(results)}\n\n{table(results['runs'], NAMES, COLUMNS)}"


async def measure(target: Target, args: argparse.Namespace, record: Recording) -> None:
    """All rounds, each with the first texts and the two kinds of windows."""
    rng = random.Random(0)
    with tqdm(total=args.rounds, desc="rounds", dynamic_ncols=True) as bar:
        for number in range(args.rounds + 1):
            rows = await first_texts(target, args, rng)
            rows |= await gaps(target, args, rng)
            if number:  # the one before warms up
                for what, milliseconds in rows.items():
                    record.add({"what": what, "round": number, **spread_of(milliseconds)})
                bar.update()


async def first_texts(target: Target, args: argparse.Namespace, rng: random.Random) -> dict[str, list[float]]:
    """Milliseconds to the first text, of requests that take turns."""
    found: dict[str, list[float]] = {}
    known = new_schema(rng)
    await one(target, args.vocab, rng, known)
    for _ in range(args.schemas):
        for what, schema in (("no schema", None), ("a known schema", known), ("a new schema", new_schema(rng))):
            outcome = await one(target, args.vocab, rng, schema)
            found.setdefault(f"first text, {what}", []).append((outcome.times[0] - outcome.sent) * 1000)
    return found


async def one(target: Target, vocab: int, rng: random.Random, schema: dict[str, Any] | None) -> Outcome:
    fields = {} if schema is None else {"structured_outputs": {"json": schema}}
    prompt = workloads.random_ids(rng, 32, vocab)
    outcome = await stream(target, target.request(prompt, 4, **fields), time.perf_counter())
    if outcome.error is not None:
        raise SystemExit(outcome.error)
    return outcome


def new_schema(rng: random.Random) -> dict[str, Any]:
    """An object of twelve keys that nobody has seen, some kilobyte of schema."""
    kinds = [
        {"type": "string", "maxLength": 30},
        {"type": "integer"},
        {"type": "array", "items": {"type": "string"}},
        {"enum": [f"v{rng.randrange(10**6)}" for _ in range(4)]},
    ]
    keys = {f"key{rng.randrange(10**9)}": rng.choice(kinds) for _ in range(12)}
    return {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}


async def gaps(target: Target, args: argparse.Namespace, rng: random.Random) -> dict[str, list[float]]:
    """Milliseconds between the events of streams, alone, beside short answers, and beside each hostile grammar."""
    found: dict[str, list[float]] = {}
    for what, wanted in ({"nothing else": None} | PLAIN | HOSTILE).items():
        prompts = [workloads.random_ids(rng, 32, args.vocab) for _ in range(args.streams)]
        # A token that is text by itself, so that each gives an event.
        requests = [target.request(prompt, args.tokens, logit_bias={"1000": 100}) for prompt in prompts]
        with attacked(target, wanted):
            outcomes = await asyncio.gather(*(stream(target, request, time.perf_counter()) for request in requests))
        if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
            raise SystemExit(failed[0])
        # The prompts of one another are in the first gaps.
        found[f"gap, {what}"] = [
            (b - a) * 1000 for outcome in outcomes for a, b in pairwise(outcome.times[args.streams :])
        ]
        # The grammars that came last are still being compiled.
        await asyncio.sleep(SETTLE_SECONDS)
    return found


@contextlib.contextmanager
def attacked(target: Target, wanted: dict[str, Any] | None) -> Iterator[None]:
    """Have a process of its own send a grammar twice a second meanwhile; what it costs the sender is not the server's.

    It sends nothing at all if nothing is wanted, and no grammar if that is empty.
    """
    if wanted is None:
        yield
        return
    bodies = [attack_body(target.model, wanted, number) for number in range(VARIANTS)]
    spawn = multiprocessing.get_context("spawn")
    worst, begun = spawn.Value("i", 0), spawn.Event()
    about = target.host, target.port, target.path, bodies, worst, begun
    sender = spawn.Process(target=attack, args=about, daemon=True)
    sender.start()
    try:
        if not begun.wait(BEGIN_SECONDS):
            raise SystemExit("the attack did not begin")
        yield
    finally:
        sender.terminate()
        sender.join()
    # A grammar may still be compiled in the time that the streams leave.
    if worst.value >= 500 or (not worst.value and wanted in PLAIN.values()):
        raise SystemExit(f"what was sent beside the streams was answered with {worst.value or 'nothing'}")


def attack_body(model: str, wanted: dict[str, Any], number: int) -> bytes:
    """A request for a grammar that is a little different for each number."""
    fields = dict(wanted)
    body: dict[str, Any] = {"model": model, "prompt": [5], "max_tokens": 20, "n": fields.pop("n", 1)}
    if "regex" in fields:
        fields["regex"] = fields["regex"].replace("{50}", f"{{{50 - number}}}", 1)
    elif fields:
        fields["json"] = {**fields["json"], "$comment": number}
    return json.dumps(body | ({"structured_outputs": fields} if fields else {})).encode()


def attack(
    host: str, port: int, path: str, bodies: list[bytes], worst: "Synchronized[int]", begun: "EventOfProcesses"
) -> None:
    """Send the bodies in turn, twice a second; keep the highest status that is not about too much at once."""
    os.nice(19)
    begun.set()
    for body in cycle(bodies):
        threading.Thread(target=post, args=(host, port, path, body, worst), daemon=True).start()
        time.sleep(0.5)


def post(host: str, port: int, path: str, body: bytes, worst: "Synchronized[int]") -> None:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    # Whoever takes long may give up: it is the others that count.
    with contextlib.suppress(TimeoutError):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        status = connection.getresponse().status
        if status != 503:
            worst.value = max(worst.value, status)


def spread_of(milliseconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(milliseconds, n=100, method="inclusive")
    return {
        "p50_ms": cuts[49],
        "p95_ms": cuts[94],
        "p99_ms": cuts[98],
        "highest_ms": max(milliseconds),
        "count": len(milliseconds),
    }


if __name__ == "__main__":
    main()

"""Whether calls of tools are valid, and those of the demo model right: python benchmarks/tool_calls.py [--out FILE]

Each chat goes over HTTP to a server, and what comes back is checked with the jsonschema package against the schema of
the tool that it names. The demo model is asked questions that take its own two tools, as scripts/demo_tools.py puts
them, with `auto`, `required` and the name of the tool; a call is right if its name and all its arguments are. It and a
model of random weights are then made to call tools that neither knows, whose schemas have what schemas have.
"""

import argparse
import asyncio
import datetime
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import torch
from safetensors.torch import load_file, save_file
from server_process import free_port, running
from tqdm import tqdm

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.demo import demo_path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import demo_tools

AT_ONCE = 32
FORMATS = jsonschema.FormatChecker()
MAX_TOKENS = 1200
NAMES = (Column("model", "model", "{}"), Column("tools", "tools", "{}"), Column("choice", "`tool_choice`", "{}"),
         Column("temperature", "temperature", "{:g}"))  # fmt: skip
COLUMNS = (
    Column("chats", "chats"), Column("calls", "calls"), Column("not_valid", "not valid"),
    Column("cut_off", "cut off"), Column("right", "right", "{:.1%}"),
)  # fmt: skip

_TEXT = {"type": "string", "maxLength": 12}
_POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "number"}}, "required": ["x", "y"]}
# Every value has an end, so that random weights come to one.
OTHERS: dict[str, dict[str, Any]] = {
    "now": {"type": "object", "properties": {}},
    "move": {"type": "object", "properties": {"to": _POINT, "fast": {"type": "boolean"}}, "required": ["to"]},
    "tag": {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3}, "note": _TEXT},
        "required": ["tags"],
    },
    "book": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "seats": {"type": "integer", "minimum": 1, "maximum": 9},
            "class": {"enum": ["first", "second"]},
        },
        "required": ["seats", "class", "day"],
        "additionalProperties": False,
    },
    "route": {
        "type": "object",
        "properties": {"stops": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 3}},
        "required": ["stops"],
        "$defs": {"point": _POINT},
    },
    "either": {
        "type": "object",
        "properties": {"key": {"anyOf": [{"type": "integer", "minimum": -5}, {"type": "null"}, {"const": "all"}]}},
        "required": ["key"],
    },
    "code": {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "\"odd\" näme": {"type": "null"}},
        "required": ["id"],
    },
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
    },
    "calculate": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


@FORMATS.checks("date", ValueError)
def is_date(text: Any) -> bool:
    """RFC 3339 has a year 0, which Python has not; it is a leap year, as 2000 is."""
    return bool(datetime.date.fromisoformat(re.sub("^0000-", "2000-", str(text))))


@dataclass
class Asked:
    """A chat's body, the schemas of its tools, and the calls that are right, where that is known."""

    body: dict[str, Any]
    schemas: dict[str, dict[str, Any]]
    right: list[tuple[str, dict[str, Any]]] | None = None


@dataclass
class Counted:
    """What came of the chats of one row."""

    calls: int = 0
    cut_off: int = 0
    right: int = 0
    problems: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--chats", type=int, default=250, help="in each row (default: 250)")
    args = parser.parse_args()
    recording = Recording(start("tool_calls", vars(args)), args.out)
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": demo_path(), "random weights": randomized(Path(folder) / "random")}
        rows = [(model, *row) for model in models for row in rows_of(model)]
        with tqdm(total=len(rows) * args.chats, unit="chat", dynamic_ncols=True) as bar:
            for name, path in models.items():
                port = free_port()
                command = [sys.executable, "-m", "chairlift.cli", "serve", str(path), "--served-model-name", "demo"]
                with running([*command, "--port", str(port), "--data-dir", ""], port, "/health/ready", {}):
                    for model, tools, choice, temperature in rows:
                        if model == name:
                            chats = make_chats(tools, choice, temperature, args.chats)
                            counted = asyncio.run(count(port, chats, bar.update))
                            recording.add(
                                {"model": model, "tools": tools, "choice": choice, "temperature": temperature}
                                | {"chats": args.chats, "calls": counted.calls, "cut_off": counted.cut_off}
                                | {"not_valid": len(counted.problems), "problems": counted.problems}
                                | ({"right": counted.right / args.chats} if tools == "its own" else {})
                            )
    print(markdown(recording.results))
    sys.exit(any(run["not_valid"] for run in recording.results["runs"]))


def rows_of(model: str) -> Iterator[tuple[str, str, float]]:
    """The tools, the choice and the temperature of each row."""
    for temperature in (0.0, 1.0):
        if model == "demo":
            for choice in ("auto", "required", "named"):
                yield "its own", choice, temperature
        for choice in ("required", "named"):
            yield "others", choice, temperature


def randomized(folder: Path) -> Path:
    """The demo model with weights that mean nothing."""
    shutil.copytree(demo_path(), folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    drawn = {name: torch.randn_like(weight) * 0.1 if weight.ndim > 1 else weight for name, weight in weights.items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_chats(tools: str, choice: str, temperature: float, count: int) -> list[Asked]:
    """The chats of one row; the same in every run."""
    rng = random.Random(0)
    return [_own(rng, choice, temperature) if tools == "its own" else _other(rng, choice, temperature)
            for _ in range(count)]  # fmt: skip


def _own(rng: random.Random, choice: str, temperature: float) -> Asked:
    """A question that takes one of the demo model's tools, half of them put as it was never trained on."""
    right: list[tuple[str, dict[str, Any]]] = []
    while not right or (choice == "named" and len({name for name, _ in right}) > 1):
        turn = demo_tools.turns(rng, demo_tools.TOOLS, held_out=rng.random() < 0.5)[0]
        right = [(name, dict(given)) for name, given in turn.calls]
    return Asked(_body(turn.ask, OWN, choice, right[0][0], temperature), OWN, right)


def _other(rng: random.Random, choice: str, temperature: float) -> Asked:
    """A question that has nothing to do with the tools."""
    names = rng.sample(sorted(OTHERS), rng.randint(1, 4))
    schemas = {name: OTHERS[name] for name in names}
    question = rng.choice(["What is batching?", "Hello!", "Tell me a story.", "What is 7 + 5?"])
    return Asked(_body(question, schemas, choice, names[0], temperature), schemas)


def _body(
    question: str, schemas: dict[str, dict[str, Any]], choice: str, name: str, temperature: float
) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": each, "parameters": schemas[each]}} for each in schemas]
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": name}} if choice == "named" else choice,
        "temperature": temperature,
        "max_tokens": MAX_TOKENS,
        "seed": 1,
    }


async def count(port: int, chats: list[Asked], done: Callable[[], Any]) -> Counted:
    """Send the chats, some at once, and check the answers."""
    counted, free = Counted(), asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:

        async def one(asked: Asked) -> None:
            async with free:
                answer = await client.post("/v1/chat/completions", json=asked.body)
            check(asked, answer, counted)
            done()

        await asyncio.gather(*map(one, chats))
    return counted


def check(asked: Asked, answer: httpx.Response, counted: Counted) -> None:
    """Count what an answer is. Of what was cut off, the calls before the last one must be valid."""
    if answer.status_code != 200:
        counted.problems.append(f"{answer.status_code}: {answer.text[:300]}")
        return
    choice = answer.json()["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] == "length":
        counted.cut_off += 1
        calls = calls[:-1]
    elif asked.body["tool_choice"] != "auto" and not calls:
        counted.problems.append(f"no call: {json.dumps(choice)[:300]}")
    found = []
    for call in calls:
        name, text = call["function"]["name"], call["function"]["arguments"]
        counted.calls += 1
        try:
            if isinstance(wanted := asked.body["tool_choice"], dict) and name != wanted["function"]["name"]:
                raise ValueError("another tool was to be called")
            jsonschema.validate(
                given := json.loads(text), asked.schemas[name], format_checker=FORMATS
            )
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            counted.problems.append(f"{name}: {text[:200]}: {str(error)[:100]}")
        else:
            found.append((name, given))
    counted.right += found == asked.right


def markdown(results: Results) -> str:
    """A row for each model, tools, choice and temperature."""
    return f"{caption(results)}:\n\n{table(results['runs'], NAMES, COLUMNS)}"


if __name__ == "__main__":
    main()

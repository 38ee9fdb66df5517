"""Whether calls of tools are valid, and those of the demo model right: python benchmarks/tool_calls.py [--out FILE]

Each chat goes over HTTP to a server, and the arguments of every call are checked with the jsonschema package against
the schema of the tool that it names. `its own`: questions that take the demo model's two tools, as
scripts/demo_tools.py puts them, half of them in words that it was never trained on; right are those whose calls have
the right names and arguments. `others`: tools that no model here knows, whose schemas have what schemas have, with
questions that have nothing to do with them; each chat takes one call. The model of random weights tells whether the
grammar alone makes calls valid. Fails if one is not.
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
from collections.abc import Callable
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
MAX_TOKENS = 1200
FORMATS = jsonschema.FormatChecker()
ROWS = {
    "demo": (("its own", "auto"), ("its own", "required"), ("others", "required")),
    "random weights": (("others", "required"),),
}
# In the order of what is asked first, as each is saved at once.
RUNS = (("demo", 0.0), ("random weights", 1.0), ("demo", 1.0), ("random weights", 0.0))
NAMES = (
    Column("model", "model", "{}"),
    Column("temperature", "temperature", "{:g}"),
    Column("tools", "tools", "{}"),
    Column("choice", "`tool_choice`", "{}"),
)
COLUMNS = (
    Column("chats", "chats"),
    Column("calls", "calls"),
    Column("not_valid", "not valid"),
    Column("cut_off", "cut off"),
    Column("right", "right", "{:.1%}"),
)

_TEXT = {"type": "string", "maxLength": 12}
_NUMBER = {"type": "integer", "minimum": -180, "maximum": 180}
_POINT = {
    "type": "object",
    "properties": {"x": _NUMBER, "y": {"anyOf": [_NUMBER, {"type": "null"}]}},
    "required": ["x"],
}
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
        "properties": {"key": {"anyOf": [_NUMBER, {"type": "null"}, {"const": "all"}]}},
        "required": ["key"],
    },
    "code": {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, '"odd" näme': {"type": "null"}},
        "required": ["id"],
    },
}
OWN: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 60}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
    },
    "calculate": {
        "type": "object",
        "properties": {"expression": {"type": "string", "maxLength": 60}},
        "required": ["expression"],
    },
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
    parser.add_argument("--chats", type=int, default=1000, help="in each row (default: 1000)")
    args = parser.parse_args()
    recording = Recording(start("tool_calls", vars(args)), args.out)
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": demo_path(), "random weights": randomized(Path(folder) / "random")}
        for model, temperature in RUNS:
            measure(model, models[model], temperature, args.chats, recording)
    print(markdown(recording.results))
    sys.exit(any(run["not_valid"] for run in recording.results["runs"]))


def measure(name: str, path: Path, temperature: float, num_chats: int, recording: Recording) -> None:
    """The rows of a model at a temperature, each saved as soon as it is there."""
    port = free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", str(path), "--served-model-name", "demo"]
    with running([*command, "--port", str(port), "--data-dir", ""], port, "/health/ready", {}):
        for tools, choice in ROWS[name]:
            chats = make_chats(tools, choice, temperature, num_chats)
            about = {"model": name, "temperature": temperature, "tools": tools, "choice": choice, "chats": num_chats}
            with tqdm(total=num_chats, desc=f"{name}, {tools}", unit="chat", dynamic_ncols=True, disable=None) as bar:
                counted = asyncio.run(count(port, chats, bar.update))
            run = about | {"calls": counted.calls, "not_valid": len(counted.problems), "cut_off": counted.cut_off}
            if tools == "its own":
                run["right"] = counted.right / num_chats
            recording.add(run | {"problems": counted.problems})


def randomized(folder: Path) -> Path:
    """The demo model with weights that mean nothing."""
    shutil.copytree(demo_path(), folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    drawn = {name: torch.randn_like(weight) * 0.1 if weight.ndim > 1 else weight for name, weight in weights.items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_chats(tools: str, choice: str, temperature: float, num_chats: int) -> list[Asked]:
    """The chats of one row; the same in every run."""
    rng = random.Random(0)
    make = _own if tools == "its own" else _other
    return [make(rng, {"tool_choice": choice, "temperature": temperature}) for _ in range(num_chats)]


def _own(rng: random.Random, fields: dict[str, Any]) -> Asked:
    """A question that takes one of the demo model's tools, half of them put as it was never trained on."""
    right: list[tuple[str, dict[str, Any]]] = []
    while not right:
        turn = demo_tools.turns(rng, demo_tools.TOOLS, held_out=rng.random() < 0.5)[0]
        right = [(name, dict(given)) for name, given in turn.calls]
    return Asked(_body(rng, turn.ask, OWN) | fields, OWN, right)


def _other(rng: random.Random, fields: dict[str, Any]) -> Asked:
    """A question that has nothing to do with the tools."""
    schemas = {name: OTHERS[name] for name in rng.sample(sorted(OTHERS), rng.randint(1, 4))}
    question = rng.choice(["What is batching?", "Hello!", "Tell me a story.", "What is 7 + 5?"])
    return Asked(_body(rng, question, schemas) | fields | {"parallel_tool_calls": False}, schemas)


def _body(rng: random.Random, question: str, schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": {"name": each, "parameters": schemas[each]}} for each in schemas],
        "max_tokens": MAX_TOKENS,
        "seed": rng.randrange(2**31),
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
    elif asked.body["tool_choice"] == "required" and not calls:
        counted.problems.append(f"no call: {json.dumps(choice)[:300]}")
    counted.calls += len(calls)
    found = []
    for call in calls:
        name, text = call["function"]["name"], call["function"]["arguments"]
        try:
            jsonschema.validate(given := json.loads(text), asked.schemas[name], format_checker=FORMATS)
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            counted.problems.append(f"{name}: {text[:200]}: {str(error)[:100]}")
        else:
            found.append((name, given))
    counted.right += found == asked.right


def markdown(results: Results) -> str:
    """A row for each model, temperature, tools and choice."""
    return f"{caption(results)}:\n\n{table(results['runs'], NAMES, COLUMNS)}"


if __name__ == "__main__":
    main()

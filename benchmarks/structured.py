"""What it costs that answers follow a grammar: python benchmarks/structured.py MODEL [MODEL ...] --out FILE.json

Each workload runs with grammars and without, each sequence as long as it was with its grammar. So the ratio of the two
rates holds for the same lengths, and what the grammar forces counts as output. Lengths are found beforehand, by a run
that is not timed: seeds give the same text again. Then two engines with the same model take turns of some steps each,
as the speed of many a machine changes from one second to the next. `64 mixed` are 64 sequences of 8 schemas; `forced`
has a schema whose keys are a good part of what is written. The share of forced tokens is what the engine gave beyond
one token a step.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import workloads
from msgspec.structs import replace
from tqdm import tqdm

from chairlift import LLM, SamplingParams, StructuredOutputsParams
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.core.sequences.request import fan_out
from chairlift.text.structured import grammar_of

TEXT = {"type": "string", "maxLength": 60}
SHORT = {"type": "string", "pattern": "^[a-z]{3,8}$"}
COLUMNS = (
    Column("ruled_tok_s", "tok/s with grammars"),
    Column("free_tok_s", "without"),
    Column("ratio", "ratio", "{:.3f}"),
    Column("forced", "forced", "{:.0%}"),
    Column("tokens", "tokens"),
)


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# As tools and forms have them.
SCHEMAS = [
    an_object(title=TEXT, body={"type": "string", "maxLength": 200}),
    an_object(items={"type": "array", "items": TEXT, "minItems": 3, "maxItems": 8}),
    an_object(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}, note=TEXT),
    an_object(
        query=TEXT, limit={"type": "integer"}, filters={"type": "array", "items": an_object(key=TEXT, value=TEXT)}
    ),
    an_object(summary={"type": "string", "maxLength": 300}, sentiment={"enum": ["good", "bad", "neither"]}),
    an_object(steps={"type": "array", "items": an_object(about=TEXT, done={"type": "boolean"}), "minItems": 2}),
    an_object(answer={"anyOf": [TEXT, {"type": "number"}, {"type": "null"}]}, why={"type": "string", "maxLength": 250}),
    an_object(place=TEXT, when={"type": "string", "format": "date-time"}, who={"type": "array", "items": TEXT}),
]
# Long enough that keys and brackets are about 30% of what is written.
LONG = {"type": "string", "pattern": "^[a-z]{30,60}$"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
ROW = an_object(name=LONG, kind=LONG, owner=LONG, state={"enum": ["open", "closed"]}, count=COUNT)
FORCED = an_object(rows={"type": "array", "items": ROW, "minItems": 8})
LONGER = an_object(
    customer_display_name=SHORT,
    preferred_contact_method={"enum": ["mail", "phone"]},
    number_of_open_orders=COUNT,
    shipping_address_country=SHORT,
)
MORE_FORCED = an_object(customers={"type": "array", "items": LONGER, "minItems": 8})


class Workload(NamedTuple):
    """Prompts of 64 tokens, as many as `num`, whose answers follow the schemas in turn."""

    name: str
    num: int
    schemas: list[dict[str, Any]]


WORKLOADS = (
    Workload("64 mixed", 64, SCHEMAS),
    Workload("single", 1, SCHEMAS),
    Workload("single, forced", 1, [FORCED]),
    Workload("64, forced", 64, [FORCED]),
    Workload("single, more forced", 1, [MORE_FORCED]),
    Workload("64, more forced", 64, [MORE_FORCED]),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turn", type=int, default=1, metavar="STEPS", help="of one engine, then of the other")
    parser.add_argument("--only", nargs="*", help="workloads (default: all)")
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    args = parser.parse_args()
    record = Recording(start("structured", vars(args)), args.out)
    for model in args.models:
        engines = [LLM(model, kv_cache_gb=1.0) for _ in range(2)]
        chosen = [each for each in WORKLOADS if not args.only or each.name in args.only]
        total = len(chosen) * len(args.temperature) * args.rounds
        with tqdm(total=total, desc=Path(model).name, dynamic_ncols=True) as bar:
            for number in range(args.rounds + 1):
                for workload in chosen:
                    for temperature in args.temperature:
                        run = measure(engines, workload, temperature, args.max_tokens, number, args.turn)
                        if number:  # the round before the first warms up
                            about = {"model": Path(model).name, "workload": workload.name, "temperature": temperature}
                            record.add({**about, "round": number, **run})
                            bar.update()
        for llm in engines:
            llm.close()
    print(markdown(record.results))


def markdown(results: Results) -> str:
    names = [Column(key, key, "{:g}") for key in ("model", "workload", "temperature")]
    return f"{caption(results)}\n\n{table(results['runs'], names, COLUMNS)}"


def measure(
    engines: list[LLM], workload: Workload, temperature: float, max_tokens: int, number: int, turn: int
) -> dict[str, Any]:
    """Run a workload with grammars by one engine and without by another, often enough to last a while.

    They change places each time: where its memory lies makes an engine up to 0.6% faster than another that is the same.
    """
    rng = random.Random(number)
    repeats = 2 if workload.num > 1 else 8
    ruled_seconds = free_seconds = 0.0
    tokens = forced = 0
    vocab_size = engines[0].tokenizer.vocab_size
    for repeat in range(repeats):
        prompts = [workloads.random_ids(rng, 64, vocab_size) for _ in range(workload.num)]
        schemas = [workload.schemas[(index + repeat) % len(workload.schemas)] for index in range(workload.num)]
        grammars = [grammar_of(StructuredOutputsParams(json=schema)) for schema in schemas]
        params = [
            SamplingParams(temperature=temperature, seed=rng.randrange(2**32), max_tokens=max_tokens, ignore_eos=True)
            for _ in prompts
        ]
        with_grammars, without = engines[repeat % 2], engines[1 - repeat % 2]
        rehearsal = Run(with_grammars, prompts, params, grammars)
        while rehearsal.go_on(turn):
            pass
        lengths = rehearsal.lengths
        cut = [replace(each, max_tokens=length) for each, length in zip(params, lengths, strict=True)]
        ruled, free = Run(with_grammars, prompts, params, grammars), Run(without, prompts, cut, [None] * len(prompts))
        while ruled.go_on(turn) | free.go_on(turn):
            pass
        assert ruled.lengths == lengths == free.lengths
        ruled_seconds, free_seconds = ruled_seconds + ruled.seconds, free_seconds + free.seconds
        forced, tokens = forced + ruled.forced, tokens + sum(lengths)
    rates = tokens / ruled_seconds, tokens / free_seconds
    return {
        "ruled_tok_s": rates[0],
        "free_tok_s": rates[1],
        "ratio": rates[0] / rates[1],
        "forced": forced / tokens,
        "tokens": tokens,
    }


class Run:
    """Sequences of an engine, the seconds that their steps took, and the tokens that came beside the one of a step."""

    def __init__(
        self, llm: LLM, prompts: list[list[int]], params: list[SamplingParams], grammars: list[str | None]
    ) -> None:
        self.engine = llm.engine
        # Held, so that none is forgotten before its sequence begins.
        self.held = [self.engine.runner.grammars.compile(each) for each in grammars if each is not None]
        self.seconds = 0.0
        self.forced = 0
        self._tokens = {}
        for index, (prompt, each, grammar) in enumerate(zip(prompts, params, grammars, strict=True)):
            about = {"model": self.engine.info, "eos_ids": (), "arrival": 0.0, "use_prefix_cache": False}
            for request in fan_out(f"{index}", prompt, each, grammar=grammar, **about):
                self._tokens[request.id] = 0
                self.engine.add(request)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence so far."""
        return list(self._tokens.values())

    def go_on(self, steps: int) -> bool:
        """Compute so many steps; return whether there are more."""
        began = time.perf_counter()
        for _ in range(steps):
            if not self.engine.num_unfinished:
                break
            output = self.engine.step()
            assert output is not None
            for update in output.updates:
                self._tokens[update.id] += len(update.token_ids)
                self.forced += max(len(update.token_ids) - 1, 0)
                assert update.finish_reason not in ("error", "invalid"), update.detail
        self.seconds += time.perf_counter() - began
        return self.engine.num_unfinished > 0


if __name__ == "__main__":
    main()

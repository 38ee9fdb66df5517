"""Whether answers have the form that schemas ask for, on schemas that others have written.

    python benchmarks/schemas.py suite FOLDER                      JSON-Schema-Test-Suite's tests/draft2020-12
    python benchmarks/schemas.py write MODEL PATH ... [--limit N]  schemas from files and folders

`suite` walks through every instance token by token: a valid one must be accepted to its end, an invalid one must not.
Keys are put in the order in which the schema has them, as answers have them. `write` has a model write an answer for
each schema, greedily and at temperature 1, and validates with the jsonschema package those that were finished. Schemas
that are refused are counted by why.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
from tqdm import tqdm

from chairlift import LLM, SamplingParams, StructuredOutputsParams
from chairlift.demo import demo_path
from chairlift.errors import InvalidRequest
from chairlift.runners.grammars.grammar import GrammarError, GrammarTokenizer
from chairlift.text.structured import grammar_of

Schema = dict[str, Any]
# What a definition refers to.
REFERENCE = re.compile(r'"\$ref": "#/(?:definitions|\$defs)/([^"/]+)"')
# Schemas that are written to in one call.
AT_ONCE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(required=True)
    suite = ways.add_parser("suite")
    suite.add_argument("folder", type=Path)
    suite.set_defaults(go=lambda args: check_suite(args.folder))
    write = ways.add_parser("write")
    write.add_argument("model")
    write.add_argument("paths", nargs="+", type=Path)
    write.add_argument("--limit", type=int, default=500)
    write.add_argument("--max-tokens", type=int, default=600)
    write.set_defaults(go=lambda args: check_writing(args.model, args.paths, args.limit, args.max_tokens))
    args = parser.parse_args()
    sys.exit(args.go(args))


def check_suite(folder: Path) -> int:
    """Walk through the instances; the exit status says whether an invalid one was accepted."""
    vocab_size = json.loads((Path(demo_path()) / "config.json").read_text())["vocab_size"]
    words = GrammarTokenizer(Path(demo_path()), vocab_size)
    seen: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            about = f"{file.stem}: {group['description']}"
            try:
                grammar = compiled(words, group["schema"])
            except (InvalidRequest, GrammarError) as error:
                refused[re.sub(r"\d+", "N", str(error))] += 1
                seen["refused"] += len(group["tests"])
                continue
            for test in group["tests"]:
                kind = "valid" if test["valid"] else "invalid"
                took = accepts(words, grammar, in_order(test["data"], group["schema"]))
                seen[f"{kind}, {'accepted' if took else 'not accepted'}"] += 1
                if took != test["valid"]:
                    print(f"{kind}, {'accepted' if took else 'not accepted'}: {about}: {test['description']}")
    print(dict(seen))
    for why, count in refused.most_common():
        print(f"{count:5} schemas refused: {why}")
    return int(seen["invalid, accepted"] > 0)


def compiled(words: GrammarTokenizer, schema: Any) -> llguidance.LLMatcher:
    """A matcher, where the schema is let through as a client's would be. Raises InvalidRequest or GrammarError."""
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema must be an object")
    grammar = grammar_of(StructuredOutputsParams(json={k: v for k, v in schema.items() if k != "$schema"}))
    assert grammar is not None
    words.compile(grammar)
    return llguidance.LLMatcher(words.tokens, grammar, log_level=0)


def accepts(words: GrammarTokenizer, matcher: llguidance.LLMatcher, instance: Any) -> bool:
    """Whether a matcher takes an instance as compact JSON, token by token, and may end there."""
    tokens = words.tokens.tokenize_str(json.dumps(instance, separators=(",", ":"), ensure_ascii=False))
    walk = matcher.deep_copy()
    return all(walk.consume_token(token) for token in tokens) and walk.is_accepting()


def in_order(instance: Any, schema: Any) -> Any:
    """The instance with keys as its schema orders them: listed ones first, as far as the schema says so openly."""
    if not isinstance(schema, dict):
        return instance
    if isinstance(instance, list):
        return [in_order(each, schema.get("items")) for each in instance]
    if not isinstance(instance, dict):
        return instance
    listed = schema.get("properties") or {}
    keys = [key for key in listed if key in instance] + [key for key in instance if key not in listed]
    return {key: in_order(instance[key], listed.get(key)) for key in keys}


def check_writing(model: str, paths: list[Path], limit: int, max_tokens: int) -> int:
    """Have answers written; the exit status says whether a finished one was not valid."""
    llm = LLM(model, kv_cache_gb=0.5, max_num_seqs=2 * AT_ONCE)
    seen: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    found = iter(schemas_in(paths))
    with tqdm(total=limit, desc="schemas", dynamic_ncols=True) as bar:
        while bar.n < limit and (some := list(islice(taken(llm, found, refused), min(AT_ONCE, limit - bar.n)))):
            asked = [(name, schema, temperature) for name, schema in some for temperature in (0.0, 1.0)]
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=1,
                    max_tokens=max_tokens,
                    structured_outputs=StructuredOutputsParams(json=schema),
                )
                for _, schema, temperature in asked
            ]
            outputs = llm.generate([f"{name}: " for name, _, _ in asked], params, use_tqdm=False)
            for (name, schema, _), output in zip(asked, outputs, strict=True):
                sample = output.outputs[0]
                seen[str(sample.finish_reason)] += 1
                if sample.finish_reason == "stop" and (why := problem(sample.text, schema)):
                    seen["NOT VALID"] += 1
                    tqdm.write(f"{name}: {why}: {sample.text[:300]}")
                elif sample.finish_reason == "invalid":
                    tqdm.write(f"{name}: {sample.stop_reason}")
            bar.update(len(some))
        print(f"{bar.n} schemas taken, two answers each: {dict(seen)}")
    for why, count in refused.most_common(30):
        print(f"{count:5} schemas refused: {why}")
    return int(seen["NOT VALID"] > 0)


def taken(llm: LLM, found: Iterator[tuple[str, Schema]], refused: Counter[str]) -> Iterator[tuple[str, Schema]]:
    """Those schemas that are not refused; why others are is counted."""
    for name, schema in found:
        try:
            grammar = grammar_of(StructuredOutputsParams(json=schema))
            assert grammar is not None
            llm.engine.runner.grammars.compile(grammar)
            # Nobody could say whether its answers are valid, as of patterns that Python's `re` does not know.
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.SchemaError as error:
            refused[f"by the jsonschema package: {error.message[:60]}"] += 1
        except (InvalidRequest, GrammarError) as error:
            refused[re.sub(r'"[^"]*/[^"]*"|\d+', "*", str(error))[:110]] += 1
        else:
            yield name, schema


def problem(text: str, schema: Schema) -> str | None:
    """What is wrong with an answer, if anything is."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except jsonschema.ValidationError as error:
        return error.message[:200]
    except ValueError as error:
        return f"no JSON: {error}"
    return None


def schemas_in(paths: list[Path]) -> Iterator[tuple[str, Schema]]:
    """The schemas of files and of all files in folders, and those in their definitions; each once."""
    files = [file for path in paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    known = set()
    for file in files:
        try:
            whole = json.loads(file.read_text())
        except ValueError:
            continue
        if not isinstance(whole, dict):
            continue
        found = [(file.stem, whole)]
        for key in ("definitions", "$defs"):
            parts = whole.get(key) or {}
            found += [(name, closed(part, key, parts)) for name, part in parts.items() if isinstance(part, dict)]
        for name, schema in found:
            text = json.dumps(schema, sort_keys=True)
            if text not in known and len(schema) > 1:
                known.add(text)
                yield name, schema


def closed(part: Schema, key: str, parts: dict[str, Any]) -> Schema:
    """A definition with those that it refers to, however far."""
    needed: dict[str, Any] = {}
    names = REFERENCE.findall(json.dumps(part))
    while names:
        name = names.pop()
        if name in parts and name not in needed:
            needed[name] = parts[name]
            names += REFERENCE.findall(json.dumps(parts[name]))
    return {**part, key: needed} if needed else part


if __name__ == "__main__":
    main()

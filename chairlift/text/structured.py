"""What a client asks of an answer's form, as a grammar: JSON, a schema, a regular expression, choices, tags.

Grammars are texts of llguidance: Lark's syntax with `%json`, or a list of such and of JSON schemas. What its compiler
can't enforce it refuses by name, so nothing here leaves a keyword out. The limits here keep it from running out of
stack: what they allow, it compiles within its own limits.
"""

import re
from typing import Any

import msgspec

from chairlift.bodies import MAX_DEPTH, is_deep
from chairlift.core.sequences.sampling_params import StructuredOutputsParams
from chairlift.errors import InvalidRequest
from chairlift.text.schema_patterns import mended

# Bytes of a grammar. The schemas of whole APIs have as many, those of tools a hundredth.
MAX_GRAMMAR_BYTES = 2**18
# References in a schema, and rules of a grammar: each may be a level of recursion.
MAX_RULES = 1000
MAX_CHOICES = 1000
# Characters of GBNF, whose translation takes time by their square.
MAX_GBNF_CHARS = 2**14

# A rule's colon follows a name, a priority, attributes or parameters. Keys of schemas are quoted; what has no end is
# quoted up to the line's, so that one pass is enough.
_RULE = re.compile(r"[\w\]}-][ \t\r\f]*:")
_QUOTED = re.compile(r'"(?:[^"\\\n]++|\\.)*+"?')
# Where references point to, each of which is compiled once; they may be written with escapes.
_REFERENCE = re.compile(r'"\$ref"\s*:\s*("(?:[^"\\]++|\\.)*+")|(\\u00)')
# What would let white space go on for ever.
_ENDLESS = re.compile(r"(?<!\\)[*+]|\{\d+,\}")
_GBNF = "::="


def grammar_of(wanted: StructuredOutputsParams, field: str = "structured_outputs") -> str | None:
    """Return the grammar of what is wanted, None if nothing is. Raises InvalidRequest, naming the `field` at fault."""
    kinds = [name for name in _KINDS if getattr(wanted, name) not in (None, False)]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InvalidRequest(f"{field} takes one of {', '.join(_KINDS)}, got {' and '.join(kinds)}", field)
    kind = kinds[0]
    where = f"{field}.{kind}" if field == "structured_outputs" else field
    if wanted.whitespace_pattern is not None and kind not in ("json", "json_object"):
        raise InvalidRequest(f"{field}.whitespace_pattern goes with a JSON schema, not with {kind}", field)
    try:
        found = _KINDS[kind](wanted)
    except ValueError as error:
        raise InvalidRequest(f"{where} {error}", field) from None
    check_size(found, field)
    return found


def schema_grammar(schema: Any, field: str, whitespace_pattern: str | None = None) -> str:
    """Return the grammar of compact JSON of a schema. Raises InvalidRequest, naming the `field`."""
    found = grammar_of(StructuredOutputsParams(json=schema, whitespace_pattern=whitespace_pattern), field)
    assert found is not None
    return found


def check_size(grammar: str, field: str) -> None:
    """Refuse a grammar beyond the limits, naming the `field`. Raises InvalidRequest."""
    size = len(grammar.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{field} has {size} bytes as a grammar, more than {MAX_GRAMMAR_BYTES}", field)
    found = _REFERENCE.findall(grammar) if "$ref" in grammar or "\\u00" in grammar else []
    rules = len({target for target, _ in found}) + sum(bool(escape) for _, escape in found)
    if not grammar.startswith("{"):  # JSON has no rules
        rules += len(_RULE.findall(_QUOTED.sub('""', grammar)))
    if rules > MAX_RULES:
        raise InvalidRequest(f"{field} has {rules} rules and references, more than {MAX_RULES}", field)


def _json(wanted: StructuredOutputsParams) -> str:
    schema = wanted.json
    if isinstance(schema, str):
        raw = schema.encode("utf-8", "surrogatepass")
        if len(raw) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"has {len(raw)} bytes, more than {MAX_GRAMMAR_BYTES}")
        try:
            schema = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"must be a JSON schema, an object, got {type(schema).__name__}")
    if "x-guidance" in schema:
        raise ValueError("must not have the key 'x-guidance': it changes what is enforced")
    options: dict[str, Any] = {"whitespace_flexible": False}
    if wanted.whitespace_pattern is not None:
        if _ENDLESS.search(wanted.whitespace_pattern):
            raise ValueError("goes with a whitespace_pattern that is bounded: use {0,8}, not *, + or {1,}")
        options = {"whitespace_pattern": wanted.whitespace_pattern}
    try:
        raw = msgspec.json.encode({**schema, "x-guidance": options})
    except (RecursionError, UnicodeError, TypeError) as error:
        raise ValueError(f"is no plain JSON: {error}") from None
    if is_deep(raw):
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")
    if b'"pattern' in raw:
        raw = msgspec.json.encode({**mended(schema), "x-guidance": options})
    return f'{{"grammars":[{{"json_schema":{raw.decode()}}}]}}'


def _json_object(wanted: StructuredOutputsParams) -> str:
    return _json(msgspec.structs.replace(wanted, json={"type": "object"}))


def _regex(wanted: StructuredOutputsParams) -> str:
    assert wanted.regex is not None
    # All of the answer must match, so anchors say nothing.
    pattern = wanted.regex.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    if not pattern:
        raise ValueError("is empty")
    if "\n" in pattern:
        raise ValueError("must be one line: write \\n for a line's end")
    return f"start: /{_escaped_slashes(pattern)}/"


def _escaped_slashes(pattern: str) -> str:
    """A pattern as Lark has it between slashes."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", pattern, flags=re.DOTALL)


def _choice(wanted: StructuredOutputsParams) -> str:
    choices = wanted.choice or []
    if not choices or not all(choices):
        raise ValueError("must be a list of texts, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"takes at most {MAX_CHOICES} texts, got {len(choices)}")
    return "start: " + " | ".join(map(_quoted, choices))


def _quoted(text: str) -> str:
    """A text as Lark has it between quotes."""
    return msgspec.json.encode(text).decode()


def _grammar(wanted: StructuredOutputsParams) -> str:
    text = wanted.grammar or ""
    check_size(text, "structured_outputs.grammar")
    if not text.strip():
        raise ValueError("is empty")
    # The library takes JSON too, in which nothing here would be counted.
    if text.lstrip().startswith("{"):
        raise ValueError("must be in Lark's syntax or GBNF; a schema goes into json")
    if _GBNF not in text:
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"has {len(text)} characters, more than {MAX_GBNF_CHARS} for GBNF; write it in Lark's syntax")
    # Only here: whoever sends no such grammar need not load the library.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # whatever its hand-written parser trips over
        raise ValueError(f"is no GBNF: {error}") from None


def _structural_tag(wanted: StructuredOutputsParams) -> str:
    try:
        tags = msgspec.convert(_plain_tags(wanted.structural_tag), _StructuralTags)
    except msgspec.ValidationError as error:
        raise ValueError(f"is not understood: {error}") from None
    if not tags.structures or not all(tags.triggers):
        raise ValueError("needs structures, and triggers that are not empty")
    if (most := max(len(tags.structures), len(tags.triggers))) > MAX_CHOICES:
        raise ValueError(f"takes at most {MAX_CHOICES} structures and as many triggers, got {most}")
    lines, grammars = [], []
    for index, tag in enumerate(tags.structures):
        trigger = next((each for each in tags.triggers if tag.begin.startswith(each)), None)
        if trigger is None:
            raise ValueError(f"has no trigger for {tag.begin!r}: one of the triggers must be how it begins")
        body = _json(StructuredOutputsParams(json=tag.schema))
        grammars.append({"name": f"tag{index}", **msgspec.json.decode(body)["grammars"][0]})
        rest = [_quoted(text) if text else "" for text in (tag.begin[len(trigger) :], tag.end)]
        lines.append(f"head{index}[lazy]: TEXT {_quoted(trigger)}")
        lines.append(f"rule{index}: head{index} {rest[0]} @tag{index} {rest[1]}")
    rules = " | ".join(f"rule{index}" for index in range(len(tags.structures)))
    lark = "\n".join([f"start: ({rules})* end", "end: TEXT", r"TEXT: /(.|\n)*/", *lines])
    return msgspec.json.encode({"grammars": [{"name": "tags", "lark_grammar": lark}, *grammars]}).decode()


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTags(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _plain_tags(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


_KINDS = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}

"""Grammars of what clients ask for: what is refused, and that what is let through compiles without harm."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.sequences.sampling_params import StructuredOutputsParams
from chairlift.errors import InvalidRequest
from chairlift.text.structured import MAX_GRAMMAR_BYTES, MAX_RULES, grammar_of, schema_grammar


def chain(length: int) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"json": {}, "regex": "a"}, "takes one of .* got json and regex"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[1]"}, "must be a JSON schema, an object, got list"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"json": deep(70)}, "nested more than 64 levels"),
        ({"json": json.dumps(deep(70))}, "nested more than 64 levels"),
        ({"json": deep(5000)}, "nested more than 64 levels|plain JSON"),
        ({"json": chain(MAX_RULES + 1)}, "rules and references, more than"),
        ({"grammar": "\n".join(f"r{i}: r{i + 1}" for i in range(MAX_RULES + 1))}, "rules and references, more than"),
        ({"grammar": "\n".join(f"r-{i} : r-{i + 1}" for i in range(MAX_RULES + 1))}, "rules and references, more than"),
        ({"grammar": "\n".join(f'r{i} [lazy]: "a"' for i in range(MAX_RULES + 1))}, "rules and references, more than"),
        ({"grammar": ' {"grammars": [{"lark_grammar": "start: r"}]}'}, "must be in Lark's syntax or GBNF"),
        ({"grammar": 'start: %json {"\\u0024ref": "#"}' * (MAX_RULES + 1)}, "rules and references, more than"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "bytes as a grammar, more than"),
        ({"json": {"const": "a" * MAX_GRAMMAR_BYTES}}, "bytes as a grammar, more than"),
        ({"json": '"' + "a" * MAX_GRAMMAR_BYTES}, "bytes, more than"),
        ({"grammar": "root ::= " + "#" * 20_000}, "more than 16384 for GBNF"),
        ({"grammar": 'root ::= "a'}, "is no GBNF"),
        ({"grammar": "  "}, "is empty"),
        ({"regex": ""}, "is empty"),
        ({"regex": "a\nb"}, "must be one line"),
        ({"choice": []}, "none of them empty"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a"] * 1001}, "at most 1000"),
        ({"json": {}, "whitespace_pattern": " *"}, "that is bounded"),
        ({"json": {}, "whitespace_pattern": " {1,}"}, "that is bounded"),
        ({"regex": "a", "whitespace_pattern": " "}, "goes with a JSON schema"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "needs structures"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["["]}},
            "no trigger",
        ),
        ({"structural_tag": {"structures": [], "triggers": ["<a"] * 1001}}, "needs structures"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<a"] * 1001}},
            "takes at most 1000",
        ),
        ({"structural_tag": {"format": {"type": "tag"}}}, "is not understood"),
        ({"structural_tag": "{"}, "is not JSON"),
    ],
)
def test_refused_and_why(wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refusal:
        grammar_of(StructuredOutputsParams(**wanted))
    assert refusal.value.param is not None
    assert refusal.value.param.startswith("structured_outputs")


@pytest.mark.parametrize("filler", ["\n", " ", "\n ", "a\n", "?", "a.1", "a[", "[\n", '"', '\\"'])
def test_rules_are_counted_in_one_pass(filler: str) -> None:
    """One that looks at all that follows for each line would take minutes."""
    wanted = StructuredOutputsParams(grammar='start: "a"\n' + filler * ((MAX_GRAMMAR_BYTES - 20) // len(filler)))
    assert grammar_of(wanted) == wanted.grammar


def test_the_field_that_a_client_knows_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_choice must be") as refusal:
        grammar_of(StructuredOutputsParams(choice=[]), "guided_choice")
    assert refusal.value.param == "guided_choice"


def test_nothing_wanted_is_no_grammar() -> None:
    assert grammar_of(StructuredOutputsParams()) is None
    assert grammar_of(StructuredOutputsParams(json_object=False)) is None


def test_schemas_are_compact_unless_white_space_is_given() -> None:
    options = json.loads(schema_grammar({"type": "string"}, "f"))["grammars"][0]["json_schema"]["x-guidance"]
    assert options == {"whitespace_flexible": False}
    options = json.loads(schema_grammar({}, "f", " {0,3}"))["grammars"][0]["json_schema"]["x-guidance"]
    assert options == {"whitespace_pattern": " {0,3}"}


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.builds(lambda text: {"regex": text}, st.text(max_size=40)),
        st.builds(lambda text: {"grammar": text}, st.text(alphabet='start: "a|()[]*+?\n%json{}<>/\\d:=', max_size=60)),
        st.builds(lambda texts: {"choice": texts}, st.lists(st.text(max_size=9), max_size=4)),
        st.builds(
            lambda value: {"json": value},
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(
                            ["type", "items", "enum", "anyOf", "properties", "pattern", "$ref", "const", "not"]
                        ),
                        inner,
                        max_size=3,
                    )
                ),
                max_leaves=8,
            ).filter(lambda value: isinstance(value, dict)),
        ),
    )
)
def test_rubbish_is_refused_or_compiled(wanted: dict[str, Any]) -> None:
    from chairlift.demo import demo_path
    from chairlift.runners.grammars.grammar import GrammarError

    try:
        grammar = grammar_of(StructuredOutputsParams(**wanted))
        assert grammar is not None
        words(demo_path()).compile(grammar)
        said = "compiled"
    except (InvalidRequest, GrammarError) as error:
        said = str(error)
    assert 0 < len(said) < 1000


_WORDS: dict[str, Any] = {}


def words(folder: str) -> Any:
    from pathlib import Path

    from chairlift.runners.grammars.grammar import GrammarTokenizer

    if folder not in _WORDS:
        _WORDS[folder] = GrammarTokenizer(Path(folder), 4096)
    return _WORDS[folder]

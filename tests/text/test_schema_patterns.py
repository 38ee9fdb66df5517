"""Patterns of schemas are written so that what breaks them is not allowed."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift import StructuredOutputsParams
from chairlift.demo import demo_path
from chairlift.errors import InvalidRequest
from chairlift.runners.grammars.grammar import GrammarTokenizer
from chairlift.text.schema_patterns import mended, without_nul
from chairlift.text.structured import grammar_of

TEXTS = [
    "x",
    "xy",
    "",
    "x\\",
    "\\",
    'a"b',
    '"',
    "\n",
    "a\nb",
    "\t",
    "\x01",
    "\x1f",
    "a b",
    "]",
    "x]",
    "[",
    "é",
    "☃",
    "-",
    "^",
    ":",
]


@pytest.fixture(scope="module")
def words() -> GrammarTokenizer:
    return GrammarTokenizer(Path(demo_path()), 2048)


def allows(words: GrammarTokenizer, schema: dict[str, Any], text: str) -> bool:
    matcher = llguidance.LLMatcher(words.tokens, grammar_of(StructuredOutputsParams(json=schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = words.tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "pattern",
    [
        r"""^[^"]+$""",
        r"""^[^\\]*$""",
        r"""^[^\/~\^\: \[\]\\]+(\/[^\/~\^\: \[\]\\]+)*$""",
        r"""^[^]"]+$""",
        r"""^(?:[^"]|[\x00-\x1f])+$""",
        r"""^[\x00-!#-~]+$""",
        r"""^[\u0000-!#-\uffff]+$""",
        r"""[^"\\]""",
        r"""^[^\W"]+$""",
        r"""^.[^"]?$""",
        r"""^\[$""",
        r"""^[]^]+$""",
        r"""^[:^":]+$""",
        r"""^(x|[^"])\]?$""",
    ],
)
def test_texts_of_a_pattern_are_those_that_match_it(words: GrammarTokenizer, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    matching = [text for text in TEXTS if re.search(pattern, text)]
    # A class that is negated leaves out letters beyond ASCII here, where Python's does not.
    texts = [text for text in TEXTS if text.isascii() or "W" not in pattern]
    assert [text for text in texts if allows(words, schema, json.dumps(text, ensure_ascii=False))] == [
        text for text in matching if text in texts
    ]


def test_classes_of_unicode_hold_too(words: GrammarTokenizer) -> None:
    schema = {"type": "string", "pattern": r"^\P{P}+$"}
    assert allows(words, schema, '"x^☃"')
    assert not any(allows(words, schema, json.dumps(text)) for text in ('"', "\\", "x]", "-"))


def test_keys_of_a_pattern_are_those_that_match_it(words: GrammarTokenizer) -> None:
    schema = {"type": "object", "patternProperties": {'^[^"]+$': {"type": "integer"}}, "additionalProperties": False}
    assert allows(words, schema, '{"a":1}')
    assert not allows(words, schema, '{"a\\"b":1}')


def test_only_patterns_are_changed() -> None:
    schema = {
        "properties": {"pattern": {"pattern": '[^"]', "const": {"pattern": '[^"]'}}, "[^a]": True},
        "enum": [{"pattern": '[^"]'}],
        "default": {"pattern": '[^"]'},
        "items": [{"patternProperties": {'[^"]': {"pattern": "[^a]"}}}, False],
        "$defs": {"pattern": {"anyOf": [{"pattern": "[^b]"}]}},
    }
    assert mended(schema) == {
        "properties": {"pattern": {"pattern": r'[^\x00"]', "const": {"pattern": '[^"]'}}, "[^a]": True},
        "enum": [{"pattern": '[^"]'}],
        "default": {"pattern": '[^"]'},
        "items": [{"patternProperties": {r'[^\x00"]': {"pattern": r"[^\x00a]"}}}, False],
        "$defs": {"pattern": {"anyOf": [{"pattern": r"[^\x00b]"}]}},
    }


@pytest.mark.parametrize("pattern", ["\\x00", "a|\\u0000", "\\x{0}", "(\0)"])
def test_one_that_names_nul_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="with the character NUL"):
        grammar_of(StructuredOutputsParams(json={"properties": {"a": {"pattern": pattern}}}))


@pytest.mark.parametrize("schema", [{"pattern": "[^a]" * 5000}, {"items": [{"pattern": "a" * 6000}] * 3}])
def test_all_patterns_together_have_a_limit(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="patterns of more than 8192 characters"):
        grammar_of(StructuredOutputsParams(json=schema))


def test_keys_that_become_one_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="two patternProperties"):
        grammar_of(StructuredOutputsParams(json={"patternProperties": {'[^]"]': {}, r'[^\]"]': {"type": "null"}}}))


@given(st.text(alphabet='[]^\\":-&a\x01.', max_size=16))
@settings(max_examples=1000, deadline=None)
def test_nothing_is_lost_or_added_but_that_nul_is_left_out(pattern: str) -> None:
    bare = without_nul(pattern).replace(r"&&[^\x00]", "").replace(r"^\x00", "^")
    # The first bracket of a class that closes none has a backslash then.
    assert bare.replace("\\", "") == pattern.replace("\\", "")


PIECES = ['[^"]', r"[^\\]", "[^a]", "a", "[a-c]", r"[^\\\"]", ".", r"\w", r"[\x00-!#-~]", r"\"", r"\\"]


@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(["", "+", "?", "{1,2}"])), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_no_text_that_breaks_a_pattern_is_allowed(words: GrammarTokenizer, parts: list[tuple[str, str]]) -> None:
    schema = {"type": "string", "pattern": f"^{''.join(piece + often for piece, often in parts)}$"}
    validator = jsonschema.Draft202012Validator(schema)
    for text in ("a", '"', "\\", 'a"', "\\a", '""', "ab\\", 'a"\\', "abc"):
        assert allows(words, schema, json.dumps(text)) == validator.is_valid(text), (schema, text)

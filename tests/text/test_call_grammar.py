"""Grammars of replies: they take what readers understand, and whatever they allow is a valid call."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from support.dialect_samples import NAMES, SINGLE, TOOLS, dialect, samples, tokens

from chairlift.runners.grammars.grammar import GrammarError, GrammarTokenizer
from chairlift.runners.sequences import GRAMMAR_PART
from chairlift.text import argument_grammar, schemas
from chairlift.text.call_grammar import ReplyShape, reply_grammar
from chairlift.text.reply import CallPart, ContentPart, ReasoningPart
from chairlift.text.reply_reader import DialectMarkers, DialectReader

ANSWER = 'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
SCHEMA_ANSWER = '{"grammars": [{"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]}'


def grammar(name: str, **shape: Any) -> str:
    found = reply_grammar(dialect(name), tokens(name)[2], ReplyShape(**{"tools": TOOLS, **shape}))
    assert found is not None
    return found


def matcher(name: str, made: str) -> LLMatcher:
    found = LLMatcher(tokens(name)[1], made, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def takes(name: str, made: str, text: str) -> bool:
    """Whether a text is allowed, token by token as the tokenizer has it, and may end there."""
    follows = matcher(name, made)
    ids = tokens(name)[0].encode(text, add_special_tokens=False).ids
    return bool(follows.try_consume_tokens(ids) == len(ids) and follows.is_accepting())


def closing(begun: str) -> tuple[str, ...]:
    """Texts of tokens that go on with the end of a value, which takes too many tokens to be found by chance."""
    end = "</parameter>"
    rests = [end[at:] for at in range(2, len(end)) if begun.endswith(end[:at])]
    return tuple(rest[:size] for rest in rests for size in range(1, len(rest) + 1))


def walk(name: str, made: str, dice: random.Random, most: int = 400) -> str | None:
    """A text of tokens chosen at random from those allowed; None if it does not come to an end."""
    backend, _, _ = tokens(name)
    follows = matcher(name, made)
    ids: list[int] = []
    ends = {token_id for text, token_id in backend.get_vocab().items() if not text.strip('"}])<>/|') or "<" in text}
    while len(ids) < most:
        if follows.is_stopped():
            break
        mask = np.frombuffer(follows.compute_bitmask(), np.uint8)
        allowed = [token for token in np.unpackbits(mask, bitorder="little").nonzero()[0].tolist() if token > 2]
        if follows.is_accepting() and (not allowed or dice.random() < 0.2):
            break
        assert allowed, backend.decode(ids, skip_special_tokens=False)
        likely = [token for token in allowed if token in ends]
        next_ones = closing(backend.decode(ids[-12:], skip_special_tokens=False))
        close = [token for token in allowed if backend.id_to_token(token) in next_ones] if next_ones else []
        ids.append(dice.choice(close or (likely if likely and dice.random() < 0.5 else allowed)))
        assert follows.consume_token(ids[-1])
    text: str = backend.decode(ids, skip_special_tokens=False)
    return text if follows.is_accepting() else None


def read(
    name: str, text: str, reasoning: bool = False, tools: dict[str, Any] = TOOLS
) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = DialectReader(DialectMarkers(dialect(name), tools), reasoning)
    content, thought, calls = "", "", list[list[str]]()
    for part in reader.push(text) + reader.finish():
        match part:
            case ContentPart(more):
                content += more
            case ReasoningPart(more):
                thought += more
            case CallPart(_, called):
                calls.append([called, ""])
            case _:
                calls[-1][1] += part.text
    return content, thought, [(called, json.loads(arguments)) for called, arguments in calls]


def walks(name: str, count: int, **shape: Any) -> list[tuple[str, str, list[tuple[str, Any]]]]:
    """What readers make of random walks that come to an end; all calls are valid."""
    made, found = grammar(name, **shape), []
    for seed in range(count):
        text = walk(name, made, random.Random(seed))
        if text is not None:
            found.append(read(name, text, shape.get("reasoning") == "open"))
    for _, _, calls in found:
        for called, arguments in calls:
            jsonschema.validate(arguments, TOOLS[called])
    assert found, "no walk came to an end"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_what_the_template_writes(name: str) -> None:
    auto, must = grammar(name), grammar(name, must_call=True)
    for sample in samples(name, 15, seed=3):
        assert takes(name, auto, sample.text), sample.text
        spoken = bool(sample.message["content"])
        assert takes(name, must, sample.text) == (bool(sample.calls) and not spoken), sample.text


@pytest.mark.parametrize("name", NAMES)
def test_whatever_it_allows_is_a_valid_call(name: str) -> None:
    for content, _, calls in walks(name, 8, must_call=True):
        assert calls
        assert content == ""


@pytest.mark.parametrize("name", NAMES)
def test_one_call_at_most(name: str) -> None:
    assert all(len(calls) == 1 for _, _, calls in walks(name, 8, must_call=True, parallel=False))
    several = next((each for each in samples(name, 50) if len(each.calls) > 1 and not each.message["content"]), None)
    assert (several is None) == (name in SINGLE)
    if several is not None:
        assert takes(name, grammar(name, must_call=True), several.text)
        assert not takes(name, grammar(name, must_call=True, parallel=False), several.text)


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_that_is_named_is_the_one_that_is_called(name: str) -> None:
    for _, _, calls in walks(name, 4, must_call=True, parallel=False, tools={"now": TOOLS["now"]}):
        assert calls == [("now", {})]


@pytest.mark.parametrize("name", NAMES)
def test_once_a_call_begins_it_must_be_one(name: str) -> None:
    auto = grammar(name)
    sample = next(each for each in samples(name, 50) if len(each.calls) == 1 and not each.message["content"])
    called = sample.calls[0][0]
    assert takes(name, auto, sample.text)
    assert not takes(name, auto, sample.text.replace(called, "other"))
    assert takes(name, grammar(name, tools={"other": TOOLS[called]}), sample.text.replace(called, "other"))


@pytest.mark.parametrize("answer", [ANSWER, SCHEMA_ANSWER])
@pytest.mark.parametrize("name", ["hermes", "llama", "pythonic", "harmony", "mistral"])
def test_an_answer_has_its_form_behind_the_reasoning_and_beside_calls(name: str, answer: str) -> None:
    made = grammar(name, answer=answer)
    before, opened = {"hermes": ("<think>hm</think>\n\n", ""), "harmony": ("", "<|channel|>final<|message|>")}.get(
        name, ("", "")
    )
    assert takes(name, made, f'{before}{opened}{{"a": 1}}') or takes(name, made, f'{before}{opened}{{"a":1}}')
    assert not takes(name, made, f"{before}{opened}hello")
    call = next(each for each in samples(name, 50) if each.calls and not each.message["content"]).text
    # What only stands at the start could not be told from the answer; the same behind a token can.
    call = {"llama": f"<|python_tag|>{call}", "pythonic": f"<|python_start|>{call}<|python_end|>"}.get(name, call)
    assert takes(name, made, call)


@pytest.mark.parametrize("opened", ['{"type": "function", "name": "', '{ "name": "', '{"name": "'])
def test_llama_s_calls_are_bound_in_every_shape(opened: str) -> None:
    auto, must = grammar("llama"), grammar("llama", must_call=True)
    call = f'{opened}get_weather", "parameters": {{"city": "Paris"}}}}'
    spaced = opened.startswith("{ ")
    assert takes("llama", auto, call)
    assert takes("llama", auto, f"<|python_tag|>{call}") != spaced
    assert takes("llama", must, call) != spaced
    for made in (auto, must):
        for wrong in (call.replace("get_weather", "other"), call.replace("city", "town"), call[:-1]):
            assert not takes("llama", made, wrong)


def test_calls_of_one_notation_share_what_is_made_of_their_arguments() -> None:
    assert grammar("llama").count("%json") == len(TOOLS)


def test_what_is_only_read_is_free_text() -> None:
    call = "<function=now>\n</function>"
    auto, must = grammar("qwen_xml"), grammar("qwen_xml", must_call=True)
    for text in (call, f"{call}\n</tool_call>", f"So:\n{call}\n</tool_call>\n{call}", "<function=other>"):
        assert takes("qwen_xml", auto, text)
        assert not takes("qwen_xml", must, text)
    assert takes("qwen_xml", auto, f"{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>")
    assert not takes("qwen_xml", auto, "<tool_call>\n<function=other>\n</function>\n</tool_call>")
    assert takes("granite", grammar("granite"), '<tool_call>[{"name": "now", "arguments": {}}]')


def test_an_answer_may_stand_between_markers_or_alone() -> None:
    call = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'
    free, formed = grammar("command"), grammar("command", answer=ANSWER, tools={}, reasoning="closed")
    for before, after in (("", ""), ("<|START_RESPONSE|>", ""), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")):
        assert takes("command", free, f"{before}Paris{after}")
        assert takes("command", free, f"{before}I will look{after}{call}")
        assert takes("command", formed, f'{before}{{"a":1}}{after}')
        assert not takes("command", formed, f"{before}Paris{after}")
    going_on = grammar("command", reasoning="closed", continues=True)
    assert takes("command", going_on, " and more<|END_RESPONSE|>")
    assert not takes("command", going_on, "<|START_RESPONSE|>again")


def test_a_form_of_the_answer_needs_a_token_before_calls() -> None:
    with pytest.raises(ValueError, match="leave one out"):
        reply_grammar(dialect("pythonic"), {}, ReplyShape(tools=TOOLS, answer=ANSWER))


def test_without_tools_or_bounds_nothing_is_constrained() -> None:
    assert reply_grammar(dialect("hermes"), {}, ReplyShape()) is None
    assert reply_grammar(dialect("hermes"), {}, ReplyShape(answer=ANSWER, reasoning="closed")) == ANSWER
    assert reply_grammar(dialect("llama"), {}, ReplyShape(answer=ANSWER)) == ANSWER


@pytest.mark.parametrize("name", ["hermes", "deepseek", "mistral_args", "gemma", "harmony", "command"])
@pytest.mark.parametrize("budget", [0, 3])
def test_the_reasoning_has_its_budget(name: str, budget: int) -> None:
    backend = tokens(name)[0]
    opened = grammar(name, must_call=True, reasoning="open", thinking_tokens=budget)
    for seed in range(4):
        text = walk(name, opened, random.Random(seed))
        if text is not None:
            region = dialect(name).reasoning_content
            assert region is not None
            thought, _, rest = text.partition(region.close[0])
            assert len(backend.encode(thought, add_special_tokens=False).ids) <= 2 * budget
            assert read(name, rest)[2]
    long = next(each for each in samples(name, 50) if each.calls and each.message.get("reasoning_content"))
    free = grammar(name)
    assert takes(name, free, long.text)
    assert not takes(name, grammar(name, thinking_tokens=0), long.text)


def test_a_budget_needs_a_token_that_ends_the_reasoning() -> None:
    with pytest.raises(ValueError, match="</think>"):
        reply_grammar(dialect("hermes"), {}, ReplyShape(thinking_tokens=3))


@pytest.mark.parametrize("name", NAMES)
def test_markers_may_be_no_tokens(name: str) -> None:
    """A tokenizer without a family's tokens spells its markers."""
    backend, ll, _ = tokens("llama")
    auto = reply_grammar(dialect(name), {}, ReplyShape(tools=TOOLS))
    assert auto is not None
    for sample in samples(name, 12, seed=4):
        follows = LLMatcher(ll, auto, log_level=0)
        ids = backend.encode(sample.text, add_special_tokens=False).ids
        assert follows.try_consume_tokens(ids) == len(ids), (sample.text, follows.get_error()[:300])
        assert follows.is_accepting(), sample.text


def test_calls_are_bound_where_no_marker_is_a_token() -> None:
    backend, ll, _ = tokens("llama")
    auto = reply_grammar(dialect("pythonic"), {}, ReplyShape(tools=TOOLS))
    assert auto is not None
    ids = backend.encode("[get_weather(nonsense", add_special_tokens=False).ids
    assert LLMatcher(ll, auto, log_level=0).try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize("name", ["pythonic", "glm", "qwen_xml", "gemma"])
def test_what_a_notation_can_not_keep_to_is_refused_by_name(name: str) -> None:
    def refusal(schema: dict[str, Any]) -> str:
        with pytest.raises(ValueError, match="parameters of f") as caught:
            grammar(name, tools={"f": schema}, strict=frozenset({"f"}))
        return str(caught.value)

    text = {"type": "string"}
    assert "'minProperties'" in refusal({"type": "object", "properties": {"a": text}, "minProperties": 1})
    assert "'b'" in refusal({"type": "object", "properties": {"a": text}, "required": ["b"]})
    assert "'a b'" in refusal({"type": "object", "properties": {"a b": text}})
    if name != "pythonic":
        assert "'pattern'" in refusal({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}})
    if name == "gemma":
        assert "leads nowhere" in refusal({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}})


# What descriptions of APIs say of arguments, and a notation can't keep to.
LOOSE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "format": "uri", "example": "x", "nullable": True},
        "key": {"type": "string", "pattern": "^(?!admin)[a-z]+$"},
        "size": {"type": "integer", "format": "int64", "not": {"const": 0}},
        "tags": {"type": "array", "items": {"type": "string", "format": "binary"}, "uniqueItems": False},
        "either": {"oneOf": [{"type": "integer", "maximum": 9}, {"type": "integer", "minimum": 5}]},
        "map": {"type": "object", "propertyNames": {"minLength": 2}},
        "named": {"type": "object", "patternProperties": {"^(?=a)": {}}, "additionalProperties": False},
        "gone": {"$ref": "#/$defs/nowhere"},
    },
    "required": ["url"],
}


_UNIQUE = {"type": "array", "uniqueItems": True}


def why_refused(name: str, tools: dict[str, Any]) -> str:
    """Why no grammar of tools is made that are strict, or why it does not compile."""
    try:
        made = grammar(name, tools=tools, must_call=True, strict=frozenset(tools))
    except ValueError as error:
        return str(error)
    return LLMatcher(tokens(name)[1], made, log_level=0).get_error()


@pytest.mark.parametrize(
    ("name", "answer"), [("hermes", None), ("hermes", ANSWER), ("qwen_xml", None), ("pythonic", None)]
)
def test_what_does_not_compile_is_told_of_the_tool_that_has_it(name: str, answer: str | None, tmp_path: Path) -> None:
    backend, more, _ = tokens(name)
    backend.save(str(tmp_path / "tokenizer.json"))
    words = GrammarTokenizer(tmp_path, more.vocab_size)
    wrong, right = ({"type": "object", "properties": {"a": each}, "required": ["a"]} for each in (_UNIQUE, {}))
    for tools in ({"f.x": wrong}, {"g": right, "f.x": wrong, "h": right}):
        made = grammar(name, tools=tools, strict=frozenset(tools), answer=answer)
        with pytest.raises(GrammarError, match=r"^tool f\.x: at \d+\(\d+\): .*uniqueItems"):
            words.compile(made)
    # Where nobody insists, nothing says whose a rule is; nor is a tool told of for a wrong form of the answer.
    assert GRAMMAR_PART not in grammar(name, tools={"g": right}, answer=answer)
    if answer is not None:
        lines = "\n" * 8
        made = grammar(name, tools={"g": right}, strict=frozenset({"g"}), answer=f"start: x{lines}x: /(?=a)/")
        with pytest.raises(GrammarError, match=r"^at 9\("):
            words.compile(made)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("more", [{}, {"if": {"required": ["key"]}, "then": {"required": ["size"]}}])
def test_what_can_not_be_kept_to_is_left_out_unless_it_is_strict(name: str, more: dict[str, Any]) -> None:
    tools = {"f": LOOSE | more}
    matcher(name, grammar(name, tools=tools, must_call=True))
    assert why_refused(name, tools)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"url": "https://a.b", "key": "admin", "size": 0, "tags": ["a", "a"], "either": 7}, True),
        ({"url": "https://a.b", "map": {"a": 1}, "named": {"a": 1}, "gone": [1]}, True),
        ({"key": "a"}, False),
        ({"url": 3}, False),
        ({"url": "https://a.b", "size": "large"}, False),
        ({"url": "https://a.b", "either": "7"}, False),
        ({"url": "https://a.b", "other": 1}, False),
    ],
)
def test_what_can_be_kept_to_is(arguments: dict[str, Any], allowed: bool) -> None:
    call = json.dumps({"name": "f", "arguments": arguments})
    made = grammar("hermes", tools={"f": LOOSE}, must_call=True)
    assert takes("hermes", made, f"<tool_call>\n{call}\n</tool_call>") == allowed


PARTS = {
    "type": "object",
    "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "integer"}}}],
    "oneOf": [{"properties": {"kind": {"const": kind}}} for kind in ("x", "y")],
    "$defs": {"base": {"properties": {"a": {"type": "string"}, "a b": {}}, "required": ["a", "a b"]}},
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("pythonic", '[f(a="12", b=3, kind="y")]'),
        ("gemma", '<|tool_call>call:f{a:<|"|>12<|"|>,b:3,kind:<|"|>y<|"|>}<tool_call|>'),
        (
            "qwen_xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
            "<parameter=kind>\ny\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_properties_of_joined_schemas_are_those_of_one(name: str, call: str) -> None:
    made = grammar(name, tools={"f": PARTS}, must_call=True)
    assert takes(name, made, call)
    assert not takes(name, made, call.replace("y", "z"))
    assert not takes(name, made, call.replace("3", "three"))
    assert read(name, call, tools={"f": PARTS})[2] == [("f", {"a": "12", "b": 3, "kind": "y"})]


@pytest.mark.parametrize("name", NAMES)
def test_names_may_be_long_and_have_dots(name: str) -> None:
    called = f"mcp__files.read-{'x' * 112}"
    sample = next(each for each in samples(name, 200) if each.calls == [("now", {})] and not each.message["content"])
    text, tools = sample.text.replace("now", called), {called: TOOLS["now"]}
    assert takes(name, grammar(name, tools=tools), text)
    assert read(name, text, tools=tools)[2] == [(called, {})]


OPEN = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"enum": [1]}}}},
    "required": ["a"],
}


def test_arguments_in_json_have_the_properties_that_are_listed() -> None:
    def takes_call(schema: Any, arguments: Any) -> bool:
        made = grammar("hermes", tools={"f": schema}, must_call=True, parallel=False, reasoning="closed")
        call = json.dumps({"name": "f", "arguments": arguments})
        return takes("hermes", made, f"<tool_call>\n{call}\n</tool_call>")

    assert takes_call(OPEN, {"a": {"b": 1}})
    assert not takes_call(OPEN, {"a": {"b": 1}, "c": 1})
    assert not takes_call(OPEN, {"a": {"b": 1, "c": 1}})
    for spoken_of in ({"additionalProperties": True}, {"patternProperties": {"^c": {}}}, {"required": ["a", "c"]}):
        assert takes_call(OPEN | spoken_of, {"a": {"b": 1}, "c": 1})
    # Each part would bar what the other asks for.
    parts = [OPEN, {"type": "object", "properties": {"c": {"enum": [1]}}, "required": ["c"]}]
    assert takes_call({"type": "object", "allOf": parts}, {"a": {"b": 1}, "c": 1})
    either = {"anyOf": [{"properties": {"c": {"enum": [1]}}, "required": ["c"]}, {"required": ["a"]}]}
    assert takes_call(OPEN | either, {"a": {"b": 1}, "c": 1})
    assert not takes_call({"type": "object", "anyOf": parts}, {"c": 1, "d": 1})
    named = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/x", "required": ["c"]}},
        "$defs": {"x": OPEN["properties"]["a"]},
    }
    assert takes_call(named, {"x": {"c": 1}})


@pytest.mark.parametrize("name", ["pythonic", "glm", "qwen_xml", "gemma"])
def test_references_alternatives_and_lengths(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/tree"},
            "short": {"type": "string", "minLength": 2, "maxLength": 3},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["tree", "short", "either"],
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"leaves": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
                "additionalProperties": False,
            }
        },
    }
    made = grammar(name, tools={"f": schema}, must_call=True, parallel=False, reasoning="closed")
    done = 0
    for seed in range(8):
        text = walk(name, made, random.Random(seed))
        if text is not None:
            reader = DialectReader(DialectMarkers(dialect(name), {"f": schema}), False)
            parts = reader.push(text) + reader.finish()
            assert isinstance(parts[0], CallPart), text
            jsonschema.validate(json.loads(parts[1].text), schema)
            done += 1
    assert done


def _alternatives() -> dict[str, Any]:
    many = [{"$ref": "#/$defs/a"}] * 50
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": many}}}


@pytest.mark.parametrize("name", ["pythonic", "glm", "gemma"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"]},
        {"properties": {"a": {}}, "required": [["a"]]},
        {"properties": {"a": {}}, "required": 3},
        {"properties": {"a": {"type": "array", "minItems": []}}},
        {"properties": {"a": {"type": "string", "minLength": {}}}},
        {"properties": {"a": {"type": 3, "anyOf": [3, None], "enum": []}}},
        {"properties": {"a": {"$ref": 3}, "b": {"type": {}}}},
        {"properties": {"a": {"$ref": "#/a/b"}}, "a": 3},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        _alternatives(),
    ],
)
def test_hostile_schemas_are_refused_or_taken_and_nothing_else(name: str, schema: dict[str, Any]) -> None:
    for strict in (frozenset[str](), frozenset({"f"})):
        with contextlib.suppress(ValueError):
            assert grammar(name, tools={"f": {"type": "object", **schema}}, strict=strict)


REFERRED = {
    "$defs": {"word": {"enum": ["yes", "no"]}},
    "properties": {"a": {"$ref": "#/$defs/word"}, "b": {"type": "integer"}},
}


def tool(parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"find": parameters | {"type": "object", "required": list(parameters["properties"])}}


def test_definitions_go_with_what_refers_to_them() -> None:
    made = grammar("pythonic", tools=tool(REFERRED))
    assert '"b=" %json {"type": "integer", "x-guidance": ' in made
    assert takes("pythonic", made, '[find(a="yes", b=3)]')
    assert not takes("pythonic", made, '[find(a="maybe", b=3)]')


@pytest.mark.parametrize("name", ["pythonic", "qwen_xml"])
def test_definitions_that_nothing_refers_to_stay_behind(name: str) -> None:
    """Those of an API, with every argument that refers to one, are more than a grammar may have."""
    pair = {"one": {"enum": [1]}, "two": {"type": "array", "items": {"$ref": "#/$defs/one"}}}
    parts = {f"part{place}": {"const": f"{place:0200}"} for place in range(100)}
    properties = {f"a{place}": {"$ref": "#/$defs/two"} for place in range(100)}
    made = grammar(name, tools=tool({"$defs": {**pair, **parts}, "properties": properties}), must_call=True)
    matcher(name, made)
    assert '{"enum": [1]}' in made
    assert "0001" not in made


@pytest.mark.parametrize("name", ["pythonic", "qwen_xml", "glm"])
def test_definitions_that_every_argument_repeats_are_too_much(name: str) -> None:
    """At once: all of them would be gigabytes."""
    words = {"enum": [f"{place:0200}" for place in range(500)]}
    properties = {f"a{place}": {"type": "array", "items": {"$ref": "#/$defs/words"}} for place in range(2000)}
    with pytest.raises(ValueError, match="the parameters of find: as a grammar, all tools have more than"):
        grammar(name, tools=tool({"$defs": {"words": words}, "properties": properties}))


TREE = {
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (TREE, 'name="a", children=[{"name": "b", "children": []}]', 'name="a", children=[[]]'),
        (
            {"properties": {"a": {"enum": ["x", "y"]}, "b": {"$ref": "#/properties/a"}}},
            'a="x", b="y"',
            'a="x", b="z"',
        ),
        (
            {"properties": {"a": {"anyOf": [{"enum": ["x"]}, {"const": 1}]}, "b": {"$ref": "#/properties/a/anyOf/0"}}},
            'a=1, b="x"',
            'a=1, b="y"',
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/Of%3CA%3E"}}, "$defs": {"Of<A>": {"enum": ["x"]}}},
            'a="x"',
            'a="y"',
        ),
        ({"properties": {"from": {"type": "string"}, "is": {"type": "integer"}}}, 'from="x", is=3', 'from="x", is="y"'),
    ],
)
def test_references_and_names_of_any_kind(parameters: dict[str, Any], good: str, bad: str) -> None:
    made = grammar("pythonic", tools=tool(parameters), must_call=True)
    assert takes("pythonic", made, f"[find({good})]")
    assert not takes("pythonic", made, f"[find({bad})]")


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"anyOf": [{"enum": ["hot", "cold"]}, {"type": "null"}]}, ("hot", "null"), ("warm",)),
        ({"type": ["string", "null"], "enum": ["hot", None]}, ("hot", "null"), ("warm", "3")),
        ({"enum": ["hot", 3]}, ("hot", "3"), ("4",)),
        ({"anyOf": [{"anyOf": [{"const": "hot"}, {"type": "integer"}]}, {"type": "boolean"}]}, ("hot", "7"), ("warm",)),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, ("any text", "null"), ()),
        ({"type": "string", "minLength": 5}, ("abcde",), ("abcd",)),
    ],
)
def test_arguments_of_several_types(value: dict[str, Any], good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    made = grammar("qwen_xml", tools=tool({"properties": {"a": value}}), must_call=True)
    for texts, allowed in ((good, True), (bad, False)):
        for text in texts:
            call = f"<tool_call>\n<function=find>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
            assert takes("qwen_xml", made, call) == allowed, text


@pytest.mark.parametrize("word", ["pattern", "format"])
def test_what_can_not_be_kept_of_one_of_several_types_is_refused(word: str) -> None:
    optional = {"anyOf": [{"type": "string", word: "date"}, {"type": "null"}]}
    with pytest.raises(ValueError, match=f"'{word}' can't be kept to"):
        grammar("qwen_xml", tools=tool({"properties": {"a": optional}}), strict=frozenset({"find"}))


def test_a_list_of_at_most_one() -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "maxItems": 1}
    made = grammar("gemma", tools=tool({"properties": {"a": numbers}}), must_call=True)
    for text, allowed in (("[]", True), ("[1]", True), ("[1,2]", False)):
        assert takes("gemma", made, f"<|tool_call>call:find{{a:{text}}}<tool_call|>") == allowed


def test_an_answer_begins_with_its_first_letter() -> None:
    """Readers drop white space behind reasoning, and nowhere else."""
    choice = 'start: "yes" | "no"'
    made = grammar("hermes", answer=choice)
    assert takes("hermes", made, "yes")
    assert not takes("hermes", made, "\n\nyes")
    thinking = grammar("deepseek", tools={}, answer=choice, thinking_tokens=9)
    assert takes("deepseek", thinking, "<think>so</think>\n\nyes")
    assert not takes("deepseek", thinking, "\n\nyes")


def test_an_answer_that_has_begun_goes_on() -> None:
    """Where answers stand between markers, those of its beginning are in the prompt."""
    for more, text in (({}, " world, and more"), ({"tools": {}, "answer": ANSWER}, '{"a":1}')):
        made = grammar("harmony", reasoning="closed", continues=True, **more)
        assert takes("harmony", made, text)
        assert not takes("harmony", grammar("harmony", reasoning="closed", **more), text)


def test_alternatives_that_refer_to_each_other_are_looked_at_once() -> None:
    """Each twice as often as the one before it would be a thousand million."""
    words = {f"w{place}": {"anyOf": [{"$ref": f"#/$defs/w{place + 1}"}] * 2} for place in range(30)}
    words["w30"] = {"anyOf": [{"const": "hot"}, {"type": "null"}]}
    made = grammar(
        "qwen_xml", tools=tool({"$defs": words, "properties": {"a": {"$ref": "#/$defs/w0"}}}), must_call=True
    )
    for text, allowed in (("hot", True), ("null", True), ("warm", False)):
        call = f"<tool_call>\n<function=find>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert takes("qwen_xml", made, call) == allowed


class Calls:
    """Counts how often a function is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self._function = getattr(module, name)
        self.count = 0
        monkeypatch.setattr(module, name, self)

    def __call__(self, *given: Any) -> Any:
        self.count += 1
        return self._function(*given)


@pytest.mark.parametrize("name", ["glm", "qwen_xml", "seed", "gemma", "pythonic"])
def test_what_many_alternatives_lead_to_is_looked_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [{"type": "number", "title": f"{place}"} for place in range(200)]
    # What has properties is no alternative of others, and has their types all the same.
    leading = [{"title": f"{place}", "properties": {}, "anyOf": [{"$ref": "#/$defs/n"}]} for place in range(200)]
    schema = {"properties": {"a": {"anyOf": [{"type": "string"}, *leading]}}, "$defs": {"n": {"anyOf": many}}}
    resolved = Calls(monkeypatch, schemas, "resolved")
    assert grammar(name, tools={"f": {"type": "object", **schema}})
    assert resolved.count < 8 * (len(many) + len(leading))


def test_an_argument_has_only_so_many_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    types = Calls(monkeypatch, schemas.SchemaTypes, "of")
    monkeypatch.setattr(schemas.SchemaTypes, "of", lambda self, schema: types(self, schema))
    many = {"anyOf": [{"const": f"{place}"} for place in range(8000)]}
    with pytest.raises(ValueError, match="the parameters of find: an argument may have 1000 alternatives"):
        grammar("glm", tools=tool({"properties": {"a": many}}))
    assert types.count < 1100


@pytest.mark.parametrize(
    ("name", "properties", "shared"),
    [
        ("gemma", {"title": "", "allOf": [{"$ref": "#/$defs/shared"}]}, {"allOf": [{"title": ""}] * 8000}),
        ("gemma", {"type": "object", "oneOf": [{"$ref": "#/$defs/shared"}]}, {"oneOf": [{"title": ""}] * 2000}),
    ],
)
def test_schemas_that_lead_to_too_many_others_are_refused(
    name: str, properties: dict[str, Any], shared: dict[str, Any]
) -> None:
    """Though nothing of all that is written."""
    shared = {word: [each | {"title": f"{place}"} for place, each in enumerate(many)] for word, many in shared.items()}
    either = {"anyOf": [properties | {"title": f"{place}"} for place in range(400)]}
    with pytest.raises(ValueError, match=r"the parameters of find: .* lead to more than 131072 schemas"):
        grammar(name, tools=tool({"$defs": {"shared": shared}, "properties": {"a": either}}))


def test_what_is_left_out_of_schemas_is_not_read_again_and_again() -> None:
    unused = {"title": "x" * 100_000, "not": {"title": "x" * 100_000}}
    properties = {f"a{place}": {"type": "array", "items": {"$ref": "#/$defs/unused"}} for place in range(200)}
    with pytest.raises(ValueError, match=r"the parameters of find: .* more than 8388608 characters to read"):
        grammar("glm", tools=tool({"$defs": {"unused": unused}, "properties": properties}))


def test_texts_that_every_argument_lists_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when all of them are written."""
    words = {"enum": [f"{place:0200}" for place in range(400)]}
    for value in ({"$ref": "#/$defs/words"}, {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/words"}]}):
        quoted = Calls(monkeypatch, argument_grammar, "quoted")
        with pytest.raises(ValueError, match="as a grammar, all tools have more than"):
            grammar("glm", tools=tool({"$defs": {"words": words}, "properties": {f"a{i}": value for i in range(100)}}))
        assert quoted.count < 4000


@pytest.mark.parametrize("name", ["hermes", "pythonic", "gemma", "qwen_xml"])
def test_a_large_schema_is_refused_before_anything_is_made_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [Calls(monkeypatch, argument_grammar, each) for each in ("closed", "joined", "resolved")]
    large = {"properties": {f"a{place}": {"type": "string", "description": "é" * 20} for place in range(4000)}}
    with pytest.raises(ValueError, match=r"the parameters of find: they have \d+ bytes, more than 262144"):
        grammar(name, tools=tool(large))
    assert not any(each.count for each in looks)

"""Replies are taken apart the same however they are cut, in every dialect, and nothing of them is lost."""

import json
import random
import typing
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dialect_samples
from support.dialect_samples import NAMES, TOOLS, Sample, dialect, samples
from support.replies import read_reply

from chairlift.config.sequences import ToolDialect
from chairlift.text import reply_reader, schemas
from chairlift.text.dialects import DIALECTS, find_dialect
from chairlift.text.reply_reader import DialectMarkers, DialectReader


def read(name: str, text: str, cuts: Iterable[int] = (), *, tools: dict[str, Any] = TOOLS, open_: bool = False) -> Any:
    """Content, reasoning and calls of a text that comes in pieces."""
    return read_reply(dialect(name), text, cuts, tools=tools, opened=open_)


def check(name: str, sample: Sample) -> Any:
    """Whole, it is what the message says."""
    whole = content, reasoning, calls = read(name, sample.text)
    assert [(called, json.loads(arguments)) for called, arguments in calls] == sample.calls, sample.text
    assert content.strip() == (sample.message["content"] or "")
    assert reasoning == sample.message.get("reasoning_content", "")
    return whole


@pytest.mark.parametrize("name", NAMES)
def test_each_text_gives_the_same_however_it_is_cut(name: str) -> None:
    dice = random.Random(1)
    for sample in samples(name, 8):
        whole, length = check(name, sample), len(sample.text)
        assert read(name, sample.text, range(length)) == whole
        for cut in range(1, length):
            assert read(name, sample.text, [cut]) == whole, (sample.text, cut)
        for _ in range(20):
            cuts = [dice.randrange(length + 1), dice.randrange(length + 1)]
            assert read(name, sample.text, cuts) == whole, (sample.text, cuts)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_conversations_cut_everywhere(name: str) -> None:
    dice = random.Random(2)
    for sample in samples(name, 100, seed=1):
        whole, length = check(name, sample), len(sample.text)
        for cut in range(1, length):
            assert read(name, sample.text, [cut]) == whole, (sample.text, cut)
        for _ in range(500):
            cuts = [dice.randrange(length + 1), dice.randrange(length + 1)]
            assert read(name, sample.text, cuts) == whole, (sample.text, cuts)


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_calls_are_text(name: str) -> None:
    sample = next(each for each in samples(name, 50) if each.calls)
    content, _, calls = read(name, sample.text, tools={})
    assert calls == []
    assert sample.calls[0][0] in content


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_no_tool_is_text(name: str) -> None:
    sample = next(each for each in samples(name, 50) if each.calls)
    content, _, calls = read(name, sample.text, tools={"other": {}})
    assert calls == []
    assert sample.calls[0][0] in content


_TOLD = {"hermes", "llama", "mistral", "mistral_nemo", "mistral_args", "deepseek", "deepseek_v31", "harmony"}
_TOLD |= {"granite", "phi", "command"}


@pytest.mark.parametrize("name", NAMES)
def test_what_ends_too_early_is_told_as_far_as_it_goes(name: str) -> None:
    """JSON is told as it comes; other notations are text until they are JSON."""
    sample = next(each for each in samples(name, 50) if each.calls and each.calls[0][1].get("guests"))
    place = sample.text.index("guests") + len("guests")
    content, _, calls = read(name, sample.text[:place])
    written = calls[-1][1] if name in _TOLD else content
    assert written.endswith("guests")


@pytest.mark.parametrize("name", ["hermes", "deepseek", "mistral_args", "gemma"])
def test_reasoning_that_the_prompt_has_opened(name: str) -> None:
    region = dialect(name).reasoning_content
    assert region is not None
    text = f"hm\n\n so{region.close[0]}\n\nyes\n"
    for cut in range(len(text) + 1):
        assert read(name, text, [cut], open_=True) == ("yes\n", "hm\n\n so", [])
    assert read(name, "cut off \n", open_=True) == ("", "cut off \n", [])


def test_a_broken_call_is_text_and_a_whole_one_behind_it_is_a_call() -> None:
    broken = "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n</oops>\n"
    whole = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert read("qwen_xml", broken + whole) == (broken.rstrip(), "", [("now", "{}")])


@pytest.mark.parametrize("bounded", [False, True])
def test_a_character_that_a_budget_cuts_is_left_out_however_its_text_is_cut(bounded: bool) -> None:
    text = "<think>a \ufffd b\ufffd \ufffd</think>\n\nc\ufffd"
    wanted = "a \ufffd b" if bounded else "a \ufffd b\ufffd \ufffd"
    for place in range(len(text)):
        found = read_reply(dialect("hermes"), text, [place, place], tools=TOOLS, bounded=bounded)
        assert found == ("c\ufffd", wanted, [])


BARE_CALL = "<function=now>\n</function>"
QUOTED = '<function=get_weather>\n<parameter=city>\n"</function>"\n</parameter>\n</function>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{BARE_CALL}\n</tool_call>", "", [("now", {})]),
        (BARE_CALL, "", [("now", {})]),
        (f"I will look.\n\n{BARE_CALL}\n</tool_call>\n", "I will look.", [("now", {})]),
        (f"{QUOTED}\n</tool_call>\n{BARE_CALL}", "", [("get_weather", {"city": '"</function>"'}), ("now", {})]),
        (f"<tool_call>\n{BARE_CALL}\n</tool_call>\n{BARE_CALL}\n</tool_call>", "", [("now", {})] * 2),
        (f"{BARE_CALL}\n\nand more", "and more", [("now", {})]),
        (BARE_CALL.replace("now", "other"), BARE_CALL.replace("now", "other"), []),
        ("`<function=now>` is what it writes", "`<function=now>` is what it writes", []),
        (QUOTED[:-5], QUOTED[:-5], []),
    ],
)
def test_qwen_s_calls_without_their_first_tag_are_calls(text: str, content: str, calls: list[Any]) -> None:
    for cuts in ([], range(len(text)), *([cut] for cut in range(len(text)))):
        said, _, found = read("qwen_xml", text, cuts)
        assert (said, [(name, json.loads(arguments)) for name, arguments in found]) == (content, calls)


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
@pytest.mark.parametrize(
    "call",
    [
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        '{ "name": "get_weather", "parameters": {"city": "Paris"} }',
        '{\n  "type" : "function" ,\n  "name" : "get_weather",\n  "parameters": {"city": "Paris"}\n}',
    ],
)
def test_llama_s_calls_are_read_in_every_shape(tag: str, call: str) -> None:
    for cut in range(len(tag + call)):
        assert read("llama", tag + call, [cut]) == ("", "", [("get_weather", '{"city": "Paris"}')])
    other = call.replace("get_weather", "other")
    assert read("llama", tag + other) == (tag + other, "", [])
    assert bool(read("llama", f"So: {tag}{call}")[2]) == bool(tag)


GRANITE = find_dialect("<think></think> and <response></response>", "auto")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>hm</think><response>Paris.</response>", "Paris."),
        ("<think>\nhm\n</think>\n\n<response>\nParis.\n</response>\n", "Paris.\n"),
        ("<think>hm</think>Use <response> tags.", "Use <response> tags."),
        ("<think>hm</think><response>Cut off", "Cut off"),
        ("<think>hm</think>Just so.</response>", "Just so.</response>"),
        ("<think>hm</think><respond>", "<respond>"),
    ],
)
def test_what_an_answer_stands_between_is_not_of_it(text: str, content: str) -> None:
    assert GRANITE is not None
    for cut in range(len(text)):
        said, thought, _ = read_reply(GRANITE, text, [cut], tools={})
        assert (said.strip(), thought.strip()) == (content.strip(), "hm")
    plain = find_dialect("<think></think>", "auto")
    assert plain is not None
    assert read_reply(plain, "<response>a</response>", tools={})[0] == "<response>a</response>"


def test_an_answer_that_the_prompt_has_begun_ends_as_others_do() -> None:
    for text in (" and more<|END_RESPONSE|>", " and more"):
        for cut in range(len(text)):
            found = read_reply(dialect("command"), text, [cut], tools=TOOLS, continues=True)
            assert found == (" and more", "", [])


@pytest.mark.parametrize("name", ["qwen_xml", "granite", "lfm2", "command"])
def test_where_calls_may_not_be_parallel_the_first_is_the_only_one(name: str) -> None:
    sample = next(each for each in samples(name, 50) if len(each.calls) > 1)
    for cut in range(0, len(sample.text), 3):
        content, _, calls = read_reply(dialect(name), sample.text, [cut], tools=TOOLS, parallel=False)
        assert [(called, json.loads(arguments)) for called, arguments in calls] == sample.calls[:1]
        assert sample.calls[1][0] in content


class Counted(str):
    """A text that counts the letters of all that is cut from it."""

    letters = 0

    def __radd__(self, before: str) -> "Counted":
        return Counted(before + str(self))

    def __getitem__(self, place: Any) -> "Counted":
        found = Counted(str(self)[place])
        Counted.letters += len(found)
        return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("calls", [False, True])
def test_no_letter_is_looked_at_again_and_again(name: str, calls: bool) -> None:
    found = dialect(name)
    form = found.tool_calls[0]
    head = form.begin + form.open
    call = next(each for each in samples(name, 200) if each.calls == [("now", {})] and not each.message["content"])
    text = call.text * 1000 if calls else head.lstrip()[0] * 3000
    Counted.letters = 0
    DialectReader(DialectMarkers(found, TOOLS), False).push(Counted(text))
    # A marker's length for each marker, at each place where one might begin.
    assert Counted.letters < 300 * len(text)


def test_what_began_like_calls_too_often_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough for what looks like a call once with its first tag, and once without.
    monkeypatch.setattr(reply_reader, "_MOST_AGAIN", 110)
    broken = "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n</oops>\n"
    for count, calls in ((1, 1), (2, 0)):
        text = broken * count + "<tool_call>\n<function=now>\n</function>\n</tool_call>"
        for cut in range(len(text)):
            assert len(read("qwen_xml", text, [cut])[2]) == calls


def test_types_of_tagged_arguments_follow_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"type": ["integer", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "list": {"$ref": "#/$defs/list"},
            "any": {},
        },
        "$defs": {"list": {"type": "array"}},
    }
    values = {"text": "12", "maybe": "null", "either": "7", "list": "[1]", "any": "no json"}
    tags = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    _, _, calls = read("glm", f"<tool_call>f\n{tags}</tool_call>", tools={"f": schema})
    expected = {"text": "12", "maybe": None, "either": 7, "list": [1], "any": "no json"}
    assert json.loads(calls[0][1]) == expected


_NO_VALUES = ["x", "1, 2", "a=b", "a={1, 2}", 'a="\\ud800"', "**{}", "a=f()", "a=" + "(" * 500]


def test_what_is_quoted_in_a_list_ends_no_argument() -> None:
    guests = '["a</arg_value>", "b"]'
    text = f"<tool_call>book\n<arg_key>guests</arg_key>\n<arg_value>{guests}</arg_value>\n</tool_call>"
    for cut in range(len(text) + 1):
        assert read("glm", text, [cut]) == ("", "", [("book", f'{{"guests": {guests}}}')])


def seed_call(**values: Any) -> str:
    """A call as Seed-OSS' template writes it: by Jinja, which has lists and objects as Python does."""
    tags = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<seed:tool_call>\n<function=f>\n{tags}</function>\n</seed:tool_call>"


def test_lists_in_pythons_notation_are_json() -> None:
    properties = {"list": {"type": "array"}, "object": {"type": "object"}, "any": {}, "text": {"type": "string"}}
    tools = {"f": {"type": "object", "properties": properties}}
    given = {
        "list": ["it's", 'a "b"', "]</parameter>", "[{('", None, True, 1.5, [], "é\n"],
        "object": {"a": [False, {"b": "{'"}], "c": 1},
        "any": [{"x": ["y"]}],
        "text": ["a"],
    }
    text = seed_call(**given)
    for cut in range(len(text) + 1):
        ((_, raw),) = read("seed", text, [cut], tools=tools)[2]
        assert json.loads(raw) == given | {"text": "['a']"}
    # JSON within the same tags stays as it is.
    as_json = {key: json.dumps(value) for key, value in given.items()}
    ((_, raw),) = read("seed", seed_call(**as_json), tools=tools)[2]
    assert json.loads(raw) == given | {"text": as_json["text"]}
    ((_, raw),) = read("seed", seed_call(list="[true, null, 'a']"), tools=tools)[2]
    assert json.loads(raw) == {"list": [True, None, "a"]}


@pytest.mark.parametrize(
    "value",
    [
        *("[f()]", "{1, 2}", "[1e999, None]", "[b'a']", "[x for x in 'ab']", "[2**9**9]", "[__import__('os')]"),
        *(f"{'[' * 300}'a'{']' * 300}", "[" + "-" * 60000 + "1]", f"['{'a' * 2**16}']", f"[{'9' * 5000}]"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_no_list_of_python_stays_text(value: str) -> None:
    tools = {"f": {"type": "object", "properties": {"list": {"type": "array"}}}}
    ((_, raw),) = read("seed", seed_call(list=value), tools=tools)[2]
    assert json.loads(raw) == {"list": value}


@pytest.mark.parametrize("arguments", _NO_VALUES)
def test_what_is_no_value_of_python_is_text(arguments: str) -> None:
    text = f"[now({arguments})]"
    content, _, calls = read("pythonic", text)
    assert (content, calls) == (text, [])


def _fragments(name: str) -> list[str]:
    found = dialect(name)
    pieces = [" ", "\n", "now", "{", "}", "{}", '"', "a", "[", "]", "(", ")", "<", ", "]
    for region in (found.reasoning_content, found.content, found.wrapper):
        pieces += [] if region is None else [*region.open, *region.close]
    for form in found.tool_calls:
        pieces += [*form.markers, form.begin + form.open + "now" + form.named]
    return [piece for piece in pieces if piece]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_any_text_gives_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(_fragments(name)), max_size=14)))
    whole = read(name, text)
    assert read(name, text, range(len(text))) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read(name, text, [cut]) == whole


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_of_a_text_without_calls_nothing_is_lost(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(_fragments(name)), max_size=14)))
    found = dialect(name)
    regions = [each for each in (found.reasoning_content, found.content, found.wrapper) if each is not None]
    if not any(marker.strip() in text for region in regions for marker in region.open):
        assert read(name, text, tools={"other": {}}) == (text, "", [])


def test_every_family_has_samples() -> None:
    assert set(NAMES) == set(DIALECTS)
    assert typing.get_args(ToolDialect) == ("auto", "none", *DIALECTS)
    for name in NAMES:
        found = find_dialect(dialect_samples.template(name), "auto")
        assert found is not None
        assert found.name == name


def test_arguments_may_be_called_by_pythons_own_words() -> None:
    tools = {"change": {"type": "object", "properties": {"from": {"type": "string"}, "is": {}}}}
    _, _, calls = read("pythonic", """[change(from="a(b=\\n", is={"in": [True, null]})]""", tools=tools)
    assert [(name, json.loads(raw)) for name, raw in calls] == [
        ("change", {"from": "a(b=\n", "is": {"in": [True, None]}})
    ]


def test_types_are_found_behind_any_number_of_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which is looked at once, however many arguments there are."""
    chain = {f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}]} for place in range(2000)}
    chain["d2000"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/d0"}]}
    chain["d1000"]["anyOf"].append({"type": "array"})
    properties = {"a": {"$ref": "#/$defs/d0"}, "b": {"$ref": "#/$defs/d1500"}, "c": {"anyOf": [{"type": "array"}]}}
    tools = {"f": {"type": "object", "properties": properties, "$defs": chain}}
    looked: list[Any] = []

    def watched(*given: Any) -> Any:
        looked.append(given)
        return resolved(*given)

    resolved = schemas.resolved
    monkeypatch.setattr(schemas, "resolved", watched)
    call = seed_call(a="12", b="[12]", c="[12]")
    *_, calls = read("seed", call * 100, range(0, 100 * len(call), 50), tools=tools)
    # Whatever leads round in a circle has the types of all that are in it.
    assert [json.loads(raw) for _, raw in calls] == [{"a": "12", "b": [12], "c": [12]}] * 100
    assert len(looked) < 2 * len(chain) + 2000


def test_types_of_arguments_are_found_behind_a_reference() -> None:
    properties = {"zip": {"type": "string"}, "floor": {"type": "integer"}}
    tools = {"find": {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": properties}}}}
    given = "<parameter=zip>\n12345\n</parameter>\n<parameter=floor>\n3\n</parameter>"
    _, _, calls = read("qwen_xml", f"<tool_call>\n<function=find>\n{given}\n</function>\n</tool_call>", tools=tools)
    assert [json.loads(raw) for _, raw in calls] == [{"zip": "12345", "floor": 3}]

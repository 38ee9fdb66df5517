"""Chat completions that call tools and reason, in OpenAI's shapes: one document, or deltas that add up to it."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import tokenizers
from llguidance import LLMatcher
from support.dialect_samples import TOOLS, template, tokens
from support.server_harness import INFO, Answer, FakeClient, Front

from chairlift.server.conversations import conversation
from chairlift.server.http.exchange import INLINE_SIZE
from chairlift.server.openai import answers
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.tokenizer import Tokenizer

SENT = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nhm, so\n</think>\n\nYes.\n"


def words(name: str = "hermes", source: str | None = None) -> Tokenizer:
    chat = ChatTemplate({"default": template(name) if source is None else source}, {})
    backend = tokenizers.Tokenizer.from_str(tokens(name)[0].to_str())
    return Tokenizer(backend, eos_ids=(2,), chat_template=chat)


def front(reply: str | list[int], name: str = "hermes", source: str | None = None) -> Front:
    """A server whose model says `reply`, a text or its tokens, and ends."""
    spoken = words(name, source)
    ids = spoken.encode(reply, add_special_tokens=False) if isinstance(reply, str) else reply
    client = FakeClient([*ids, 2])
    client.info = msgspec.structs.replace(INFO, vocab_size=spoken.vocab_size, max_model_len=1000)
    return Front(client, spoken)


def chat(reply: str | list[int], name: str = "hermes", source: str | None = None, **body: Any) -> tuple[Front, Answer]:
    made: list[Front] = []

    async def ask() -> Answer:
        made.append(front(reply, name, source))
        return await made[0].chat(**{"max_tokens": 150, **body})

    answer = asyncio.run(ask())
    return made[0], answer


def choice(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


def put_together(answer: Answer) -> dict[str, Any]:
    """The message that a stream's deltas are."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    for event in answer.events():
        delta = event["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            if delta.get(key):
                message[key] = (message.get(key) or "") + delta[key]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append({"id": call["id"], **call["function"]})
            else:
                assert set(call) == {"index", "function"}
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def test_calls_in_one_document() -> None:
    made, answer = chat(CALLS, tools=SENT)
    found = choice(answer)
    message = found["message"]
    assert found["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "days": 3}
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    assert "<tools>get_weather,book,now" in made.tokenizer.decode(made.client.requests[0].prompt_ids)
    assert made.client.requests[0].grammar is not None


def test_calls_in_deltas() -> None:
    _, answer = chat(CALLS, tools=SENT, stream=True)
    message = put_together(answer)
    assert message["content"] == "Let me see."
    assert [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]] == [
        ("get_weather", {"city": "Paris", "days": 3}),
        ("now", {}),
    ]
    assert answer.events()[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert answer.events()[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_calls_alone_have_no_content() -> None:
    _, answer = chat(CALLS.partition("\n")[2], tools=SENT)
    assert choice(answer)["message"]["content"] is None


def test_what_is_cut_off_says_so() -> None:
    _, answer = chat(CALLS, tools=SENT, max_tokens=40)
    found = choice(answer)
    assert found["finish_reason"] == "length"
    assert len(found["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "reason"), [(', "days', "stop"), ("}}\n</tool_call>x", "tool_calls")])
def test_a_stop_in_the_midst_of_a_call_is_no_call(stream: bool, stop: str, reason: str) -> None:
    """Nor does it matter that a call's end comes with that of the answer, since it may have been a stop's beginning."""
    call = CALLS.partition("\n")[2].partition("\n<tool_call>")[0]
    _, answer = chat(call, tools=SENT, stream=stream, stop=[stop])
    found = answer.events()[-1]["choices"][0] if stream else choice(answer)
    assert found["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_known_by_its_end_alone(stream: bool) -> None:
    _, answer = chat('[now(), get_weather(city="Paris", days=3)]', "pythonic", tools=SENT, stream=stream, stop=[")]x"])
    found = answer.events()[-1]["choices"][0] if stream else choice(answer)
    assert found["finish_reason"] == "tool_calls"


def test_samples_are_read_apart() -> None:
    _, answer = chat(CALLS, tools=SENT, n=2)
    first, second = answer.json()["choices"]
    assert len(first["message"]["tool_calls"]) == len(second["message"]["tool_calls"]) == 2
    ids = {call["id"] for each in (first, second) for call in each["message"]["tool_calls"]}
    assert len(ids) == 4


@pytest.mark.parametrize("name", ["mistral", "gemma", "harmony", "lfm2", "granite", "command"])
def test_markers_that_are_special_tokens_are_seen(name: str) -> None:
    written = {
        "lfm2": "<|tool_call_start|>[now()]<|tool_call_end|>",
        "granite": '<|tool_call|>[{"name": "now", "arguments": {}}]',
        "command": "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
        "gemma": "<|tool_call>call:now{}<tool_call|>",
        "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}",
    }
    _, answer = chat(written[name], name, tools=SENT)
    found = choice(answer)["message"]
    assert [call["function"] for call in found["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    assert found["content"] is None
    assert found.get("reasoning_content") == ("hm" if name in ("harmony", "command") else None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "calls", "content"), [(True, 2, "So:"), (False, 1, "So:<function=now>")])
def test_a_call_without_its_first_tag_is_a_call(stream: bool, parallel: bool, calls: int, content: str) -> None:
    said = "So:\n<function=now>\n</function>\n</tool_call>\n<function=now>\n</function>"
    _, answer = chat(said, "qwen_xml", tools=SENT, stream=stream, parallel_tool_calls=parallel)
    message = put_together(answer) if stream else choice(answer)["message"]
    assert len(message["tool_calls"]) == calls
    assert message["content"].startswith(content)
    end = answer.events()[-1]["choices"][0] if stream else choice(answer)
    assert end["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [None, SENT])
def test_markers_around_an_answer_are_not_of_it(stream: bool, tools: Any) -> None:
    said = "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    _, answer = chat(said, "command", tools=tools, stream=stream)
    message = put_together(answer) if stream else choice(answer)["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart_from_the_answer(stream: bool) -> None:
    made, answer = chat(THOUGHT, stream=stream)
    message = put_together(answer) if stream else choice(answer)["message"]
    assert message["reasoning_content"] == "hm, so"
    assert message["content"] == "Yes.\n"
    assert made.client.requests[0].grammar is None


def test_log_probabilities_are_of_all_tokens() -> None:
    _, answer = chat(THOUGHT, stream=True, logprobs=True)
    entries = [
        entry
        for event in answer.events()
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    _, whole = chat(THOUGHT, logprobs=True)
    assert len(entries) == len(choice(whole)["logprobs"]["content"]) == whole.json()["usage"]["completion_tokens"]


def test_without_calls_tools_are_not_shown() -> None:
    made, answer = chat(CALLS, tools=SENT, tool_choice="none")
    found = choice(answer)
    assert found["message"]["content"] == CALLS
    assert found["finish_reason"] == "stop"
    assert "<tools>" not in made.tokenizer.decode(made.client.requests[0].prompt_ids)
    assert made.client.requests[0].grammar is None


def allows(made: Front, text: str) -> bool:
    grammar = made.client.requests[0].grammar
    assert grammar is not None
    follows = LLMatcher(tokens("hermes")[1], grammar, log_level=0)
    ids = made.tokenizer.encode(text, add_special_tokens=False)
    return bool(follows.try_consume_tokens(ids) == len(ids) and follows.is_accepting())


def test_the_grammar_is_what_was_asked_for() -> None:
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    auto, _ = chat("x", tools=SENT)
    assert allows(auto, "hello")
    assert allows(auto, f"{one}\n{one}")
    required, _ = chat("x", tools=SENT, tool_choice="required")
    assert not allows(required, "hello")
    assert allows(required, f"<think>\nhm</think>\n\n{one}\n{one}")
    single, _ = chat("x", tools=SENT, tool_choice="required", parallel_tool_calls=False)
    assert allows(single, one)
    assert not allows(single, f"{one}\n{one}")
    named, _ = chat("x", tools=SENT, tool_choice={"type": "function", "function": {"name": "now"}})
    assert allows(named, one)
    assert not allows(named, one.replace("now", "book"))
    assert "<tools>get_weather,book,now" in named.tokenizer.decode(named.client.requests[0].prompt_ids)


def allowed(mode: str, *names: str, **more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}} | more


def test_only_allowed_tools_are_called() -> None:
    calls = {
        name: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in (("now", "{}"), ("get_weather", '{"city": "Paris", "days": 3}'))
    }
    auto, _ = chat("x", tools=SENT, tool_choice=allowed("auto", "now"))
    required, _ = chat("x", tools=SENT, tool_choice=allowed("required", "now", "now"))
    for made, free in ((auto, True), (required, False)):
        assert allows(made, "hello") is free
        assert allows(made, calls["now"])
        assert not allows(made, calls["get_weather"])
        assert "<tools>now" in made.tokenizer.decode(made.client.requests[0].prompt_ids)
    both, _ = chat("x", tools=SENT, tool_choice=allowed("required", "now", "get_weather"))
    assert all(allows(both, call) for call in calls.values())
    none, answer = chat("hello", tools=SENT, tool_choice=allowed("auto"))
    assert choice(answer)["message"]["content"] == "hello"
    assert "<tools>" not in none.tokenizer.decode(none.client.requests[0].prompt_ids)


def test_a_form_of_the_answer_follows_the_reasoning() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}}}
    made, answer = chat("<think>hm</think>\n\n{}", response_format=form)
    assert choice(answer)["message"]["content"] == "{}"
    assert allows(made, "<think>hm</think>\n\n{}")
    assert not allows(made, "<think>hm</think>\n\nhello")


def test_a_budget_bounds_the_reasoning() -> None:
    made, _ = chat("x", thinking_token_budget=2)
    assert allows(made, "<think>hm</think>\n\nhello")
    assert not allows(made, "<think>hm, this will take some time</think>\n\nhello")
    off, _ = chat("x", reasoning_effort="none")
    assert allows(off, "hello")
    assert not allows(off, "<think>hm</think>\n\nhello")


SWITCH = template("hermes").replace("{{ '<bot>' }}{%- endif %}", "{{ '<bot>' + enable_thinking | string }}{%- endif %}")
EFFORT = template("hermes").replace("{{ '<bot>' }}{%- endif %}", "{{ '<bot>' + reasoning_effort }}{%- endif %}")


@pytest.mark.parametrize(
    ("source", "body", "prompt"),
    [
        (SWITCH, {"enable_thinking": False}, "<bot>False"),
        (SWITCH, {"enable_thinking": True}, "<bot>True"),
        (SWITCH, {"reasoning_effort": "none"}, "<bot>False"),
        (SWITCH, {"chat_template_kwargs": {"enable_thinking": False}}, "<bot>False"),
        (EFFORT, {"reasoning_effort": "low"}, "<bot>low"),
    ],
)
def test_the_template_gets_what_it_knows_of_reasoning(source: str, body: Any, prompt: str) -> None:
    made, answer = chat("x", source=source, **body)
    assert answer.status == 200
    assert made.tokenizer.decode(made.client.requests[0].prompt_ids).endswith(prompt)


def test_a_prompt_may_open_the_reasoning() -> None:
    source = template("hermes").replace("{{ '<bot>' }}{%- endif %}", "{{ '<bot><think>\\n' }}{%- endif %}")
    made, answer = chat("hm</think>\n\nYes", source=source, thinking_token_budget=3)
    assert choice(answer)["message"]["reasoning_content"] == "hm"
    assert allows(made, "hm</think>\n\nYes")
    assert not allows(made, "Yes")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "</thinking"])
def test_a_budget_that_ends_within_a_character_leaves_none_of_it(stream: bool, stop: str | None) -> None:
    source = template("hermes").replace("{{ '<bot>' }}{%- endif %}", "{{ '<bot><think>\\n' }}{%- endif %}")
    cut = words().encode("hm \U0001f438", add_special_tokens=False)[:-1]
    rest = words().encode("</think>\n\nYes", add_special_tokens=False)
    # A stop string that is not there has what it may begin with held back.
    body = {"thinking_token_budget": len(cut), "stream": stream, "stop": stop}
    made, answer = chat([*cut, *rest], source=source, **body)
    message = put_together(answer) if stream else choice(answer)["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
    follows = LLMatcher(tokens("hermes")[1], made.client.requests[0].grammar, log_level=0)
    assert follows.try_consume_tokens([*cut, *rest]) == len(cut) + len(rest), "the grammar knows nothing of characters"
    _, plain = chat([*cut, *rest], source=source)
    assert choice(plain)["message"]["reasoning_content"] == "hm \ufffd", "the model's own doing is shown"


def test_gpt_oss_reasons_before_it_calls() -> None:
    source = template("harmony").replace("'<bot>'", "'<|end|><|start|>assistant'")
    made, _ = chat("x", "harmony", source=source, tools=SENT, tool_choice="required")
    grammar = made.client.requests[0].grammar
    assert grammar is not None
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for text in (call, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{call}"):
        follows = LLMatcher(tokens("harmony")[1], grammar, log_level=0)
        ids = made.tokenizer.encode(text, add_special_tokens=False)
        assert follows.try_consume_tokens(ids) == len(ids), text
        assert follows.is_accepting()


NO_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}"
UNKNOWN = NO_TOOLS + "{% if tools %}{{ tools[0].function.name }}{% endif %}"


def tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | function}]


@pytest.mark.parametrize(
    ("source", "body", "param", "said"),
    [
        (NO_TOOLS, {"tools": SENT}, "tools", "has no place for tools"),
        (UNKNOWN, {"tools": SENT, "tool_choice": "required"}, "tool_choice", "tool_dialect"),
        (NO_TOOLS, {"thinking_token_budget": 3}, "thinking_token_budget", "how this model reasons"),
        (NO_TOOLS, {"enable_thinking": True}, "enable_thinking", "how this model reasons"),
        (None, {"thinking_token_budget": -1}, "thinking_token_budget", "negative"),
        (None, {"reasoning_effort": "high"}, "reasoning_effort", "no degrees"),
        (None, {"tool_choice": "required"}, "tool_choice", "no tools"),
        (None, {"tools": SENT, "tool_choice": tool(name="other")[0]}, "tool_choice", "'other'"),
        (
            None,
            {"tools": SENT, "tool_choice": {"type": "function"}},
            "tool_choice.function",
            "takes the field function",
        ),
        (None, {"tools": SENT, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "the field"),
        (
            None,
            {"tools": SENT, "tool_choice": allowed("auto", "now", function={"name": "now"})},
            "tool_choice.allowed_tools",
            "and no other",
        ),
        (None, {"tools": SENT, "tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode", "'none'"),
        (None, {"tools": SENT, "tool_choice": allowed("required")}, "tool_choice", "no tools"),
        (
            None,
            {"tools": SENT, "tool_choice": allowed("auto", "now", "x" * 10_000)},
            "tool_choice.allowed_tools.tools[1].function.name",
            "none of the tools",
        ),
        (None, {"tools": tool(name="a b")}, "tools[0].function.name", "letters, digits"),
        (None, {"tools": tool() + tool()}, "tools[1].function.name", "twice"),
        (None, {"tools": tool(parameters={"type": "array"})}, "tools[0].function.parameters", "of an object"),
        (None, {"tools": [tool(name=f"f{i}")[0] for i in range(129)]}, "tools", "more than 128"),
        (None, {"tools": tool(parameters={"properties": {"a": {"const": "x" * 300_000}}})}, "tools", "bytes"),
        (None, {"functions": [{"name": "f"}]}, "functions", "not supported"),
    ],
)
def test_what_can_not_be_kept_to_is_refused_by_name(source: str | None, body: Any, param: str, said: str) -> None:
    _, answer = chat("x", source=source, **body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert said in answer.error["message"]


OPENED = template("hermes").replace("{{ '<bot>' }}{%- endif %}", "{{ '<bot><think>\\n' }}{%- endif %}")


@pytest.mark.parametrize(
    ("source", "body", "param"),
    [
        (None, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (None, {"thinking_token_budget": 5, "tools": SENT}, "thinking_token_budget"),
        (OPENED, {"enable_thinking": False}, "enable_thinking"),
        (OPENED, {"reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_reasoning_that_can_not_be_bounded_is_refused_by_the_field_that_was_sent(
    source: str | None, body: Any, param: str
) -> None:
    async def ask() -> Answer:
        made = front("x", source=source)
        made.service.model_dialect = msgspec.structs.replace(made.service.model_dialect, tokens={})
        return await made.chat(max_tokens=5, **body)

    answer = asyncio.run(ask())
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert answer.error["message"].startswith(f"{param}: the reasoning can't be bounded")


def test_a_model_that_does_not_reason_takes_an_effort_as_a_hint() -> None:
    made, answer = chat("hello", source=NO_TOOLS, reasoning_effort="high")
    assert choice(answer)["message"]["content"] == "hello"
    assert made.client.requests[0].grammar is None


@pytest.mark.parametrize("tool_choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_what_can_not_be_enforced_costs_no_request_unless_it_is_strict(tool_choice: Any) -> None:
    schema = {"type": "object", "properties": {"url": {"type": "string", "format": "uri"}}}
    _, answer = chat("x", "qwen_xml", tools=tool(parameters=schema), tool_choice=tool_choice)
    assert answer.status == 200, answer.body
    _, answer = chat("x", "qwen_xml", tools=tool(parameters=schema, strict=True), tool_choice=tool_choice)
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "'format' can't be kept to" in answer.error["message"]


class Sizes(list[int]):
    """The sizes of what was to be done off the loop."""

    async def off_loop(self, size: int, work: Callable[[], Any]) -> Any:
        self.append(size)
        return work()


@pytest.mark.parametrize(
    ("value", "is_slow"), [({"$ref": "#"}, True), ({"type": "string", "pattern": "a"}, True), ({}, False)]
)
def test_schemas_that_may_take_long_leave_the_loop(value: Any, is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes()
    monkeypatch.setattr(conversation, "off_loop", sizes.off_loop)
    _, answer = chat("x", tools=tool(parameters={"type": "object", "properties": {"a": value}}))
    assert answer.status == 200, answer.body
    assert (sizes[-1] > INLINE_SIZE) is is_slow


def test_a_long_text_is_taken_apart_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes()
    monkeypatch.setattr(answers, "off_loop", sizes.off_loop)
    _, answer = chat("hello " * 20)
    length = len(choice(answer)["message"]["content"])
    assert length > 100
    assert sizes[-2:] == [length, length]


def test_a_model_whose_calls_are_not_known_sees_tools_and_answers_text() -> None:
    made, answer = chat(CALLS, source=UNKNOWN, tools=SENT)
    assert choice(answer)["message"]["content"] == CALLS
    assert made.tokenizer.decode(made.client.requests[0].prompt_ids).endswith("get_weather")


def history(name: str) -> str:
    """The prompt of a conversation with a call and its result."""
    call = {"id": "call_0123456789", "type": "function", "function": {"arguments": '{"city": "Paris"}', "name": "f"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call], "reasoning": "hm"},
        {"role": "user", "tool_call_id": "call_0123456789", "content": "sunny"},
    ]
    made, answer = chat("x", name, messages=messages)
    assert answer.status == 200, answer.body
    return made.tokenizer.decode(made.client.requests[0].prompt_ids, skip_special_tokens=False)


def test_calls_in_the_conversation_are_written_as_the_template_writes_them() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<bot><think>\nhm\n</think>\n\n{call}<end>" in history("hermes")
    assert 'f\n```json\n{"city": "Paris"}\n```' in history("deepseek")
    assert "<|channel|>analysis<|message|>hm<|end|>" in history("harmony")
    written = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"city": "Paris"}}\n]'
    assert f"<|START_THINKING|>hm<|END_THINKING|>{written}<|END_ACTION|><end>" in history("command")
    assert '<bot><|tool_call_start|>[f(city="Paris")]<|tool_call_end|><end>' in history("lfm2")


def test_calls_in_the_conversation_are_text_where_the_template_has_no_place_for_them() -> None:
    call = '<|tool_call|>[{"name": "f", "arguments": {"city": "Paris"}}]'
    assert f"<bot>{call}<end>" in history("granite")
    assert f"<bot>{call}<|/tool_call|><end>" in history("phi")


@pytest.mark.parametrize("field", ["tool_plan", "thinking"])
def test_templates_have_names_of_their_own_for_the_reasoning(field: str) -> None:
    source = template("command").replace("reasoning_content", field)
    message = {"role": "assistant", "content": "Yes.", "reasoning": "hm"}
    made, answer = chat("x", "command", source=source, messages=[message])
    assert answer.status == 200, answer.body
    prompt = made.tokenizer.decode(made.client.requests[0].prompt_ids, skip_special_tokens=False)
    assert "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>" in prompt


def test_a_reply_of_gpt_oss_with_all_its_parts_can_be_sent_back() -> None:
    """Its template has a place for one text beside a call, and raises for two."""
    both = "{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both') }}{%- endif %}"
    source = template("harmony").replace("{%- if m.tool_calls %}", "{%- if m.tool_calls %}" + both)
    assert both in source
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    message = {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call]}
    for said, thought in (("Let me see.", False), (None, True)):
        made, answer = chat("x", "harmony", source=source, messages=[message | {"content": said}])
        assert answer.status == 200, answer.body
        prompt = made.tokenizer.decode(made.client.requests[0].prompt_ids, skip_special_tokens=False)
        assert ("<|channel|>analysis<|message|>hm<|end|>" in prompt) is thought


def test_an_answer_that_goes_on_from_a_refusal_echoes_it() -> None:
    said = [{"type": "refusal", "refusal": "No,"}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    _, answer = chat(" thanks", **body)
    assert choice(answer)["message"]["content"] == "No, thanks"


@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call", "is not supported; send tool_calls"),
        ({"audio": {"id": "audio_1"}}, "audio", "is not supported; send what was said as content"),
        ({"refusal": ["No."]}, "refusal", "must be text"),
        ({"refusal": "No.", "role": "tool"}, "refusal", "of the assistant"),
        ({"refusal": "No.", "content": "Yes."}, "refusal", "send one of them"),
    ],
)
def test_what_no_template_reads_of_a_message_is_refused_by_name(more: dict[str, Any], field: str, said: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None} | more]
    _, answer = chat("x", messages=messages)
    assert (answer.status, answer.error["param"]) == (400, f"messages[1].{field}")
    assert said in answer.error["message"]


def test_an_assistants_refusal_without_content_is_what_it_said() -> None:
    nothing = {"function_call": None, "audio": None, "tool_calls": None, "annotations": []}
    said = {"role": "assistant", "content": None, "refusal": "I can't.", **nothing}
    turns = [{"role": "user", "content": "hi"}, said]
    made, answer = chat("x", messages=[*turns, {"role": "user", "content": "?"}])
    assert answer.status == 200, answer.body
    assert "<bot>I can't.<end>" in made.tokenizer.decode(made.client.requests[0].prompt_ids, skip_special_tokens=False)
    body = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    _, answer = chat(" Sorry", **body)
    assert choice(answer)["message"]["content"] == "I can't. Sorry"


def test_ids_of_calls_are_short_where_the_template_wants_that() -> None:
    prompt = history("mistral")
    written = prompt.partition('"id": "')[2].partition('"')[0]
    assert len(written) == 9
    assert written.isalnum()
    assert history("mistral") == prompt


def test_a_plain_model_answers_as_before() -> None:
    made, answer = chat("hello", source=NO_TOOLS, tool_choice="auto", parallel_tool_calls=True)
    message = choice(answer)["message"]
    assert message == {"role": "assistant", "content": "hello", "refusal": None}
    assert made.client.requests[0].grammar is None


def test_where_usage_counts_up_each_step_is_one_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, answer = chat(CALLS, tools=SENT, stream=True, stream_options=options)
    message = [event for event in answer.events() if event["choices"]]
    counts = [event["usage"]["completion_tokens"] for event in message]
    assert counts == sorted(set(counts))
    names = [call for event in message for call in event["choices"][0]["delta"].get("tool_calls", ()) if "id" in call]
    assert [call["function"]["name"] for call in names] == ["get_weather", "now"]
    assert message[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_message_that_is_continued_has_no_reasoning_before_it() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    made, answer = chat(" yes", tools=SENT, tool_choice="required", **body)
    assert choice(answer)["message"]["content"] == "Well, yes"
    assert not allows(made, "<think>hm</think>\n\n" + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')

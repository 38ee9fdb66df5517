"""Tools through the `openai` client and a real server. With a template that is not its own the demo model knows nothing
of them, so all its calls are made by the grammar; as it comes it calls the two that it was trained to call."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.dialect_samples import TOOLS, template
from support.serve_process import Server

from chairlift.demo import demo_path

pytestmark = pytest.mark.processes
SENT = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("tools") / "demo"
    shutil.copytree(demo_path(), folder)
    (folder / "chat_template.jinja").write_text(template("hermes"))
    with Server(str(folder), "--kv-cache-gb", "0.05", "--num-threads", "1") as running:
        running.wait_ready(120)
        yield running


@pytest.mark.parametrize("choice", ["required", "now", "get_weather"])
def test_calls_are_valid_streamed_or_not(server: Server, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    asked = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": SENT,
        "tool_choice": choice if choice == "required" else named,
        "parallel_tool_calls": False,
        "seed": 3,
        "max_tokens": 400,
        "reasoning_effort": "none",
    }
    whole = server.openai.chat.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    pieces = list(server.openai.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    function = whole.message.tool_calls[0].function
    if choice != "required":
        assert function.name == choice
    if whole.finish_reason == "tool_calls":
        assert whole.message.content is None
        jsonschema.validate(json.loads(function.arguments), TOOLS[function.name])
    deltas = [each.choices[0].delta.tool_calls[0].function for each in pieces if each.choices[0].delta.tool_calls]
    assert deltas[0].name == function.name
    assert "".join(delta.arguments for delta in deltas) == function.arguments
    assert pieces[-1].choices[0].finish_reason == whole.finish_reason


def test_a_call_without_arguments_comes_to_its_end(server: Server) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    answer = server.openai.chat.completions.create(  # type: ignore[call-overload]
        model="demo", messages=MESSAGES, tools=SENT, tool_choice=named, max_tokens=400, reasoning_effort="none"
    )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})
    assert answer.choices[0].finish_reason == "tool_calls"
    follow_up = [
        *MESSAGES,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    assert server.openai.chat.completions.create(model="demo", messages=follow_up, tools=SENT, max_tokens=3).choices  # type: ignore[call-overload]


def test_a_strict_schema_that_no_grammar_can_hold_is_refused(server: Server) -> None:
    body = {
        "model": "demo",
        "messages": MESSAGES,
        "tool_choice": "required",
        "max_tokens": 60,
        "reasoning_effort": "none",
    }
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    answer = server.http.post("/v1/chat/completions", json=body | {"tools": [tool("f", schema, strict=True)]})
    assert answer.status_code == 400
    assert "uniqueItems" in answer.json()["error"]["message"]
    assert "tool f: " in answer.json()["error"]["message"]
    answer = server.http.post("/v1/chat/completions", json=body | {"tools": [tool("f", schema)]})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a"')


def tool(name: str, schema: object, **more: object) -> object:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


OWN = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
    },
    "calculate": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
WITH_OWN = {"model": "demo", "tools": [tool(name, OWN[name]) for name in OWN], "temperature": 0, "max_tokens": 200}
RIGHT = [
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("What is the temperature in Oslo in Fahrenheit?", "get_weather", {"city": "Oslo", "unit": "fahrenheit"}),
    ("What is 347 * 29?", "calculate", {"expression": "347 * 29"}),
]


def asked(question: str, **fields: object) -> dict[str, Any]:
    return {**WITH_OWN, "messages": [{"role": "user", "content": question}], **fields}


@pytest.mark.parametrize(("question", "name", "given"), RIGHT)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_demo_model_calls_the_right_tool(
    demo_server: Server, question: str, name: str, given: dict[str, str], choice: str
) -> None:
    body = asked(question, tool_choice=choice)
    whole = demo_server.openai.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, given)
    with demo_server.openai.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    [again] = streamed.message.tool_calls
    assert (again.function.name, again.function.arguments) == (name, call.function.arguments)
    assert (streamed.finish_reason, streamed.message.content or None) == ("tool_calls", whole.message.content)


def test_the_demo_model_answers_with_what_a_tool_gives(demo_server: Server) -> None:
    body = asked("What is the weather in Paris?")
    called = demo_server.openai.chat.completions.create(**body).choices[0].message
    given = {
        "role": "tool",
        "tool_call_id": called.tool_calls[0].id,
        "content": '{"temperature": 21, "condition": "sunny"}',
    }
    body["messages"] += [called, given]
    [choice] = demo_server.openai.chat.completions.create(**body).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == "In Paris it is sunny, and the temperature is 21 degrees."


def test_the_call_of_the_guide(demo_server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = demo_server.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[tool("get_weather", schema)],
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("stream", [False, True])
def test_the_demo_model_leaves_tools_alone_where_none_is_needed(demo_server: Server, stream: bool) -> None:
    body = asked("What is the capital of France?", stream=stream)
    made = demo_server.openai.chat.completions.create(**body)
    if stream:
        deltas = [piece.choices[0].delta for piece in made]
        assert not any(delta.tool_calls for delta in deltas)
        text = "".join(delta.content or "" for delta in deltas)
    else:
        text = made.choices[0].message.content
    assert text == "The capital of France is Paris."


def test_the_demo_model_must_call_where_it_would_not(demo_server: Server) -> None:
    named = {"type": "function", "function": {"name": "calculate"}}
    body = asked("Hello!", tool_choice=named)
    [choice] = demo_server.openai.chat.completions.create(**body).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["calculate"]
    assert choice.message.content is None
